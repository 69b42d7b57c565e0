"""Which requests the engine has, and who is tried alone after it died. Pure: no clock, no process, no loop.

After a death every request that was on board is a suspect. Suspects run one at a time until each has made a token; a
probe that passes while others wait is withdrawn, so that the next is alone as well. Then all go on together. One whose
solo run kills the engine is given up. Requests that came later wait until all that is settled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.engine.ipc import Token
from octavo.engine.stream import RequestStream
from octavo.errors import FrameError
from octavo.params import SamplingParams

# A death that anybody may have caused (kill -9, SIGSTOP) counts against the one that ran alone only the second time.
_UNCLEAR_SOLO_DEATHS = 2


@dataclass(slots=True, eq=False)
class Entry:
    """What a replay needs of a request: everything else about it is a fold over its emitted tokens."""

    number: int
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: RequestStream
    arrival: float
    last_item: float
    first_token: float | None = None
    emitted: list[list[int]] = field(default_factory=list)  # an entry for each of the n outputs
    solo_deaths: int = 0  # since its last token
    overdue: bool = False  # still in the queue at its queue deadline, as far as the engine has not said otherwise

    def accept(self, tokens: list[Token]) -> list[Token]:
        """Counts tokens as emitted; returns those that were not yet. Raises FrameError for what can't come next."""
        known = False
        for token in tokens:
            if not 0 <= token.index < len(self.emitted):
                raise FrameError(f"a token of output {token.index}, where there are {len(self.emitted)} outputs")
            ids = self.emitted[token.index]
            if token.position > len(ids):
                raise FrameError(f"token {token.position} of an output, where {len(ids)} comes next")
            if token.position == len(ids):
                ids.append(token.token_id)
            else:
                known = True
                token.index = -1
        return [token for token in tokens if token.index >= 0] if known else tokens


class Replay:
    """Methods that return entries: these are to be submitted to the engine now."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}  # all that are not finished
        self._aboard: dict[int, Entry] = {}
        self._waiting: dict[int, Entry] = {}  # for the engine, or for the suspects
        self._suspects: deque[Entry] = deque()
        self._probe: Entry | None = None
        self._withdrawn = False  # the probe has passed, and the engine was told to drop it
        self._up = False

    @property
    def settled(self) -> bool:
        """Whether requests run together, nobody under suspicion."""
        return self._up and self._probe is None

    def is_aboard(self, entry: Entry) -> bool:
        return entry.number in self._aboard

    def take(self, entry: Entry) -> list[Entry]:
        """A new request."""
        self.entries[entry.number] = entry
        self._waiting[entry.number] = entry
        return self._release() if self.settled else []

    def engine_up(self) -> list[Entry]:
        self._up = True
        return self._next()

    def made_token(self, entry: Entry) -> tuple[bool, list[Entry]]:
        """(whether to cancel the entry in the engine, entries to submit)."""
        if entry is not self._probe or self._withdrawn:
            return False, []
        entry.solo_deaths = 0  # it has lived through a step alone
        if self._suspects:
            self._withdrawn = True
            return True, []
        self._probe = None
        return False, self._release()

    def left_engine(self, number: int) -> list[Entry]:
        """The engine does not have the request any more: it ended, was withdrawn or was cancelled."""
        self._aboard.pop(number, None)
        if self._probe is None or number != self._probe.number:
            return []
        probe, self._probe = self._probe, None
        if probe.number in self.entries:  # withdrawn: it comes back with all the others
            self._waiting[probe.number] = probe
        return self._next()

    def forget(self, entry: Entry) -> bool:
        """The request has ended for its client. True: the engine has it still, and must be told."""
        self.entries.pop(entry.number, None)
        self._waiting.pop(entry.number, None)
        if entry in self._suspects:
            self._suspects.remove(entry)
        return entry.number in self._aboard

    def engine_died(self, *, own_fault: bool) -> list[Entry]:
        """Returns the entries to give up. own_fault: nobody from outside can have done it."""
        self._up = False
        probe, self._probe = self._probe, None
        given_up = []
        suspects = sorted((e for e in self._aboard.values() if e.number in self.entries), key=lambda e: e.number)
        self._aboard.clear()
        if probe is not None:
            suspects = []
            if probe.number in self.entries:
                probe.solo_deaths += 1
                if own_fault or probe.solo_deaths >= _UNCLEAR_SOLO_DEATHS:
                    given_up.append(probe)
                else:
                    suspects = [probe]
        self._suspects.extend(suspects)
        return given_up

    def _next(self) -> list[Entry]:
        if not self._suspects:
            return self._release()
        self._probe, self._withdrawn = self._suspects.popleft(), False
        return self._board([self._probe])

    def _release(self) -> list[Entry]:
        entries = sorted(self._waiting.values(), key=lambda entry: entry.number)
        self._waiting.clear()
        return self._board(entries)

    def _board(self, entries: Iterable[Entry]) -> list[Entry]:
        listed = list(entries)
        self._aboard.update((entry.number, entry) for entry in listed)
        return listed


class CrashLog:
    """Says when to give up: more than `most` crashes within `window` seconds, and no token made between them."""

    def __init__(self, most: int = 3, window: float = 60.0) -> None:
        self._most = most
        self._window = window
        self._times: list[float] = []

    def crashed(self, now: float) -> bool:
        """True: stay down."""
        self._times = [time for time in self._times if now - time <= self._window]
        self._times.append(now)
        return len(self._times) > self._most

    def made_token(self) -> None:
        if self._times:
            self._times.clear()
