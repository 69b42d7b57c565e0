"""GBNF, the grammars of llama.cpp, and the EBNF of XGrammar and vLLM, as llguidance's dialect of Lark.

Rules that name no rule in a circle become terminals: they are matched as one regular expression, letter by letter,
as a grammar over characters means it; Lark's rules would match the longest piece first.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from octavo import limits
from octavo.errors import InvalidParameterError

_DEFINES = re.compile(r"^[ \t]*[\w.-]+[ \t]*::=", re.MULTILINE)
_SPACE = re.compile(r"(?:\s|#[^\n]*|//[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_TIMES = re.compile(r"\{([\s\d,]*)\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b", "v": "\v", "a": "\a", "0": "\0"}
_HEX = {"x": 2, "u": 4, "U": 8}


def is_gbnf(text: str) -> bool:
    return _DEFINES.search(text) is not None


@dataclass(slots=True)
class _Rule:
    body: list[str] = field(default_factory=list)  # Lark, names in it as (their own) "\0name\0"
    uses: set[str] = field(default_factory=set)


def lark_from_gbnf(text: str) -> str:
    """Raises InvalidParameterError with the line of what is wrong."""
    rules = _Reader(text).rules()
    if "root" not in rules:
        raise InvalidParameterError("structured.grammar", text, "a grammar with a rule named root")
    names = _lark_names(rules)
    lines = ["%llguidance {}"]
    for name, rule in rules.items():
        body = re.sub("\0(.*?)\0", lambda found: names[found[1]], " ".join(rule.body))
        lines.append(f"{names[name]}: {body}")
    root = names["root"]
    return "\n".join(lines if root == "start" else [*lines, f"start: {root}"]) + "\n"


def _lark_names(rules: dict[str, _Rule]) -> dict[str, str]:
    """Upper case for terminals: rules that use, in the end, no rule that uses itself."""
    terminals: set[str] = set()
    waiting = {name: {used for used in rule.uses} for name, rule in rules.items()}
    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, rule in rules.items():
        for used in rule.uses:
            users[used].add(name)
    ready = [name for name, uses in waiting.items() if not uses]
    while ready:
        name = ready.pop()
        terminals.add(name)
        for user in users[name]:
            waiting[user].discard(name)
            if not waiting[user]:
                ready.append(user)
    names = {}
    for i, name in enumerate(rules):
        plain = re.sub(r"[^a-z0-9]", "_", name.lower())
        names[name] = f"T{i}_{plain}".upper() if name in terminals else f"r{i}_{plain}"
    return names


class _Reader:
    """Reads rules character by character; groups are kept on a stack, so that depth costs no recursion."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def _fail(self, problem: str) -> InvalidParameterError:
        line = self._text.count("\n", 0, self._at) + 1
        return InvalidParameterError("structured.grammar", self._text, f"a grammar in GBNF (line {line}: {problem})")

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def rules(self) -> dict[str, _Rule]:
        rules: dict[str, _Rule] = {}
        self._skip()
        while self._at < len(self._text):
            name = self._name()
            if name is None or not self._takes("::="):
                raise self._fail("a rule such as name ::= … was expected")
            if name in rules:
                raise self._fail(f"the rule {name} is there twice")
            rules[name] = self._body()
            if len(rules) > limits.MAX_GRAMMAR_RULES:
                raise self._fail(f"more than {limits.MAX_GRAMMAR_RULES} rules")
        for name, rule in rules.items():
            for used in sorted(rule.uses - rules.keys()):
                raise InvalidParameterError("structured.grammar", used, f"rules that exist (it is used in {name})")
        return rules

    def _name(self) -> str | None:
        found = _NAME.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        self._skip()
        return found[0]

    def _takes(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        self._skip()
        return True

    def _starts_rule(self) -> bool:
        return re.compile(r"[A-Za-z_][\w.-]*\s*::=").match(self._text, self._at) is not None

    def _body(self) -> _Rule:
        """Up to the next rule. What stands last in `body` may be repeated if `repeatable`."""
        rule = _Rule()
        depth = 0
        repeatable = False
        empty = True  # the alternative so far
        while self._at < len(self._text) and not (depth == 0 and self._starts_rule()):
            sign = self._text[self._at]
            if sign in "|)":
                if empty:
                    rule.body.append('""')
                if sign == ")":
                    depth -= 1
                    if depth < 0:
                        raise self._fail("a ) without its (")
                rule.body.append(sign)
                self._at += 1
                repeatable, empty = sign == ")", sign == "|"
            elif sign == "(":
                depth += 1
                if depth > limits.MAX_GRAMMAR_DEPTH:
                    raise self._fail(f"more than {limits.MAX_GRAMMAR_DEPTH} parentheses in one another")
                rule.body.append("(")
                self._at += 1
                repeatable, empty = False, True
            elif sign in "*+?{":
                if not repeatable:
                    raise self._fail(f"nothing to repeat before {sign}")
                rule.body[-1] += self._repetition()
                repeatable = False
            else:
                rule.body.append(self._item(rule))
                repeatable, empty = True, False
            self._skip()
        if depth:
            raise self._fail("a ( without its )")
        if empty:
            rule.body.append('""')
        return rule

    def _repetition(self) -> str:
        sign = self._text[self._at]
        if sign != "{":
            self._at += 1
            return sign
        found = _TIMES.match(self._text, self._at)
        ends = [end.strip() for end in found[1].split(",")] if found else []
        if not any(ends) or len(ends) > 2 or not all(re.fullmatch(r"\d{0,9}", end) for end in ends):
            raise self._fail("a repetition such as {2}, {2,} or {2,5} was expected")
        assert found is not None
        self._at = found.end()
        low, high = ends[0] or "0", ends[-1]
        if high and int(high) < int(low):
            raise self._fail("a repetition whose most is below its least")
        return f"{{{low},{high}}}"

    def _item(self, rule: _Rule) -> str:
        sign = self._text[self._at]
        if sign in "\"'":
            return self._literal(sign)
        if sign == "[":
            return self._class()
        if sign == ".":
            self._at += 1
            return r"/[\s\S]/"
        name = self._name()
        if name is None:
            raise self._fail(f"{sign!r} was not expected")
        rule.uses.add(name)
        return f"\0{name}\0"

    def _literal(self, quote: str) -> str:
        self._at += 1
        text = []
        while (letter := self._letter(quote)) is not None:
            text.append(letter)
        return json.dumps("".join(text), ensure_ascii=False)

    def _letter(self, end: str) -> str | None:
        """The next character of a literal or a class, escapes read; None at its end."""
        if self._at >= len(self._text):
            raise self._fail(f"the end {end} is missing")
        sign = self._text[self._at]
        self._at += 1
        if sign == end:
            return None
        if sign != "\\":
            return sign
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind not in _HEX:
            if not kind or (kind.isalnum() and kind not in _ESCAPES):
                raise self._fail(f"the escape \\{kind} is not known")
            return _ESCAPES.get(kind, kind)
        digits = self._text[self._at : self._at + _HEX[kind]]
        self._at += _HEX[kind]
        try:
            letter = chr(int(digits, 16)) if len(digits) == _HEX[kind] else ""
            letter.encode()
        except (ValueError, OverflowError):
            letter = ""
        if not letter:
            raise self._fail(f"\\{kind} needs {_HEX[kind]} hexadecimal digits of a character")
        return letter

    def _class(self) -> str:
        """[a-z_] as a regular expression: every character in it spelled out, so that nothing else can be meant."""
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        letters: list[tuple[str, bool]] = []  # and whether it is a bare dash, which makes a range
        while True:
            bare = self._text.startswith("-", self._at)
            letter = self._letter("]")
            if letter is None:
                break
            letters.append((letter, bare))
        if not letters:
            raise self._fail("an empty class")
        parts = []
        i = 0
        while i < len(letters):
            low = high = letters[i][0]
            if i + 2 < len(letters) and letters[i + 1][1]:
                high = letters[i + 2][0]
                i += 2
            if high < low:
                raise self._fail(f"the range {low}-{high} is empty")
            parts.append(_spelled(low) if low == high else f"{_spelled(low)}-{_spelled(high)}")
            i += 1
        return f"/[{'^' if negated else ''}{''.join(parts)}]/"


def _spelled(letter: str) -> str:
    return letter if letter.isalnum() and letter.isascii() else f"\\u{{{ord(letter):X}}}"
