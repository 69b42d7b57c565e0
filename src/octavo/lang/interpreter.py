"""Runs expressions, one after another, on a state's transcript."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from octavo.errors import OctavoError, ProgramError
from octavo.lang.backends.interface import Completion, Generated
from octavo.lang.choices import pick
from octavo.lang.expressions import (
    Expression,
    Gen,
    Joined,
    ScopeBegin,
    ScopeEnd,
    Select,
    SetVariable,
    Turn,
    TurnBegin,
    TurnEnd,
)
from octavo.lang.feed import Feed
from octavo.lang.place import Place
from octavo.lang.run import Run, derived_seed
from octavo.lang.sampling import merged
from octavo.lang.transcript import Transcript
from octavo.lang.typed import value_of


class Interpreter:
    """path: the state's place among the forks of the run. What fails raises ProgramError with the program's line."""

    def __init__(self, run: Run, transcript: Transcript, path: str, feed: Feed | None) -> None:
        self.run = run
        self.transcript = transcript
        self.path = path
        self.feed = feed
        self._num_gens = 0
        self._num_children = 0

    def child_path(self) -> str:
        """A new one at each call; programs called and forks made do not change the seeds of the gens here."""
        self._num_children += 1
        return f"{self.path}/{self._num_children - 1}"

    def execute(self, item: str | Expression, place: Place) -> None:
        """`place`: of a text, which does not know its own."""
        self.run.cancellation.check()
        if isinstance(item, Joined):
            for each in item.items:
                self.execute(each, item.place)
        elif isinstance(item, Turn):
            self.execute(TurnBegin(role=item.role, place=item.place), item.place)
            self.execute(item.content, item.place)
            self.execute(TurnEnd(role=item.role, place=item.place), item.place)
        else:
            try:
                self._step(item)
            except OctavoError as error:
                where = place if isinstance(item, str) else item.place
                shown = str(item) if isinstance(item, (Gen, Select)) else ""
                raise ProgramError(where.file, where.line, shown, error) from error

    def _step(self, item: str | Expression) -> None:
        transcript = self.transcript
        if isinstance(item, str):
            self._header(generates=False, when=item != "")
            transcript.write(item)
            self._tell(None, item)
        elif isinstance(item, Gen):
            self._header(generates=True)
            self._generate(item)
        elif isinstance(item, Select):
            self._header(generates=True)
            self._select(item)
        elif isinstance(item, TurnBegin):
            transcript.begin_turn(item.role)
        elif isinstance(item, TurnEnd):
            self._header(generates=False)
            transcript.end_turn(item.role)
        elif isinstance(item, SetVariable):
            transcript.set(item.name, item.value, {})
        elif isinstance(item, ScopeBegin):
            transcript.begin_scope(item.name)
        elif isinstance(item, ScopeEnd):
            transcript.end_scope(item.name)
        else:
            raise TypeError(f"no such expression: {type(item).__name__}")

    def _header(self, *, generates: bool, when: bool = True) -> None:
        if when:
            self._tell(None, self.transcript.before_content(generates=generates))

    def _tell(self, name: str | None, text: str) -> None:
        if self.feed is not None:
            self.feed.push(name, text)

    def _generate(self, gen: Gen) -> None:
        run, backend = self.run, self.run.backend
        seed = derived_seed(run.seed, f"{self.path}#{self._num_gens}")
        self._num_gens += 1
        params = merged(run.defaults, gen.params, seed)
        streams = self.feed is not None and gen.dtype is None  # of a typed text the end may not be kept

        def on_text(text: str) -> None:
            self._tell(gen.name, text)

        generated = backend.generate(self.transcript.prompt(), params, on_text if streams else None, run.cancellation)
        values: list[Any] = []
        shown: list[str] = []
        for completion in generated.completions:
            value, text = (completion.text,) * 2 if gen.dtype is None else value_of(gen.dtype, completion.text)
            values.append(value)
            shown.append(text)
        for part in backend.kept(generated.completions[0], shown[0]):
            self.transcript.write(part)
        if not streams:
            self._tell(gen.name, shown[0])
        metas = [_meta(generated, completion) for completion in generated.completions]
        if params.n == 1:
            self.transcript.set(gen.name, values[0], metas[0])
        else:
            self.transcript.set(gen.name, values, {**metas[0], "outputs": metas})

    def _select(self, select: Select) -> None:
        alone = select.method == "unconditional_likelihood_normalized"
        prompt = self.transcript.prompt()
        scored = self.run.backend.score(prompt, select.choices, alone, self.run.cancellation)
        chosen = select.choices[pick(select.method, scored)]
        self.transcript.write(chosen)
        self._tell(select.name, chosen)
        meta = {
            "choices": list(select.choices),
            "normalized_prompt_logprobs": [each.mean for each in scored],
            "scores": [asdict(each) for each in scored],
        }
        self.transcript.set(select.name, chosen, meta)


def _meta(generated: Generated, completion: Completion) -> dict[str, Any]:
    return {
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "token_ids": completion.token_ids,
        "completion_tokens": completion.num_tokens,
        "logprobs": completion.logprobs,
        "prompt_logprobs": generated.prompt_logprobs,
        "prompt_tokens": generated.prompt_tokens,
        "cached_tokens": generated.cached_tokens,
        "seed": generated.seed,
        "time_to_first_token": generated.time_to_first_token,
    }
