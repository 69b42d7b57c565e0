"""Regular expressions, choices and grammars: their language is what they say; bombs are refused and stop nobody."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from octavo import limits
from octavo.errors import InvalidParameterError
from octavo.grammar import GrammarCompiler
from octavo.grammar.gbnf import is_gbnf, lark_from_gbnf
from octavo.grammar.vocabulary import Vocabulary
from octavo.structured import StructuredOutputs
from octavo.tokenizer import Tokenizer
from tests.exact.machine import Model
from tests.support.engines import EOS, Inbox, engine_of, load_tiny, submit
from tests.support.pace import takes_at_most
from tests.unit.test_grammar_schema import takes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(model: Model) -> Tokenizer:
    return model.tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: Vocabulary(tokenizer, tokenizer.vocab_size, {EOS}))


def texts(model: Model, structured: dict[str, Any], count: int = 6) -> list[str]:
    """What a model with random weights says; texts cut at max_tokens are left out."""
    with engine_of(model, num_blocks=256) as engine:
        inboxes: list[Inbox] = [
            submit(engine, f"r{i}", [5, 6], structured=structured, seed=i, max_tokens=120, logprobs=None, streams=False)
            for i in range(count)
        ]
        while engine.has_work():
            engine.step()
    outputs = [inbox.output for inbox in inboxes]
    for output in outputs:  # this vocabulary has not all bytes: a character may be begun that it can't end
        assert output.error is None or "vocabulary" in str(output.error), output.error
    return [output.outputs[0].text for output in outputs if output.outputs[0].finish_reason == "stop"]


REGEXES = [
    r"[a-z]{3,8}",
    r"(yes|no|maybe)( please)?",
    r"\d{3}-\d{4}",
    r"(ab|a)(c|bcd)[xy]?",
    r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,2})?",
    r"[^a-y\n]{1,5}",
    r"(?i:abc)+x{2}",
    r"\{\"a\": [0-9]\}",
    r"a{0,3}b{2}c?",
    r"(foo){2}|(bar){1,3}",
    r".{1,4}",
    r"é{1,2}€",
    r"\w{2}\s\S",
    r"[\[\]()-]{2}",
]


@pytest.mark.parametrize("regex", REGEXES)
def test_what_is_said_matches_the_regular_expression(model: Model, regex: str) -> None:
    found = texts(model, {"regex": regex})
    assert found
    for text in found:
        assert re.fullmatch(regex, text), text


def test_a_choice_is_one_of_them_whatever_they_hold(model: Model) -> None:
    choices = ["a", "ab", 'quote " and \\ backslash', "new\nline", "é€", "{}", "(a|b)*", "/x/", "%y"]
    found = texts(model, {"choice": choices}, 24)
    assert set(found) <= set(choices)
    assert len(set(found)) > 3
    for choice in choices:
        assert texts(model, {"choice": [choice]}, 1) == [choice]


# GBNF

GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "a" | "b"', ["a", "b"], ["", "ab"]),
    ("root ::= [a-c]+ [^a-z]?", ["a", "abc1", "c"], ["", "a1b", "d"]),
    ('root ::= ("x" | "yz"){2,3} "!"*', ["xx", "yzxyz!!"], ["x", "xxxx"]),
    ('root ::= [a-z]* "b"', ["b", "aab", "bbb"], ["", "a"]),
    ('root ::= "q" ( | "r")', ["q", "qr"], ["qq"]),
    (
        'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= num | "(" expr ")"\nnum ::= [0-9]+',
        ["1", "(1+2)+33"],
        ["(1", "+1"],
    ),
    (
        '# says it all\nroot ::= greeting name # here too\ngreeting ::= "hi " |\n  "yo "\n'
        "name-of-it ::= [a-z]\nname ::= name-of-it{2}",
        ["hi ab", "yo zz"],
        ["hi a"],
    ),
    ('root ::= "\\"" [^"\\\\]* "\\\\" "\\n" "\\x41\\u00e9"', ['"ab c\\\nAé'], ['"']),
    (r"root ::= [\]\[\-^] [-x] [a\-c]", ["]-a", "^x-", "-xc"], ["b-a", "]-b"]),
    (
        'root ::= object\nobject ::= "{" ws (pair ("," ws pair)*)? "}"\npair ::= string ":" ws value\n'
        'string ::= "\\"" [a-z]* "\\""\n'
        "value ::= object | string | [0-9]+\nws ::= [ \\n]{0,2}",
        ["{}", '{"a":1, "b": {"c":"d"}}'],
        ['{"a"}', "{,}"],
    ),
    ('root ::= "a" . "b"', ["axb", "a\nb"], ["ab"]),
    ('root ::= a\na ::= "x" a "y" | "-"', ["-", "xx-yy"], ["x-", "xy"]),
    ('root ::= "a"{ 2 , 3 } "b"{ ,1} "c"{ 2 }', ["aacc", "aaabcc"], ["acc", "aac"]),
    ("root ::= 'single' \"/\" [/]", ["single//"], ["single/"]),
]


@pytest.mark.parametrize(("grammar", "inside", "outside"), GRAMMARS)
def test_gbnf_means_what_it_means_to_llama_cpp(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, inside: list[str], outside: list[str]
) -> None:
    assert is_gbnf(grammar)
    for text in inside:
        assert takes(compiler, tokenizer, text, grammar=grammar), text
    for text in outside:
        assert not takes(compiler, tokenizer, text, grammar=grammar), text


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('start ::= "a"', "root"),
        ('root ::= "a', "line 1"),
        ('root ::= "a"\n\nroot ::= "b"', "twice"),
        ("root ::= nothing", "nothing"),
        ('root ::= ("a"', "without its"),
        ('root ::= "a")', "without its"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= "a"{3,1}', "below its least"),
        ('root ::= "a"{1 2}', "repetition"),
        ('root ::= "a"{1,2,3}', "repetition"),
        ('root ::= "a"{,}', "repetition"),
        ('root ::= "\\q"', "escape"),
        ('root ::= "\\u00"', "hexadecimal"),
        ("root ::= [z-a]", "empty"),
        ("root ::= []", "empty class"),
        ("root ::= @", "not expected"),
    ],
)
def test_a_broken_grammar_is_refused_with_what_is_wrong(compiler: GrammarCompiler, grammar: str, says: str) -> None:
    with pytest.raises(InvalidParameterError, match=says) as caught:
        compiler.compile(StructuredOutputs(grammar=grammar))
    assert caught.value.field == "structured.grammar"


def test_lark_passes_as_it_is(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    lark = 'start: greeting ("," greeting)*\ngreeting: "hi" | /ho+/ NAME~2\nNAME: /[a-b]/\n'
    assert not is_gbnf(lark)
    for text, wanted in (("hi,hooab", True), ("hi", True), ("ho", False), ("hoab,", False)):
        assert takes(compiler, tokenizer, text, grammar=lark) is wanted
    with pytest.raises(InvalidParameterError, match=r"structured\.grammar"):
        compiler.compile(StructuredOutputs(grammar="start: undefined_rule"))


def test_random_gbnf_over_letters_is_one_regular_expression(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Rules without recursion against `re`, on texts inside and outside."""
    rng = random.Random(4)

    def piece(depth: int) -> tuple[str, str]:
        kind = rng.randint(0, 5 if depth else 2)
        if kind <= 1:
            letter = rng.choice("abc")
            return f'"{letter}"', letter
        if kind == 2:
            return "[ab]", "[ab]"
        (left, left_re), (right, right_re) = piece(depth - 1), piece(depth - 1)
        if kind == 3:
            return f"({left} | {right})", f"(?:{left_re}|{right_re})"
        if kind == 4:
            times = rng.choice(["*", "+", "?", "{2}", "{1,2}"])
            return f"({left}){times}", f"(?:{left_re}){times}"
        return f"{left} {right}", left_re + right_re

    for _ in range(40):
        grammar, regex = piece(3)
        for _ in range(12):
            text = "".join(rng.choices("abc", k=rng.randint(0, 4)))
            wanted = re.fullmatch(regex, text) is not None
            assert takes(compiler, tokenizer, text, grammar=f"root ::= {grammar}") is wanted, (grammar, text)


# Bombs


def _many_properties(count: int, **more: Any) -> str:
    return json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}, **more})


def _doubling_refs() -> str:
    defs: dict[str, Any] = {"d0": {"const": "x" * 50}}
    for i in range(1, 25):
        pair = [{"$ref": f"#/$defs/d{i - 1}"}] * 2
        defs[f"d{i}"] = {"type": "array", "prefixItems": pair, "items": False, "minItems": 2}
    return json.dumps({"$ref": "#/$defs/d24", "$defs": defs})


def _doubling_meetings() -> str:
    defs: dict[str, Any] = {"d0": {"type": "integer"}}
    for i in range(1, 30):
        defs[f"d{i}"] = {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}, {"$ref": f"#/$defs/d{i - 1}"}]}
    return json.dumps({"$ref": "#/$defs/d29", "$defs": defs})


BOMBS: dict[str, dict[str, Any]] = {
    "30,000 parentheses": {"regex": "(" * 8000 + "a" + ")" * 8000},
    "30,000 parentheses in a grammar": {"grammar": "start: " + "(" * 30000 + '"a"' + ")" * 30000},
    "30,000 parentheses in GBNF": {"grammar": "root ::= " + "(" * 30000 + '"a"' + ")" * 30000},
    "a million forced letters": {"regex": "(a{1000}){1000}"},
    "the same in a grammar": {"grammar": 'start: x{1000}\nx: "a"{1000}'},
    "the same in GBNF": {"grammar": 'root ::= x{1000}\nx ::= "a"{1000}'},
    "the same in a schema": {"json": {"type": "array", "items": {"const": "x" * 100}, "minItems": 100_000}},
    "10,000 properties": {"json": _many_properties(10_000)},
    "10,000 properties, closed": {"json": _many_properties(10_000, additionalProperties=False)},
    "a circle of references": {
        "json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    },
    "references that double": {"json": _doubling_refs()},
    "meetings that double": {"json": _doubling_meetings()},
    "schemas in schemas": {"json": '{"items":' * 400 + "{}" + "}" * 400},
    "schemas in schemas, deeper": {"json": '{"items":' * 20_000 + "{}" + "}" * 20_000},
    "a long remainder": {"json": {"type": "integer", "multipleOf": 99_991}},
    "rules by the thousand": {
        "grammar": "\n".join(["root ::= r0", *(f'r{i} ::= r{i + 1} "a"' for i in range(4000)), 'r4000 ::= "b"'])
    },
    "an intersection": {"json": {"allOf": [{"type": "string", "pattern": f".*a.{{{k}}}b"} for k in range(1, 14)]}},
    "an intersection in a grammar": {
        "grammar": "start: A\nA: " + " & ".join(f"/.*a.{{{k}}}b.*/" for k in range(1, 15))
    },
    "choices times choices": {
        "json": {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"a{i}{j}": {"type": "integer"}}} for j in range(8)]}
                for i in range(8)
            ]
        }
    },
}
HARMLESS: dict[str, dict[str, Any]] = {
    "(a+)+b": {"regex": "(a+)+b"},
    "nested stars": {"regex": "((a*)*)*b"},
    "many ways": {"regex": "(a|b|ab)*(a|b){300}c"},
    "a far look": {"regex": "(.*a.{20}b.*){5}"},
    "1,000 properties": {"json": _many_properties(1000)},
    "1,000 choices": {"choice": [f"{i:04d}" * 20 for i in range(1000)]},
    "a value within itself": {"json": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}},
}


def _worst_gap(work: Any) -> tuple[float, float]:
    """Seconds the work took, and the longest that another thread, awake each millisecond, stood still meanwhile."""
    worst = 0.0
    done = threading.Event()

    def tick() -> None:
        nonlocal worst
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            worst = max(worst, now - last)
            last = now

    ticker = threading.Thread(target=tick)
    ticker.start()
    begin = time.perf_counter()
    try:
        work()
    finally:
        seconds = time.perf_counter() - begin
        done.set()
        ticker.join()
    return seconds, worst


@pytest.mark.parametrize("name", [*BOMBS, *HARMLESS])
def test_a_bomb_is_refused_within_a_second_and_stops_nobody(compiler: GrammarCompiler, name: str) -> None:
    compiler.vocabulary  # noqa: B018  made once a model, not by a bomb

    def compile_it() -> None:
        try:
            compiler.compile(StructuredOutputs(**(BOMBS | HARMLESS)[name]))
        except InvalidParameterError:
            assert name in BOMBS
        else:
            assert name in HARMLESS

    seconds, gap = _worst_gap(compile_it)
    assert takes_at_most(seconds, 1.0)
    assert takes_at_most(gap, 0.25)


def test_following_a_hard_expression_ends_with_an_error_and_not_with_a_stall(model: Model) -> None:
    slowest = 0.0
    with engine_of(model, num_blocks=256) as engine:
        inbox: Inbox = submit(
            engine,
            "r",
            [5, 6],
            structured={"regex": "(.*a.{20}b.*){5}"},
            max_tokens=300,
            logprobs=None,
            logit_bias={i: 5.0 for i in model.tokenizer.encode("ab")},
        )
        while engine.has_work():
            begin = time.perf_counter()
            engine.step()
            slowest = max(slowest, time.perf_counter() - begin)
    output = inbox.output
    assert output.error is None or "grammar" in str(output.error)
    assert takes_at_most(slowest, 0.5)


def test_limits_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    monkeypatch.setattr(limits, "MAX_GRAMMAR_SYMBOLS", 10)
    tight = GrammarCompiler(lambda: Vocabulary(model.tokenizer, model.tokenizer.vocab_size, {EOS}))
    with pytest.raises(InvalidParameterError, match="too big"):
        tight.compile(StructuredOutputs(json={"type": "object"}))


def test_a_converted_grammar_names_its_rules(tmp_path: Path) -> None:
    lark = lark_from_gbnf('root ::= a-b\na-b ::= "x" root | "y"')
    assert "start: r0_root" in lark
    assert "r1_a_b" in lark
