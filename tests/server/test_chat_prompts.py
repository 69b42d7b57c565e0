"""Conversations as prompts: what a body may set in the template, and where a message that goes on is cut."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidParameterError
from octavo.server.prompts import render_chat
from octavo.tokenizer import Tokenizer
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.template_meter import METER_KEY
from tests.support.live_server import LiveServer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = CHATML.replace("m.content", "m.content | trim")
REPEATS = CHATML + "remember: {{ messages[-1].content }} end"
SHOUTS = CHATML.replace("m.content", "m.content | upper")
OPENING = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

contents = st.one_of(
    st.sampled_from(["", "end", "<|im_end|>", "<", "im_", "assistant", "\n", " ", "hi", "|>\n", "end ", "  end"]),
    st.text(alphabet="<|im_end>\n h", max_size=8),
    st.text(max_size=8),
)


def rendered(template: str, content: Any, **options: Any) -> str:
    tokenizer = SimpleNamespace(apply_chat_template=ChatTemplate(template, {}).render)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": None, "continue_final_message": True, **options}
    return render_chat(SimpleNamespace(tokenizer=tokenizer), messages, **options)  # type: ignore[arg-type]


@given(contents)
def test_a_message_goes_on_right_behind_its_content_whatever_that_is(content: str) -> None:
    assert rendered(CHATML, content) == OPENING + content
    assert rendered(CHATML, [{"type": "text", "text": "a"}, {"type": "text", "text": content}]) == (
        OPENING + "a\n" + content
    )
    assert rendered(TRIMS, content) == OPENING + content.strip()
    assert rendered(SHOUTS, content) == OPENING.replace("hi", "HI") + content.upper()
    assert rendered(REPEATS, content) == f"{OPENING}{content}<|im_end|>\nremember: {content}"


@pytest.mark.parametrize("content", [None, [], [{"type": "image_url", "image_url": {"url": "x"}}], 5, ["x"]])
def test_a_last_message_without_text_cannot_go_on(content: Any) -> None:
    with pytest.raises(InvalidParameterError):
        rendered(CHATML, content)


def test_a_template_that_leaves_the_last_message_out_cannot_go_on() -> None:
    with pytest.raises(InvalidParameterError, match="continue_final_message"):
        rendered("{{ messages[0].content }}", "hi")


def test_the_message_that_goes_on_is_not_changed() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "so"}]}]
    tokenizer = SimpleNamespace(apply_chat_template=ChatTemplate(CHATML, {}).render)
    state: Any = SimpleNamespace(tokenizer=tokenizer)
    render_chat(state, messages, add_generation_prompt=None, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": [{"type": "text", "text": "so"}]}]


# Variables of the template


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


OWN = (
    parameters(Tokenizer.apply_chat_template) | parameters(ChatTemplate.render) | {"bos_token", "eos_token", METER_KEY}
)
JINJAS = {
    *("loop", "super", "caller", "varargs", "kwargs", "context", "environment", "eval_ctx", "blocks", "name", "vars"),
    *("range", "namespace", "dict", "raise_exception", "strftime_now", "None", "True", "class", "def", "m", "resolve"),
    *("root", "globals", "shared", "locals", "args", "l_0_messages", "_", "__class__", "", "a b", "é", "a" * 5000),
}


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("name", sorted(OWN | JINJAS))
def test_no_name_of_a_template_variable_is_a_server_error(live: LiveServer, name: str, route: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "chat_template_kwargs": {name: 1}}
    response = httpx.post(live.url + route, json=body, timeout=20)
    assert response.status_code in (200, 400), response.text
    if name in OWN - {"variables"}:  # that one holds the others, and is free to be one of them
        assert response.json()["error"]["param"] == "chat_template_kwargs"
