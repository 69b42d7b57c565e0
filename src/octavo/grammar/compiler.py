"""From a checked StructuredOutputs to a compiled grammar: refused, or compiled once and kept."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo import limits
from octavo.errors import InvalidParameterError
from octavo.grammar.embedded import SPACES, bounded_schemas, lark_choice
from octavo.grammar.expansion import check_lark, check_regex
from octavo.grammar.gbnf import is_gbnf, lark_from_gbnf
from octavo.grammar.json_schema import checked_schema
from octavo.grammar.marker import Marker
from octavo.grammar.vocabulary import Vocabulary
from octavo.structured import KINDS, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher

_LOG = logging.getLogger("octavo")


@dataclass(slots=True)
class Use:
    """What outputs have done with a compiled grammar: the states they made are shared by all copies, and stay."""

    tokens: int = 0
    failed: bool = False  # a copy came upon a limit: each later one might

    @property
    def worn(self) -> bool:
        return self.failed or self.tokens >= limits.MAX_CACHED_GRAMMAR_TOKENS


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a request's constraints start from. matcher: copied for each output. marker: where they begin."""

    matcher: LLMatcher
    vocabulary: Vocabulary
    marker: Marker | None
    use: Use


_Compiled: TypeAlias = "tuple[LLMatcher, Use]"


class GrammarCompiler:
    """Compiles on the caller's thread, and keeps what it compiled, refusals too. Safe to use from several threads."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, ...], _Compiled | InvalidParameterError] = OrderedDict()
        self._kept_chars = 0
        self._markers: OrderedDict[str, Marker] = OrderedDict()
        self._compiled = self._hits = 0
        self._seconds = 0.0

    @property
    def vocabulary(self) -> Vocabulary:
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def warm(self) -> None:
        """Makes the vocabulary, which would hold up other threads later."""
        _ = self.vocabulary

    def compile(self, structured: StructuredOutputs) -> Grammar:
        """Raises InvalidParameterError for what can't be enforced, is malformed or too large."""
        kind = next(name for name in KINDS if getattr(structured, name) not in (None, False))
        value = getattr(structured, kind)
        spaces = "tight" if structured.disable_any_whitespace else "loose"
        key = (kind, spaces, *(value if isinstance(value, list) else [str(value)]))
        with self._lock:
            found = self._kept.get(key)
            if isinstance(found, tuple) and found[1].worn:
                self._drop(key)
                found = None
            if found is not None:
                self._kept.move_to_end(key)
                self._hits += 1
        if found is None:
            found = self._compile(kind, value, structured.disable_any_whitespace)
            self._keep(key, found)
        if isinstance(found, InvalidParameterError):
            raise InvalidParameterError(found.field, found.value, found.allowed)
        marker = None if structured.start_after is None else self._marker(structured.start_after)
        matcher, use = found
        return Grammar(matcher, self.vocabulary, marker, use)

    def _compile(self, kind: str, value: Any, tight: bool) -> _Compiled | InvalidParameterError:
        from llguidance import LLMatcher

        vocabulary = self.vocabulary
        begin = time.perf_counter()
        try:
            text = _source(kind, value, tight)
            matcher = LLMatcher(vocabulary.tokens, text, log_level=0, limits=_parser_limits())
            _check(kind, value, matcher)
            found: _Compiled | InvalidParameterError = matcher, Use()
        except InvalidParameterError as error:
            found = error
        except Exception:  # whatever it is, it is this request's: others go on
            _LOG.exception("a check or the compiler failed on a structured output (%s)", kind)
            found = InvalidParameterError(f"structured.{kind}", value, "what can be checked and compiled")
        with self._lock:
            self._compiled += 1
            self._seconds += time.perf_counter() - begin
        return found

    def _keep(self, key: tuple[str, ...], found: _Compiled | InvalidParameterError) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = found
            self._kept_chars += sum(map(len, key))
            while len(self._kept) > limits.MAX_CACHED_GRAMMARS or self._kept_chars > limits.MAX_CACHED_GRAMMAR_CHARS:
                self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[str, ...]) -> None:
        del self._kept[key]
        self._kept_chars -= sum(map(len, key))

    def _marker(self, text: str) -> Marker:
        with self._lock:
            marker = self._markers.get(text)
        if marker is None:
            marker = Marker(text, self.vocabulary.token_bytes)
            with self._lock:
                self._markers[text] = marker
                if len(self._markers) > limits.MAX_CACHED_MARKERS:
                    self._markers.popitem(last=False)
        return marker

    def stats(self) -> dict[str, Any]:
        """grammars_compiled, also those refused; grammar_cache_hits; grammar_seconds: spent on compiling."""
        with self._lock:
            return {
                "grammars_compiled": self._compiled,
                "grammar_cache_hits": self._hits,
                "grammar_seconds": self._seconds,
            }


def _source(kind: str, value: Any, tight: bool) -> str:
    """llguidance's form of the grammar; what it would get wrong, ignore or take too long for is refused here."""
    from llguidance import LLMatcher

    if kind in ("json", "json_object"):
        schema = checked_schema(value) if kind == "json" else {"type": "object"}
        options: dict[str, Any] = {"whitespace_flexible": not tight}
        if not tight:
            options["whitespace_pattern"] = SPACES
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]
    if kind == "regex":
        check_regex("structured.regex", value)
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        return LLMatcher.grammar_from_lark(f"start: {lark_choice(value)}")
    lark = lark_from_gbnf(value) if is_gbnf(value) else value
    without, bounded = bounded_schemas("structured.grammar", lark)
    check_lark("structured.grammar", without)
    return LLMatcher.grammar_from_lark(bounded)


def _check(kind: str, value: Any, matcher: LLMatcher) -> None:
    """Refuses a grammar that did not compile, or that has no first token."""
    problem = matcher.get_error()
    if not problem:
        first = matcher.deep_copy()
        first.compute_ff_tokens()
        allowed = first.compute_bitmask()
        problem = first.get_error() or ("" if any(allowed) else "nothing satisfies it")
        if problem.startswith("NoExtension"):
            problem = "nothing satisfies it"
    if problem:
        raise InvalidParameterError(f"structured.{kind}", value, f"one that compiles ({_reason(kind, problem)})")


def _reason(kind: str, problem: str) -> str:
    """The first line says where in the grammar it is; below it the place is drawn, and a regex's error told."""
    lines = problem.splitlines()
    error = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    where = "" if kind == "regex" and error else lines[0].removesuffix(" regex parse error:")
    return f"{where} {error}".strip()[:300]


def _parser_limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=limits.MAX_GRAMMAR_ROW_ITEMS,
        initial_lexer_fuel=limits.MAX_GRAMMAR_BUILD_FUEL,
        step_lexer_fuel=limits.MAX_GRAMMAR_STEP_FUEL,
        step_max_items=limits.MAX_GRAMMAR_STEP_ITEMS,
        max_lexer_states=limits.MAX_GRAMMAR_LEXER_STATES,
        max_grammar_size=limits.MAX_GRAMMAR_SYMBOLS,
        precompute_large_lexemes=True,
        verbose_errors=False,
    )
