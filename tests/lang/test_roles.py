"""Turns are written by the model's own template, and what is written stays the beginning of all that follows."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import (
    LLM,
    ProgramState,
    SamplingParams,
    assistant,
    assistant_begin,
    assistant_end,
    function,
    gen,
    select,
    system,
    user,
    user_begin,
    user_end,
)
from octavo.errors import ChatTemplateError
from octavo.lang.transcript import Transcript
from octavo.lang.turns import Turns
from octavo.tokenizer.chat_template import ChatTemplate

PARAMS: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@function
def by_calls(s: ProgramState) -> None:
    s += system("Be brief.")
    s += user("hi")
    s += assistant(gen("a", **PARAMS))
    s += user("more")
    s += assistant(gen("b", **PARAMS))


@function
def by_blocks(s: ProgramState) -> None:
    with s.system():
        s += "Be brief."
    with s.user():
        s += "hi"
    with s.assistant():
        s += gen("a", **PARAMS)
    s.user("more")
    with s.assistant():
        s += gen("b", **PARAMS)


@function
def by_ends(s: ProgramState) -> None:
    s.system_begin()
    s += "Be brief."
    s.system_end()
    s += user_begin() + "hi" + user_end()
    s += assistant_begin()
    s += gen("a", **PARAMS)
    s += assistant_end()
    s.user_begin()
    s += "more"
    s.user_end()
    s.assistant_begin()
    s += gen("b", **PARAMS)
    s.assistant_end()


@pytest.mark.parametrize("program", [by_calls, by_blocks, by_ends], ids=["calls", "blocks", "ends"])
def test_a_conversation_gives_the_bits_of_llm_chat(llm: LLM, program: Any) -> None:
    state = program.run()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    first = llm.chat(messages, SamplingParams(**PARAMS), use_tqdm=False)[0]
    assert state["a"] == first.outputs[0].text
    messages += [{"role": "assistant", "content": state["a"]}, {"role": "user", "content": "more"}]
    assert state.messages() == [*messages, {"role": "assistant", "content": state["b"]}]
    assert state.text() == llm.tokenizer.apply_chat_template(state.messages(), add_generation_prompt=False)


def test_each_call_finds_the_whole_of_the_call_before_in_the_cache(llm: LLM) -> None:
    state = by_calls.run()
    first, second = state.get_meta_info("a"), state.get_meta_info("b")
    assert second["cached_tokens"] == first["prompt_tokens"] + first["completion_tokens"] - 1  # the last has no KV yet


CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nDefault.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {% if loop.first and sys %}<<SYS>>\n{{ sys }}\n"
    "<</SYS>>\n\n{% endif %}{{ m.content }} [/INST]{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


def turns_of(source: str) -> Turns:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return Turns(lambda messages, opens: template.render(messages, add_generation_prompt=opens))


def written(source: str, messages: list[tuple[str, str]], *, generates: bool) -> str:
    """As a program writes them; the assistant's by the model or not."""
    turns, text, roles = turns_of(source), "", ()
    for role, content in messages:
        text += turns.opening(roles, role, generates and role == "assistant") + content
        roles = (*roles, role)
    return text + turns.closing(roles)


TALK = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]


@pytest.mark.parametrize("source", [CHATML, LLAMA3, LLAMA2], ids=["chatml", "llama3", "llama2"])
@pytest.mark.parametrize("talk", [TALK, [("system", "zero"), *TALK]], ids=["", "system"])
def test_what_is_written_is_what_the_template_renders(source: str, talk: list[tuple[str, str]]) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    rendered = template.render([{"role": role, "content": content} for role, content in talk])
    assert written(source, talk, generates=False) == rendered
    if source != LLAMA2:  # it renders no space where the model is to write, and one before what it has written
        assert written(source, talk, generates=True) == rendered


def test_a_template_that_takes_thoughts_back_does_not_change_what_was_written() -> None:
    text = written(THINKS, TALK, generates=True)
    assert text == (
        "<user>one</user><assistant><think>two</assistant><user>three</user><assistant><think>four</assistant>"
    )


FOLDS = (
    "{% set ns = namespace(sys='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.sys = m.content %}"
    "{% elif m.role == 'user' %}[INST]{% if ns.sys and loop.last %}{{ ns.sys }}\n{% endif %}{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


def test_a_system_prompt_that_a_template_moves_to_the_last_turn_stays_where_it_was_written() -> None:
    text = written(FOLDS, [("system", "zero"), *TALK[:3]], generates=True)
    assert text == "[INST]zero\none[/INST]two</s>[INST]three[/INST]"


def test_an_order_of_roles_that_the_template_refuses_is_told() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        written(LLAMA2, [("user", "one"), ("user", "two")], generates=False)


def test_a_template_that_hides_a_role_is_told() -> None:
    with pytest.raises(ChatTemplateError, match="does not write the content of a system turn"):
        written(
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
            [("system", "x")],
            generates=False,
        )


def test_a_turn_behind_other_text_does_not_begin_the_prompt_again() -> None:
    template = ChatTemplate(LLAMA3, {"bos_token": "<s>"})
    turns = Turns(lambda messages, opens: template.render(messages, add_generation_prompt=opens), lambda: "<s>")
    transcript = Transcript(turns)
    transcript.write("Title\n")
    transcript.begin_turn("user")
    transcript.write("hi")
    transcript.end_turn("user")
    assert transcript.text() == "Title\n<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    assert not transcript.prompt().chat  # the tokenizer puts BOS before it


def test_text_may_stand_before_between_and_behind_turns(llm: LLM) -> None:
    @function
    def mixed(s: ProgramState) -> None:
        s += "Title\n"
        s += user("hi")
        s += "note\n"
        s += assistant("yes" + select("x", [" a", " b"]))
        s += "end"

    state = mixed.run()
    assert state.text() == f"Title\nuser: hi\nnote\nassistant: yes{state['x']}\nend"
