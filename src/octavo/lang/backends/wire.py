"""SamplingParams as fields of a request, and answers of OpenAI's shapes, with Octavo's fields where there are some."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from octavo.lang.backends.interface import Completion, Generated
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


def gathered(events: Iterable[Any], n: int, on_text: Callable[[str], None]) -> dict[str, Any]:
    """A streamed answer of n choices as if it had come whole; `on_text` gets the first one's text as it comes."""
    choices: list[dict[str, Any]] = [{"text": ""} for _ in range(n)]
    whole: dict[str, Any] = {"choices": choices}
    for event in events:
        whole["usage"] = event.get("usage") or whole.get("usage")
        for delta in event.get("choices", ()):
            choice = choices[delta["index"]]
            text = (delta["delta"].get("content") if "delta" in delta else delta.get("text")) or ""
            choice["text"] += text
            if "token_ids" in delta:
                choice.setdefault("token_ids", []).extend(delta["token_ids"] or ())
            for name, values in (delta.get("logprobs") or {}).items():
                logprobs = choice.setdefault("logprobs", {})
                if logprobs.get(name) is None:
                    logprobs[name] = values
                else:
                    logprobs[name] += values or ()
            for name in ("finish_reason", "stop_reason", "seed"):
                if delta.get(name) is not None:
                    choice[name] = delta[name]
            if delta["index"] == 0 and text:
                on_text(text)
    return whole


def generated_of(answer: dict[str, Any]) -> Generated:
    usage, choices = answer.get("usage") or {}, answer["choices"]
    return Generated(
        completions=[
            Completion(
                text=(choice["message"].get("content") or "") if "message" in choice else choice["text"],
                finish_reason=choice.get("finish_reason"),
                stop_reason=choice.get("stop_reason"),
                token_ids=choice.get("token_ids"),
                num_tokens=None if choice.get("token_ids") is None else len(choice["token_ids"]),
                logprobs=choice.get("logprobs"),
            )
            for choice in choices
        ],
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        prompt_logprobs=choices[0].get("prompt_logprobs"),
        seed=choices[0].get("seed"),
    )
