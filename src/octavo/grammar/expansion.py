"""How long a pattern is with its repetitions written out: what a grammar may force is at most as long.

llguidance keeps repetitions symbolic, so that `(a{1000}){1000}` compiles at once; but a run of a million forced bytes
would hold a step for seconds, and no fuel limit covers it.
"""

from __future__ import annotations

import re

from octavo import limits
from octavo.errors import InvalidParameterError

# An escape, a class, an opening (with its flags or name), a closing, a repetition, or any other character.
_REGEX = re.compile(
    r"\\(?:[xuU]\{[^}]*\}|[pP]\{[^}]*\}|.)|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]"
    r"|\((?:\?(?:P?<[^>]*>|[a-zA-Z-]*[:)]))?|\)|\{\d*,?\d*\}|[*+?]|.",
    re.DOTALL,
)
_LARK = re.compile(
    r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"i?|/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/[a-z]*'
    r"|\n+[ \t]*\|?|~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d*\s*,?\s*\d*\s*\}|[A-Za-z_][\w]*|%\w+|\S",
    re.DOTALL,
)


def check_regex(field: str, regex: str) -> None:
    """Raises InvalidParameterError for one that is too long written out, or too deeply nested."""
    _bound(field, regex, regex_expansion(field, regex))


def _bound(field: str, text: str, size: int) -> None:
    if size > limits.MAX_GRAMMAR_EXPANSION:
        most = limits.MAX_GRAMMAR_EXPANSION
        raise InvalidParameterError(field, text, f"at most {most} characters with its repetitions written out")


def regex_expansion(field: str, regex: str) -> int:
    """Characters of a regular expression with the least number of each repetition (at least one) written out."""
    totals, last = [0], [0]
    for part in _REGEX.findall(regex):
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
    tokens = [part for part in _LARK.findall(lark) if not part.startswith(("//", "#"))]
    if tokens.count("&") >= limits.MAX_INTERSECTIONS:
        raise InvalidParameterError(field, lark, f"fewer than {limits.MAX_INTERSECTIONS} times &")
    rules = _lark_rules(field, lark, tokens)
    if len(rules) > limits.MAX_GRAMMAR_RULES:
        raise InvalidParameterError(field, f"{len(rules)} rules", f"at most {limits.MAX_GRAMMAR_RULES}")
    sizes: dict[str, int] = {}
    for start in rules:
        stack = [start]
        while stack:  # not by recursion: a chain of rules may be long
            name = stack[-1]
            size, uses = rules[name]
            sizes.setdefault(name, size)  # stands in where a rule comes back to itself
            missing = [used for used in uses if used in rules and used not in sizes]
            if missing:
                stack.append(missing[0])
                continue
            sizes[name] = size + sum(times * sizes.get(used, 0) for used, times in uses.items())
            _bound(field, lark, sizes[name])
            stack.pop()


def _lark_rules(field: str, lark: str, tokens: list[str]) -> dict[str, tuple[int, dict[str, int]]]:
    """Of each rule its own characters, and how often it names others, repetitions written out."""
    rules: dict[str, tuple[int, dict[str, int]]] = {}
    at = 0
    while at < len(tokens):
        if at + 1 < len(tokens) and tokens[at + 1] == ":" and tokens[at].isidentifier():
            name = tokens[at]
            rules[name], at = _lark_body(field, lark, tokens, at + 2)
        else:
            at += 1
    return rules


def _lark_body(field: str, lark: str, tokens: list[str], at: int) -> tuple[tuple[int, dict[str, int]], int]:
    """What stands behind `name:`, up to the next rule."""
    groups: list[list[tuple[int, dict[str, int]]]] = [[]]
    while at < len(tokens):
        part = tokens[at]
        if part.startswith("\n") and not part.endswith("|") and len(groups) == 1:
            break
        at += 1
        if part in ("(", "["):
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
        elif part[0] == "/" and len(part) > 1:
            groups[-1].append((regex_expansion(field, part[1 : part.rindex("/")]), {}))
        elif part.isidentifier():
            groups[-1].append((0, {part: 1}))
    return _sum([item for group in groups for item in group]), at


def _sum(items: list[tuple[int, dict[str, int]]]) -> tuple[int, dict[str, int]]:
    uses: dict[str, int] = {}
    for _, named in items:
        for name, times in named.items():
            uses[name] = uses.get(name, 0) + times
    return sum(size for size, _ in items), uses
