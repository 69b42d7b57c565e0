"""Constraints on output: from a StructuredOutputs to a fold over token ids that says which token may come next."""

from __future__ import annotations

from octavo.grammar.compiler import Grammar as Grammar
from octavo.grammar.compiler import GrammarCompiler as GrammarCompiler
from octavo.grammar.constraint import Constraint as Constraint
from octavo.grammar.masks import MaskBuffer as MaskBuffer
