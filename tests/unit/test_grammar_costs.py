"""Checks of what users send take time that grows with its length, whatever it holds; none of it slips past them."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import limits
from octavo.errors import InvalidParameterError, RequestFailedError
from octavo.grammar import Constraint, GrammarCompiler
from octavo.grammar.embedded import bounded_schemas
from octavo.grammar.expansion import check_lark, check_regex
from octavo.grammar.gbnf import lark_from_gbnf
from octavo.grammar.vocabulary import Vocabulary
from octavo.structured import StructuredOutputs
from tests.support.engines import EOS, load_tiny
from tests.support.pace import takes_at_most

# A beginning, what is repeated, an end.
REGEXES = [
    *(("", piece, "") for piece in ("[", "[^", "[]", "[[:a:]", "[[:a", "[\\", "\\", "\\x{", "\\p{", "\\u{4")),
    *(
        ("", piece, "")
        for piece in ("(", "(?", "(?<", "(?P<a", "(?a", "(?i-", "{", "{1", "{1,", "{ ", "a{1}", "[a]", ")")
    ),
    *(
        (begin, piece, end)
        for begin in ("a{", "[", "\\x{", "(?<", "(?")
        for piece in " 1,a[:\\"
        for end in ("", "x", "\\")
    ),
    ("", "[a", "\\"),
    ("", "[[:a:]", "\\"),
    ("(?", "a" * 9 + "-", ""),
]
LARKS = [
    *(
        ("start: ", piece, "")
        for piece in ('"', '"a', '"\\', '\\"', "/", "/a", "/[a", "/[a]", "/\\", "/[", "//", "#", "<", "<a")
    ),
    *(
        ("start: ", piece, "")
        for piece in ("~", "~ ", "~1", "~1 ", "~1..", "{", "{ ", "{1", "{1,", "%", "%json", "%json ", "%json {")
    ),
    *(
        ("start: ", piece, "")
        for piece in ("(", "[", "[x", "\n", "\n ", "\n|", "a", "A", "a-", "aA", "->", "a:", "x[", "@", "%json {}")
    ),
    *(
        (f'start: "a"{begin}', piece, end)
        for begin in ("{", "~", "~1", '"', "/", "<", "\n")
        for piece in ' 1,.+[\\"/'
        for end in ("", "x")
    ),
    ("start: /", "[a]", ""),
    ("start: ", '%json {"a":', ""),
    ("", "a:\n", ""),
    ("", "a[", ":"),
]
GBNFS = [
    *(
        ("root ::= ", piece, "")
        for piece in ('"', "'", '"\\', "[", "[a", "[a-", "(", "( ", "#", "//", "a", "a ", "a-", "a.", "|")
    ),
    *(('root ::= "a"' + begin, piece, end) for begin in ("{", "{1", "{,") for piece in " 1,\n" for end in ("", "x")),
    ("", "a\n", "::="),
    ("", " ", "::="),
    ("", "a", " ::="),
    ("", "\t\n", "a ::="),
    ("root ::= ", "a\n", ""),
    ("root ::= ", "a ", "::="),
    ("root ::= a", " ", "b ::="),
]  # fmt: skip


def _seconds(check: Callable[[str], object], text: str) -> float:
    begin = time.thread_time()
    with contextlib.suppress(InvalidParameterError):
        check(text)
    return time.thread_time() - begin


def _lark(text: str) -> None:
    check_lark("g", bounded_schemas("g", text)[0])


def _growth(check: Callable[[str], object], cases: list[tuple[str, str, str]], most: int) -> None:
    for begin, piece, end in cases:
        whole, half = ((begin + piece * (size // len(piece)))[: size - len(end)] + end for size in (most, most // 8))
        # First the eighth, so that what grows by powers is told without waiting for it.
        short = _seconds(check, half)
        assert takes_at_most(short, 0.1), (begin, piece, end)
        long = _seconds(check, whole)
        if long >= 24 * short + 0.02:  # perhaps disturbed
            short, long = (min(_seconds(check, text) for _ in range(3)) for text in (half, whole))
        assert takes_at_most(long, 0.5), (begin, piece, end)
        assert long < 24 * short + 0.02, (begin, piece, end, short, long)


def test_checking_a_regex_takes_linear_time() -> None:
    _growth(lambda text: check_regex("r", text), REGEXES, limits.MAX_REGEX_CHARS)


def test_checking_a_lark_grammar_takes_linear_time() -> None:
    _growth(_lark, LARKS, limits.MAX_GRAMMAR_CHARS)
    _growth(_lark, [(f"start: /{begin}", piece, f"{end}/") for begin, piece, end in REGEXES], limits.MAX_GRAMMAR_CHARS)


def test_converting_gbnf_takes_linear_time() -> None:
    _growth(lark_from_gbnf, GBNFS, limits.MAX_GRAMMAR_CHARS)


@pytest.mark.parametrize(
    "unfinished", ["[", "[a", "[^]", "[\\", "\\x{", "\\p{L", "(?<a", "a[[:a:]", "(?x)a", "(?ix:a)"]
)
def test_an_unfinished_piece_of_a_regex_is_refused(unfinished: str) -> None:
    with pytest.raises(InvalidParameterError):
        check_regex("r", unfinished)


@pytest.mark.parametrize(
    "unfinished", ['start: "a', "start: /a", 'start: "a\n"', "start: /[/", "start: /a/x", "start: %lark {"]
)
def test_an_unfinished_piece_of_a_grammar_is_refused(unfinished: str) -> None:
    with pytest.raises(InvalidParameterError):
        check_lark("g", unfinished)


def test_a_pattern_is_no_longer_than_a_regex_may_be() -> None:
    long = "a" * (limits.MAX_REGEX_CHARS + 1)
    with pytest.raises(InvalidParameterError, match=str(limits.MAX_REGEX_CHARS)):
        check_regex("r", f"({long}|b)?")


HIDDEN = {  # a million letters, said so that only the compiler might see it
    "spaces in the repetition": "start: /(a{ 1000 }){ 1000 }/",
    "a line end in the pattern": "start: /(a{1000}\n?){1000}/",
    "attributes": "start: x\nx[lazy]: /(a{1000}){1000}/",
    "attributes and repeated": "start: x{1000}\nx[capture]: /a{1000}/",
    "names with a dash": 'start: a-y{1000}\na-y: "a"{1000}\nb-y: "b"',
    "names that touch": 'start: aX{1000}\na: "b"\nX: "a"{1000}',
    "a sign": 'start: x{+1000}\nx: "a"{+1000}',
    "a sign after ~": 'start: x~+1000\nx: "a"~+1000',
    "a name twice": 'start: x{1000}\nx: "a"{1000}\nx: "b"',
    "a comment in the pattern": "start: /(?x)# [\n(a{1000}){1000}# ]\n/",
    "a string that looks like a schema": 'start: "%json {" default ":[" y{1000} "]}"\ndefault: "a"\ny: "a"{1000}',
    "a comment that looks like a schema": 'start: y # %json {\n"default":["\ny: x{1000}\nx: "a"{1000} # "]}',
    "an import": 'start: y{1000}\n%import common.INT\ny: "a"{1000}',
    "what is ignored": 'start: "b"\n%ignore /(a{1000}){1000}/',
    "a schema that Python can't read": f'start: %json {{"const": {"1" * 5000}}}',
    "a grammar within": "start: (%lark {\nstart: /a{1000}/\n}){1000}",
}


@pytest.mark.parametrize("name", HIDDEN)
def test_no_spelling_hides_a_repetition(name: str) -> None:
    with pytest.raises(InvalidParameterError):
        _lark(HIDDEN[name])


def test_what_is_not_hidden_is_taken(tmp_path: Path) -> None:
    tokenizer = load_tiny(tmp_path).tokenizer
    compiler = GrammarCompiler(lambda: Vocabulary(tokenizer, tokenizer.vocab_size, {EOS}))
    for lark in (
        'start: a-b c_1 X\n\n | "x" // or\na-b: "%json {"\n?c_1[lazy]: /[^\\/]{ 1, 3 }\n/\nX: "a"~2..3 /b/i',
        'start: "a"{,3} /a|\\x{41}|[[:alpha:]]|\\p{L}|(?P<n>b)|(?i:c)/ # /x "\n%ignore / +/',
        'start: %json {"type": "null"}',
    ):
        compiler.compile(StructuredOutputs(grammar=lark))


def _compiler(tmp_path: Path) -> tuple[GrammarCompiler, int, int]:
    tokenizer = load_tiny(tmp_path).tokenizer
    a, b = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    return GrammarCompiler(lambda: Vocabulary(tokenizer, tokenizer.vocab_size, {EOS})), a, b


def test_a_grammar_that_came_upon_a_limit_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states one output made count for all copies: without a fresh one each later output would fail at once."""
    monkeypatch.setattr(limits, "MAX_GRAMMAR_LEXER_STATES", 2000)
    compiler, a, b = _compiler(tmp_path)
    hungry = StructuredOutputs(regex="(.*a.{20}b.*){5}")
    rng = random.Random(1)
    grammar = compiler.compile(hungry)
    with pytest.raises(RequestFailedError, match="states"):
        _drive(Constraint(grammar), [rng.choice((a, b)) for _ in range(3000)])
    with pytest.raises(RequestFailedError, match="states"):
        _drive(Constraint(grammar), [rng.choice((a, b)) for _ in range(100)])
    _drive(Constraint(compiler.compile(hungry)), [a, b] * 5)
    assert compiler.stats()["grammars_compiled"] == 2


def test_a_kept_grammar_serves_so_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CACHED_GRAMMAR_TOKENS", 10)
    compiler, a, _ = _compiler(tmp_path)
    for compiled in (1, 1, 2, 2, 3):
        _drive(Constraint(compiler.compile(StructuredOutputs(regex="a*"))), [a] * 6)
        assert compiler.stats()["grammars_compiled"] == compiled


def test_so_many_grammars_are_kept(tmp_path: Path) -> None:
    compiler, _, _ = _compiler(tmp_path)
    regexes = [f"a{{{i + 1}}}" for i in range(limits.MAX_CACHED_GRAMMARS + 1)]
    for regex in [*regexes, regexes[-1], regexes[1], regexes[0]]:
        compiler.compile(StructuredOutputs(regex=regex))
    stats = compiler.stats()
    assert (stats["grammars_compiled"], stats["grammar_cache_hits"]) == (len(regexes) + 1, 2)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (StructuredOutputs(regex="(ab"), "(unclosed group)"),
        (StructuredOutputs(regex="[z-a]"), "invalid character class range"),
        (StructuredOutputs(grammar="start: foo"), 'at 1(8): unknown name: "foo"'),
        (
            StructuredOutputs(grammar='start: "a" foo\nfoo: /(x/'),
            'at 2(6): invalid regex "(x" (in regex): unclosed group',
        ),
    ],
)
def test_a_refusal_says_what_is_wrong(tmp_path: Path, wanted: StructuredOutputs, reason: str) -> None:
    compiler, _, _ = _compiler(tmp_path)
    with pytest.raises(InvalidParameterError, match=re.escape(reason)):
        compiler.compile(wanted)


def _drive(constraint: Constraint, token_ids: list[int]) -> None:
    for token_id in token_ids:
        constraint.matcher.compute_bitmask()
        constraint.check()
        constraint.append(token_id)
