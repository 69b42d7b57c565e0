"""Which rows of a step need logits, what for, and how each is sampled; and which of them went wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping

from octavo.engine.batch import DRAW, LogitRows
from octavo.engine.request import Generation, Request
from octavo.errors import RequestFailedError
from octavo.executor.interface import StepResult
from octavo.grammar import MaskBuffer
from octavo.sampling import SamplerState
from octavo.scheduler.plan import ScheduledChunk, StepPlan


def choose_rows(
    plan: StepPlan, owner: Mapping[int, tuple[Request, Generation]], masks: MaskBuffer, errors: dict[int, Exception]
) -> LogitRows:
    """owner: by sequence id. Chunks whose rows can't be made go to `errors`."""
    wanted = LogitRows()
    constrained: list[tuple[int, SamplerState]] = []
    first_row = 0
    for index, chunk in enumerate(plan.sequences):
        request, generation = owner[chunk.sequence.id]
        prefills = chunk.start < chunk.sequence.prefill_end
        if prefills and request.first_scheduled is None:
            request.first_scheduled = time.monotonic()
        try:
            if prefills and generation is request.scorer:
                _add_scoring_rows(wanted, request, generation, index, chunk, first_row)
            if prefills and generation.foreseen:
                _add_foreseen_rows(wanted, generation, index, chunk, first_row)
            if chunk.samples:
                sampler = generation.sampler
                if sampler.constraint is not None and sampler.constraint.begun:
                    constrained.append((len(wanted.rows), sampler))
                    wanted.edits.append(None)  # until all masks are made
                else:
                    wanted.edits.append(sampler.edits() if sampler.edits_logits else None)
                wanted.scalars.append(sampler.scalars)
                wanted.positions.append(chunk.start + chunk.count)
                wanted.rows.append(first_row + chunk.count - 1)
                wanted.uses.append((index, DRAW))
        except Exception as error:
            errors[index] = error
        first_row += chunk.count
    if constrained:
        _add_masks(wanted, constrained, masks)
    if errors:
        wanted.drop(errors)
    return wanted


def _add_masks(wanted: LogitRows, constrained: list[tuple[int, SamplerState]], masks: MaskBuffer) -> None:
    """Sets the edits of rows whose grammar decides what may be drawn."""
    constraints = [sampler.constraint for _, sampler in constrained if sampler.constraint is not None]
    for (row, sampler), mask in zip(constrained, masks.fill(constraints)):
        try:
            wanted.edits[row] = sampler.edits(mask)
        except Exception as error:
            # Tokens foreseen before this one may end the output yet, so that it is never drawn.
            wanted.undrawable[wanted.uses[row][0]] = error


def _add_foreseen_rows(
    wanted: LogitRows, generation: Generation, index: int, chunk: ScheduledChunk, first_row: int
) -> None:
    """The rows that give the logprobs of forced tokens."""
    foreseen = generation.foreseen
    for position in range(max(foreseen.start, chunk.start + 1), min(foreseen.stop, chunk.start + chunk.count + 1)):
        wanted.scalars.append(generation.sampler.forced_scalars(chunk.sequence.token_ids[position]))
        wanted.positions.append(0)
        wanted.edits.append(None)
        wanted.rows.append(first_row + position - 1 - chunk.start)
        wanted.uses.append((index, position))


def _add_scoring_rows(
    wanted: LogitRows, request: Request, generation: Generation, index: int, chunk: ScheduledChunk, first_row: int
) -> None:
    for position in request.wanted_prompt_rows(chunk.start, chunk.count):
        scalars = generation.sampler.prompt_scalars(request.prompt_token_ids[position + 1])
        wanted.scalars.append(scalars)
        wanted.positions.append(0)
        wanted.edits.append(None)
        wanted.rows.append(first_row + position - chunk.start)
        wanted.uses.append((index, position + 1))


def find_bad_rows(plan: StepPlan, result: StepResult, wanted: LogitRows, errors: dict[int, Exception]) -> None:
    """Adds the chunks whose numbers went wrong."""
    bad: set[int] = set()
    if 0 in result.finite:
        end = 0
        for i, chunk in enumerate(plan.sequences):
            start, end = end, end + chunk.count
            if 0 in result.finite[start:end]:
                bad.add(i)
    if 0 in result.ok:
        bad.update(chunk for (chunk, _), ok in zip(wanted.uses, result.ok) if not ok)
    for i in bad:
        message = "the model produced a NaN or an infinity, or no token was left to draw from"
        errors.setdefault(i, RequestFailedError(message))
