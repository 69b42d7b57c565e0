"""The options that several commands share, each said once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.limits import MAX_BATCH_SEQUENCES

if TYPE_CHECKING:
    pass

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A known name, a .gguf file, a Hugging Face folder, org/name or org/name:file.gguf.",
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")]
Weights = Annotated[str, typer.Option(help="auto, f32, q8 or q4; auto keeps the file's class.")]
KVDtype = Annotated[str, typer.Option("--kv-dtype", help="f16, f32 or int8.")]
KVMemory = Annotated[
    str | None,
    typer.Option("--kv-memory", help="Memory for KV blocks, e.g. 2GiB.  [default: half of the free memory]"),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option("--max-model-len", help="Longest sequence in tokens.  [default: the model's]"),
]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", "--batch", help="Most sequences in one step.")]
Threads = Annotated[int | None, typer.Option(help="Worker threads.  [default: a core each]")]
Kernels = Annotated[str, typer.Option(help="auto, scalar, avx2, avx512 or amx; same bits.")]

MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Nucleus of this mass.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Only the k likeliest; 0: all.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="Least share of the likeliest one's.")]
RepetitionPenalty = Annotated[float | None, typer.Option("--repetition-penalty", help="Above 1: repeat less.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer.  [default: a fresh one]")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop at this text; may be given again.")]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine is to be opened; the fields are `LLM`'s arguments."""

    model: str
    revision: str | None = None
    weights: str = "auto"
    kv_dtype: str = "f16"
    kv_memory: str | None = None
    max_model_len: int | None = None
    threads: int | None = None
    kernels: str = "auto"
    max_num_seqs: int = MAX_BATCH_SEQUENCES


def given_sampling(**options: Any) -> dict[str, Any]:
    """The sampling options that were given. Raises InvalidParameterError before a model is loaded for nothing."""
    from octavo.params import SamplingParams

    given = {name: value for name, value in options.items() if value is not None}
    SamplingParams(**given)
    return given
