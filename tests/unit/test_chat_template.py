"""Chat templates write what transformers writes, and no template can take the process with it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from octavo.errors import ChatTemplateError, InvalidParameterError
from octavo.limits import MAX_TEMPLATE_CHARS, MAX_TEMPLATE_STEPS
from octavo.tokenizer import Tokenizer
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.template_meter import METER_KEY, Meter
from octavo.tokenizer.template_sandbox import TemplateEnvironment
from octavo.weights.assets import TokenizerAssets
from tests.support.pace import takes_at_most
from tests.support.template_bombs import BOMBS, HARMLESS
from tests.support.tokenizer_golden import byte_level_metadata

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **variables)


def tokenizer(template: str | None) -> Tokenizer:
    return Tokenizer.from_assets(TokenizerAssets("gguf", None, byte_level_metadata("smollm"), template))


def test_a_conversation_is_rendered_and_encoded_with_its_control_tokens() -> None:
    chat = tokenizer(CHATML)
    text = chat.apply_chat_template(HELLO)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    ids = chat.encode_chat(HELLO)
    assert ids == chat.encode(text)
    assert ids.count(1) == 2
    assert chat.apply_chat_template(HELLO, add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"


def test_no_begin_token_is_added_to_what_the_template_wrote() -> None:
    metadata = byte_level_metadata("llama-bpe")
    chat = Tokenizer.from_assets(TokenizerAssets("gguf", None, metadata, "{{ bos_token }}x"))
    assert chat.encode("x")[0] == 1
    assert chat.encode_chat(HELLO) == chat.encode("x")


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer(None).apply_chat_template(HELLO)


# The expectations were checked against transformers 5.24 (apply_chat_template of the same source).
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].role }}{{ eos_token }}{{ unknown_name }}", "<s>user</s>"),
        ("a\n{% if true %}\nb\n{% endif %}\nc", "a\nb\nc"),
        ("  {%- set x = 1 %}\n  {% if x %}y{% endif %}", "y"),
        ("{{ {'b': 'é<&>', 'a': [1, none, true]} | tojson }}", '{"b": "é<&>", "a": [1, null, true]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ [2, 1] | tojson(separators=(',', ':')) }}", "[2,1]"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}", "13"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hello!"),
        ("{% macro m(x, y=2) %}{{ x ~ y }}{% endmacro %}{{ m(1) }}{{ m(3, y=4) }}", "1234"),
        ("{% set ns = namespace(n=0) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "6"),
        ("{% for m in messages[::-1] %}{{ loop.index0 }}{{ loop.last }}{{ m.content | trim | upper }}{% endfor %}",
         "0TrueHELLO"),
        ("{% set a, b = 'x</think>y'.split('</think>') %}{{ a.strip() }}{{ b.lstrip('\n') }}", "xy"),
        ("{{ 'user' in ['user', 'tool'] }} {{ 'x' not in 'abc' }} {{ 'role' in messages[0] }} {{ 1 < 2 < 3 }}",
         "True True True True"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages | map(attribute='content') | join(', ') }}", "Hello"),
        ("{{ 'a-b'.replace('-', '+') }}{{ 'x' * 3 }}{{ '%s=%d' % ('k', 5) }}{{ '{}:{:>3}'.format('a', 1) }}",
         "a+bxxxk=5a:  1"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'a\nb' | indent(2, true) }}", "a\n  b|  a\n  b"),
        ("{{ messages[0].get('name', 'none') }}{% for k, v in {'a': 1} | items %}{{ k }}{{ v }}{% endfor %}", "nonea1"),
        ("{% filter upper %}abc{% endfilter %}{% set x %}q{{ 1 }}{% endset %}{{ x }}", "ABCq1"),
        ("{% for n in [[1, [2]], 3] recursive %}{% if n is iterable %}[{{ loop(n) }}]{% else %}{{ n }}{% endif %}"
         "{% endfor %}", "[1[2]]3"),
        ("{% if x is defined %}no{% elif messages[0].content is string %}yes{% endif %}", "yes"),
        ("{{ [3, 1, 2] | sort | join }}{{ {'b': 1, 'a': 2} | dictsort }}", "123[('a', 2), ('b', 1)]"),
        ("{{ [1, 2] | sum }}", "3"),
        ("{{ true }}{{ none }}{{ 1.5 }}{{ [1, 'a'] }}", "TrueNone1.5[1, 'a']"),
        ("{% call(x) m() %}<{{ x }}>{% endcall %}{% macro m() %}{{ caller(7) }}{% endmacro %}", None),
        ("{% macro m() %}{{ caller(7) }}{% endmacro %}{% call(x) m() %}<{{ x }}>{% endcall %}", "<7>"),
        ("{% for i in range(5) if i is odd %}{{ i }}{% else %}none{% endfor %}", "13"),
        ("{{ messages | length > 0 and messages[0]['content'] | length == 5 }}", "True"),
        ("{{ -(2 ** 3) + 7 % 4 // 1 }}{{ 7 / 2 }}", "-53.5"),
    ],
)  # fmt: skip
def test_templates_write_what_transformers_writes(source: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(ChatTemplateError):
            render(source)
    else:
        assert render(source) == expected


def test_dates_are_formatted() -> None:
    assert render("{{ strftime_now('%Y') }}") in {time.strftime("%Y"), str(int(time.strftime("%Y")) + 1)}


def test_variables_reach_the_template() -> None:
    assert render("{{ tools[0].name }}{{ enable_thinking }}", tools=[{"name": "f"}], enable_thinking=False) == "fFalse"


def test_text_parts_are_joined_for_templates_that_expect_strings() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render("{{ messages[0].content }}", parts) == "a\nb"


@pytest.mark.parametrize(
    "loop",
    [
        "{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}",
        "{% for part in messages[0]['content'] | list %}<{{ part['text'] }}>{% endfor %}",
        "{% set c = messages[0].content %}{% for part in c %}<{{ part.text }}>{% endfor %}",
        "{% macro show(content) %}{% for p in content %}<{{ p.text }}>{% endfor %}{% endmacro %}"
        "{{ show(messages[0].content) }}",
    ],
)
def test_text_parts_are_kept_for_templates_that_walk_through_them(loop: str) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(loop, parts) == "<a><b>"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("Hello", "messages="),
        ([], "messages="),
        (["Hello"], r"messages\[0\]="),
        ([{"content": "x"}], r"messages\[0\]\.role=None"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]\.role=1"),
        ([*HELLO, {"role": "user"}], r"messages\[1\]\.content=None"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content=5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content\[0\]="),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]="),
    ],
)
def test_malformed_messages_are_refused_by_field(messages: Any, field: str) -> None:
    with pytest.raises(InvalidParameterError, match=field):
        render("x", messages)


def test_an_assistant_message_may_hold_tool_calls_instead_of_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    source = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    assert render(source, [*HELLO, call]) == '{"a": 1}'


def test_what_the_template_refuses_reaches_the_user_in_its_words() -> None:
    with pytest.raises(ChatTemplateError, match="refuses this conversation: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_with_an_error_says_where() -> None:
    with pytest.raises(ChatTemplateError, match="cannot be read at line 3"):
        render("a\nb\n{% for %}")
    with pytest.raises(ChatTemplateError, match="cannot be read at line 1: No filter named 'nonsense'"):
        render("{{ 1 | nonsense }}")
    with pytest.raises(ChatTemplateError, match="failed: 'x' is undefined"):
        render("{{ x.y.z }}")


def test_a_template_cannot_change_the_messages() -> None:
    messages = [{"role": "user", "content": "x", "extra": [1]}]
    for source in ("{{ messages[0].extra.append(2) }}", "{{ messages[0].update({'role': 'y'}) }}"):
        with pytest.raises(ChatTemplateError, match="unsafe"):
            render(source, messages)
    assert messages == [{"role": "user", "content": "x", "extra": [1]}]


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_hostile_template_ends_quickly_with_an_error(name: str) -> None:
    start = time.process_time()
    with pytest.raises(ChatTemplateError):
        render(BOMBS[name])
    assert takes_at_most(time.process_time() - start, 1.0)


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_template_that_looks_hostile_gets_nothing(name: str) -> None:
    assert render(HARMLESS[name]) == ""


def test_a_template_that_is_too_long_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="characters, allowed are"):
        render("x" * (MAX_TEMPLATE_CHARS + 1))


def test_a_long_conversation_is_within_the_bounds() -> None:
    messages = [{"role": role, "content": "word " * 100} for _ in range(1000) for role in ("user", "assistant")]
    assert render(CHATML, messages).count("word ") == 200_000


def test_a_rendering_costs_the_same_steps_every_time() -> None:
    template = TemplateEnvironment().from_string(CHATML)

    def cost(count: int) -> int:
        meter = Meter()
        template.render({"messages": HELLO * count, METER_KEY: meter})
        return MAX_TEMPLATE_STEPS - meter.steps_left

    assert cost(100) == cost(100)
    assert cost(200) - cost(100) == cost(100) - cost(0) > 1000
