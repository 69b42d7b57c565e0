"""`octavo generate`: completes one prompt."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli import engine, options, terminal

if TYPE_CHECKING:
    from octavo.engine.llm import LLM
    from octavo.outputs import RequestOutput
    from octavo.params import SamplingParams


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from; standard input when left out.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", "-f", help="Read the prompt from a file.", dir_okay=False)
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message: use the model's chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole RequestOutput as one line of JSON.")] = False,
    n: Annotated[int | None, typer.Option("--n", "-n", help="Number of answers.")] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: logprobs of this many tokens a step.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")] = False,
    model: options.Model = "smollm2",
    revision: options.Revision = None,
    weights: options.Weights = "auto",
    kv_dtype: options.KVDtype = "f16",
    kv_memory: options.KVMemory = None,
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
    kernels: options.Kernels = "auto",
) -> None:
    """Complete a text, or answer a message with --chat.

    Sampling options that are not given have the model's recommended values, else those of octavo.SamplingParams.
    """
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs needs --json, which prints them")
    text = _prompt_text(prompt, prompt_file)
    given = options.given_sampling(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or None,
        logprobs=logprobs,
        ignore_eos=ignore_eos or None,
    )
    engine_options = options.EngineOptions(
        model, revision, weights, kv_dtype, kv_memory, max_model_len, threads, kernels
    )
    with engine.open_engine(engine_options) as llm:
        params = replace(llm.get_default_sampling_params(), **given)
        if as_json:
            print(_json(_complete(llm, text, chat, params)))
        elif params.n > 1:
            for completion in _complete(llm, text, chat, params).outputs:
                print(f"--- {completion.index}\n{completion.text}")
        else:
            _stream(llm, text, chat, params)


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from its one source; of a file or a pipe, one line end at the very end does not count."""
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("give either PROMPT or --prompt-file, not both")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        try:
            text = prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"--prompt-file: {error}") from error
    elif terminal.is_terminal(sys.stdin):
        raise typer.BadParameter("no PROMPT: give it as an argument, with --prompt-file, or through a pipe")
    else:
        text = sys.stdin.read()
    return text.removesuffix("\n")


def _complete(llm: LLM, text: str, chat: bool, params: SamplingParams) -> RequestOutput:
    if chat:
        return llm.chat([{"role": "user", "content": text}], params, use_tqdm=False)[0]
    return llm.generate(text, params, use_tqdm=False)[0]


def _json(output: RequestOutput) -> str:
    """One line; the moments of its timings as the durations they stand for."""
    fields = asdict(output)
    if output.timings is not None:
        fields["timings"] = {name: getattr(output.timings, name) for name in ("queue_time", "ttft", "latency")}
    return json.dumps(fields, ensure_ascii=False)


def _stream(llm: LLM, text: str, chat: bool, params: SamplingParams) -> None:
    prompt = [{"role": "user", "content": text}] if chat else text
    with closing(llm.stream(prompt, params)) as deltas:
        for delta in deltas:
            terminal.show(delta.text)
    print()
