"""A small language for programs that call models; docs/language.md tells it.

@function
def classify(s, text):
    s += f"Text: {text}\nMood:"
    s += select("mood", [" good", " bad"])
"""

from __future__ import annotations

from octavo.lang.backends.choose import flush_cache, set_default_backend
from octavo.lang.backends.interface import Backend
from octavo.lang.decorator import Function, function
from octavo.lang.expressions import (
    Expression,
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    greedy_token_selection,
    select,
    set_var,
    system,
    system_begin,
    system_end,
    token_length_normalized,
    unconditional_likelihood_normalized,
    user,
    user_begin,
    user_end,
)
from octavo.lang.state import ProgramState, ProgramStateGroup

__all__ = [
    "Backend",
    "Expression",
    "Function",
    "ProgramState",
    "ProgramStateGroup",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "greedy_token_selection",
    "select",
    "set_default_backend",
    "set_var",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
]
