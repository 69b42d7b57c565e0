"""The prompts of the exactness suite: 24 for the real model, a handful for the tiny ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from octavo.params import SamplingParams
from octavo.tokenizer import Tokenizer

from .machine import Case

TEXT = Path(__file__).parent.parent / "quality" / "text.txt"

# How each request samples; every one asks for logprobs, so that bits of floats are compared and not only ids.
STYLES: list[dict[str, object]] = [
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": 11, "logprobs": 0},
    {"temperature": 1.0, "top_k": 40, "seed": 12, "logprobs": 3},
    {"temperature": 1.2, "min_p": 0.05, "seed": 13, "logprobs": 1},
    {"temperature": 0.9, "typical_p": 0.8, "seed": 14, "logprobs": 2},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "seed": 15, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 1.0, "logit_bias": {10: 3.0, 20: -4.0}, "seed": 16, "logprobs": 1},
    {"temperature": 1.0, "min_tokens": 4, "seed": 17, "top_p": 0.5, "logprobs": 20},
    {"temperature": 1.0, "allowed_token_ids": list(range(5, 200)), "seed": 18, "logprobs": 1},
    {"temperature": 0.9, "n": 2, "seed": 19, "logprobs": 1},
    {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 1},
]

# Where in the text each prompt starts, and how many tokens it has.
SHORT = [(0, 1), (7, 2), (30, 15), (61, 16), (100, 17), (150, 31), (200, 33), (260, 48), (330, 64), (420, 65),
         (500, 80), (610, 97), (720, 111), (850, 128), (990, 150), (1150, 180), (1340, 215), (1570, 257),
         (1840, 300)]  # fmt: skip
LONG = [(0, 1110), (400, 1153), (900, 1200), (1300, 1301), (700, 2100)]


def text_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(TEXT.read_text(encoding="utf-8"))


def model_cases(tokenizer: Tokenizer, max_tokens: int, *, short_form: bool) -> list[Case]:
    """24 cases: four of more than 1,100 prompt tokens and one of 2,100. The short form has eight, two of them long."""
    ids = text_ids(tokenizer)
    spans = SHORT + LONG
    if short_form:
        spans = [SHORT[i] for i in (2, 3, 4, 9, 12, 14)] + [LONG[0]]
    cases = []
    for i, (start, length) in enumerate(spans):
        style = dict(STYLES[i % len(STYLES)])
        if length > 1000:
            style.pop("prompt_logprobs", None)
        prompt = tuple(ids[start : start + length])
        assert len(prompt) == length
        cases.append(Case(f"p{i}-{length}", prompt, SamplingParams(max_tokens=max_tokens, **style)))  # type: ignore[arg-type]
    return cases


def constrained_cases(prompts: Sequence[Sequence[int]]) -> list[Case]:
    """Grammars over each prompt; they need no letter that a tiny model lacks."""
    fields = {"kind": {"enum": ["alpha_one", "alpha_two"]}, "n": {"type": "integer"}, "s": {"type": "string"}}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    structured: list[dict[str, object]] = [
        {"json": schema, "disable_any_whitespace": True},
        {"regex": "[a-d]{2}(--forced--[x-z]){2}"},
        {"choice": ["one_of_them", "one_of_these", "another"]},
        {"grammar": 'root ::= item+\nitem ::= "<" [a-c]{1,2} "/>" | "(" root ")"'},
        {"regex": "[k-m]{3}--the-end", "start_after": "e"},
    ]
    styles: list[dict[str, object]] = [
        {"temperature": 1.0, "logprobs": 2},
        {"temperature": 0.0, "logprobs": 1, "presence_penalty": 0.4},
        {"temperature": 0.8, "top_p": 0.9, "n": 2, "logprobs": 0},
        {"temperature": 1.0, "logit_bias": {10: 3.0, 40: 5.0}, "min_tokens": 1},
    ]
    cases = []
    for i, prompt in enumerate(prompts):
        for j, constraint in enumerate(structured):
            style = {**styles[(i + j) % len(styles)], "seed": 10 * i + j, "structured": constraint, "max_tokens": 24}
            cases.append(Case(f"g{i}-{j}", tuple(prompt), SamplingParams(**style)))  # type: ignore[arg-type]
    return cases


def sharing_cases(ids: Sequence[int], prefix: int, count: int, max_tokens: int) -> list[Case]:
    """Prompts that begin with the same `prefix` ids; every third goes on with 70 more that those share."""
    cases = []
    for i in range(count):
        second = ids[prefix : prefix + 70] if i % 3 == 0 else ()
        start = prefix + 70 + 11 * i
        prompt = (*ids[:prefix], *second, *ids[start : start + 5 + 2 * i])
        style = {"temperature": 0.9, "seed": i, "logprobs": i % 3}
        cases.append(Case(f"s{i}-{len(prompt)}", prompt, SamplingParams(max_tokens=max_tokens, **style)))  # type: ignore[arg-type]
    return cases


def tiny_cases(vocab_size: int, max_tokens: int) -> list[Case]:
    """Prompts of pseudo-random ids for a tiny model; the lengths meet block and span boundaries."""
    cases = []
    for i, length in enumerate((1, 15, 16, 17, 63, 64, 65, 100, 33, 48, 20, 40)):
        prompt = tuple((7919 * (i + 1) * (j + 3) + j * j) % (vocab_size - 4) + 2 for j in range(length))
        style = dict(STYLES[i % len(STYLES)])
        if "allowed_token_ids" in style:
            style["allowed_token_ids"] = list(range(5, vocab_size // 2))
        cases.append(Case(f"t{i}-{length}", prompt, SamplingParams(max_tokens=max_tokens, **style)))  # type: ignore[arg-type]
    return cases
