"""SamplingParams as fields of a request."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from octavo.params import SamplingParams
from octavo.structured import StructuredOutputs

_DEFAULTS = SamplingParams()


def differing(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not as by default; `structured` is left to the caller."""
    found = {each.name: getattr(params, each.name) for each in fields(params) if each.name != "structured"}
    return {name: value for name, value in found.items() if value != getattr(_DEFAULTS, name)}


def structured_fields(structured: StructuredOutputs) -> dict[str, Any]:
    """What is given of it."""
    found = {each.name: getattr(structured, each.name) for each in fields(structured)}
    return {name: value for name, value in found.items() if value is not None and value is not False}
