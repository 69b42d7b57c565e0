"""Programs on an `LLM` in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.engine.llm import LLM
from octavo.engine.score import score_pairs
from octavo.lang.backends.interface import Completion, Generated
from octavo.lang.backends.tokens import choices_ids, kept_ids, parts_of, prompt_ids
from octavo.lang.cancellation import Cancellation
from octavo.lang.choices import Scored
from octavo.lang.prompt import Part, Prompt
from octavo.lang.turns import Turns
from octavo.params import SamplingParams


class EngineBackend:
    """Each call is a request of its own; calls of many threads share the LLM's batches."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        tokenizer = llm.tokenizer
        self.turns = Turns(
            lambda messages, opens: tokenizer.apply_chat_template(messages, add_generation_prompt=opens),
            lambda: tokenizer.special_texts.get("bos_token", ""),
        )

    def _encode(self, text: str, special: bool) -> list[int]:
        return self.llm.tokenizer.encode(text, add_special_tokens=special)

    @property
    def _whole(self) -> bool:
        return self.llm.tokenizer.strips_leading_space

    def _ids(self, prompt: Prompt) -> list[int]:
        return prompt_ids(prompt, self._encode, whole=self._whole)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_text: Callable[[str], None] | None,
        cancellation: Cancellation,
    ) -> Generated:
        submission = self.llm.submit(self._ids(prompt), params, streams=on_text is not None)
        with cancellation.calls(submission.cancel):
            if on_text is not None:
                for delta in submission.deltas():
                    if delta.index == 0:
                        on_text(delta.text)
            output = submission.result()
        cancellation.check()
        return Generated(
            completions=[
                Completion(
                    text=each.text,
                    finish_reason=each.finish_reason,
                    stop_reason=each.stop_reason,
                    token_ids=each.token_ids,
                    num_tokens=len(each.token_ids),
                    logprobs=each.logprobs,
                )
                for each in output.outputs
            ],
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens,
            prompt_logprobs=output.prompt_logprobs,
            seed=output.seed,
            time_to_first_token=output.timings.ttft if output.timings else None,
        )

    def kept(self, completion: Completion, text: str) -> list[Part]:
        ids, tokenizer = completion.token_ids or [], self.llm.tokenizer
        count, rest = kept_ids(ids, text, tokenizer.token_bytes, tokenizer.special_ids)
        if rest and text == completion.text and not isinstance(completion.stop_reason, str):
            # It holds bytes that are no characters: nothing spells them but their tokens.
            count, rest = len(ids) - (ids[-1] in tokenizer.special_ids or ids[-1] == completion.stop_reason), ""
        return parts_of(text, ids, count, rest)

    def score(
        self, prompt: Prompt, choices: Sequence[str], unconditional: bool, cancellation: Cancellation
    ) -> list[Scored]:
        cancellation.check()
        shared, joined = choices_ids(prompt, choices, self._encode, whole=self._whole)
        behind = [ids[shared:] for ids in joined]
        pairs = [(ids[:shared], ids[shared:]) for ids in joined]
        alone = [(ids[:1], ids[1:]) for ids in behind if unconditional and len(ids) > 1]
        scores = score_pairs(self.llm, pairs + alone)
        given, without = scores[: len(pairs)], iter(scores[len(pairs) :])
        found = []
        for ids, each in zip(behind, given):
            prior = [0.0, *(next(without).logprobs if len(ids) > 1 else [])] if unconditional else None
            found.append(Scored(ids, each.logprobs, prior))
        return found

    def warm(self, prompt: Prompt) -> None:
        self.llm.generate([self._ids(prompt)], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)

    def flush_cache(self) -> None:
        self.llm.flush_cache()
