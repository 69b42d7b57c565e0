"""How long a pattern is with its repetitions written out: what a grammar may force is at most as long.

llguidance keeps repetitions symbolic, so that `(a{1000}){1000}` compiles at once; but a run of a million forced bytes
would hold a step for seconds, and no fuel limit covers it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from octavo import limits
from octavo.errors import InvalidParameterError

# No two alternatives begin the same piece, and what lacks its end is one piece, up to the end of the text: no character
# is looked at more than a few times. A group has matched where the end is missing. A piece: an escape, a class, an
# opening (with its flags or name), a closing, a repetition, or any other character.
_REGEX = re.compile(
    r"\\[xuUpP]\{[^}]*(?:\}|(\Z))|\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*(?:\]|(\\?\Z))"
    r"|\(\?P?<[^>]*(?:>|(\Z))|\((?:\?[a-zA-Z-]*[:)])?|\)|\{[\s\d,]*\}|[*+?]|.",
    re.DOTALL,
)
# As the compiler cuts a grammar up: names of rules are in lower case, those of terminals in upper case.
_LARK = re.compile(
    r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*(?:"i?|(\\?(?=\n)|\\?\Z))|/(?:\\.|[^/\\])+(?:/[a-z]*|(\\?\Z))|<[^<>\s]+>'
    r"|(?:\r?\n)+[ \t]*|~[ \t]*\+?\d+(?:[ \t]*\.\.[ \t]*\+?\d+)?|\{[\s\d,+-]*\}"
    r"|!?[_?]?[a-z][_a-z0-9-]*|_?[A-Z][_A-Z0-9-]*|%\w+|\S",
    re.DOTALL,
)
_NAME = re.compile(r"!?[_?]?[a-z][_a-z0-9-]*|_?[A-Z][_A-Z0-9-]*")


def check_regex(field: str, regex: str) -> None:
    """Raises InvalidParameterError for one that is too long (also written out), too deeply nested, or unfinished."""
    if len(regex) > limits.MAX_REGEX_CHARS:
        raise InvalidParameterError(field, regex, f"at most {limits.MAX_REGEX_CHARS} characters")
    _bound(field, regex, regex_expansion(field, regex))


def _bound(field: str, text: str, size: int) -> None:
    if size > limits.MAX_GRAMMAR_EXPANSION:
        most = limits.MAX_GRAMMAR_EXPANSION
        raise InvalidParameterError(field, text, f"at most {most} characters with its repetitions written out")


def regex_expansion(field: str, regex: str) -> int:
    """Characters of a regular expression with the least number of each repetition (at least one) written out."""
    totals, last = [0], [0]
    for found in _REGEX.finditer(regex):
        part = found[0]
        if found.lastindex is not None:
            raise InvalidParameterError(field, regex, f"a regular expression in which {part[:20]} has an end")
        if part.startswith("(?") and "<" not in part and "x" in part:  # would change what the pieces are
            raise InvalidParameterError(field, regex, "a regular expression without the flag x")
        if part[0] == "(" and not (part.startswith("(?") and part.endswith(")")):
            totals.append(0)
            last.append(0)
            _check_depth(field, regex, len(totals))
            continue
        if part == ")" and len(totals) > 1:
            size = totals.pop()
            last.pop()
        elif part[0] == "{" and len(part) > 1:
            totals[-1] += last[-1] * (_least(part) - 1)
            last[-1] *= _least(part)
            continue
        else:
            size = 0 if part in ("*", "+", "?", "|") else 1
            if size == 0:
                continue
        totals[-1] += size
        last[-1] = size
    return sum(totals)


def _least(repetition: str) -> int:
    found = re.search(r"\d+", repetition.split(",")[0])
    return min(max(int(found[0][:9]) if found else 1, 1), 10**9)


def _check_depth(field: str, text: str, depth: int) -> None:
    if depth > limits.MAX_GRAMMAR_DEPTH:
        raise InvalidParameterError(field, text, f"at most {limits.MAX_GRAMMAR_DEPTH} parentheses in one another")


def check_lark(field: str, lark: str) -> None:
    """The same for a grammar, in which rules name rules; what is no grammar is left to the compiler."""
    tokens = [found[0] for found in lark_pieces(field, lark) if not found[0].startswith(("//", "#"))]
    if tokens.count("&") >= limits.MAX_INTERSECTIONS:
        raise InvalidParameterError(field, lark, f"fewer than {limits.MAX_INTERSECTIONS} times &")
    if "%lark" in tokens:
        raise InvalidParameterError(field, "%lark", "a grammar without others in it")
    rules = _lark_rules(field, lark, tokens)
    sizes: dict[str, int] = {}
    for start in rules:
        stack = [start]
        while stack:  # not by recursion: a chain of rules may be long
            name = stack[-1]
            size, uses = rules[name]
            sizes.setdefault(name, size)  # stands in where a rule comes back to itself
            missing = next((used for used in uses if used in rules and used not in sizes), None)
            if missing is not None:
                stack.append(missing)
                continue
            sizes[name] = size + sum(times * sizes.get(used, 0) for used, times in uses.items())
            _bound(field, lark, sizes[name])
            stack.pop()


def lark_pieces(field: str, lark: str, at: int = 0) -> Iterator[re.Match[str]]:
    """Comments are pieces too. Raises InvalidParameterError where a string or a pattern has no end."""
    for found in _LARK.finditer(lark, at):
        if found.lastindex is not None or found[0] in ('"', "/"):
            raise InvalidParameterError(field, lark, f"a grammar in which {found[0][:20]} has an end")
        yield found


def _lark_rules(field: str, lark: str, tokens: list[str]) -> dict[str, tuple[int, dict[str, int]]]:
    """Of each rule its own characters, and how often it names others, repetitions written out.

    What is ignored counts as a rule.
    """
    rules: dict[str, tuple[int, dict[str, int]]] = {}
    at = 0
    while at < len(tokens):
        begin, name = at, tokens[at].lstrip("!?")
        while at < len(tokens) and tokens[at] not in (":", "%ignore") and not _ends_line(tokens[at]):
            at += 1  # past attributes
        at += 1
        if tokens[at - 1 : at] == ["%ignore"]:
            name = f"%ignore {at}"
        elif tokens[at - 1 : at] != [":"] or not _is_name(tokens[begin]):
            continue
        if name in rules:
            raise InvalidParameterError(field, lark, f"a grammar that defines {name} once")
        rules[name], at = _lark_body(field, lark, tokens, at)
        if len(rules) > limits.MAX_GRAMMAR_RULES:
            raise InvalidParameterError(field, f"{len(rules)} rules", f"at most {limits.MAX_GRAMMAR_RULES}")
    return rules


def _is_name(part: str) -> bool:
    return _NAME.fullmatch(part) is not None


def _ends_line(part: str) -> bool:
    return part[0] in "\r\n"


def _lark_body(field: str, lark: str, tokens: list[str], at: int) -> tuple[tuple[int, dict[str, int]], int]:
    """What stands behind `name:`, up to the next rule."""
    groups: list[list[tuple[int, dict[str, int]]]] = [[]]
    while at < len(tokens):
        part = tokens[at]
        at += 1
        if _ends_line(part):
            if tokens[at : at + 1] != ["|"]:
                break
        elif part in ("(", "["):
            groups.append([])
            _check_depth(field, lark, len(groups))
        elif part in (")", "]") and len(groups) > 1:
            inner = groups.pop()
            groups[-1].append(_sum(inner))
        elif part[0] in "{~" and len(part) > 1 and groups[-1]:
            times = _least(part.replace("..", ","))
            size, uses = groups[-1][-1]
            groups[-1][-1] = size * times, {name: count * times for name, count in uses.items()}
        elif part[0] == '"':
            groups[-1].append((len(part) - 2, {}))
        elif part[0] == "/":
            regex, _, flags = part[1:].rpartition("/")
            if "x" in flags:
                raise InvalidParameterError(field, part, "a regular expression without the flag x")
            groups[-1].append((regex_expansion(field, regex), {}))
        elif _is_name(part):
            groups[-1].append((0, {part.lstrip("!?"): 1}))
    return _sum([item for group in groups for item in group]), at


def _sum(items: list[tuple[int, dict[str, int]]]) -> tuple[int, dict[str, int]]:
    uses: dict[str, int] = {}
    for _, named in items:
        for name, times in named.items():
            uses[name] = uses.get(name, 0) + times
    return sum(size for size, _ in items), uses
