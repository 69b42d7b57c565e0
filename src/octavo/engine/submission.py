"""A request under way, in the hands of whoever waits for it."""

from __future__ import annotations

from collections.abc import Generator
from queue import SimpleQueue

from octavo.engine.loop import EngineLoop
from octavo.outputs import RequestOutput, TextDelta


class Submission:
    """Made by LLM.submit. One thread reads it; any may cancel it."""

    def __init__(
        self, loop: EngineLoop, request_id: str, updates: SimpleQueue[tuple[int, TextDelta | RequestOutput]]
    ) -> None:
        self._loop = loop
        self._request_id = request_id
        self._updates = updates
        self._output: RequestOutput | None = None

    def deltas(self) -> Generator[TextDelta, None, None]:
        """The text as it is made, until the request ends; nothing if it was not submitted with `streams`."""
        try:
            while self._output is None:
                self._loop.check_process()  # in a forked child nothing would ever come
                _, update = self._updates.get()
                if isinstance(update, RequestOutput):
                    self._output = update
                else:
                    yield update
        finally:
            if self._output is None:  # the reader was interrupted: nobody waits any more
                self.cancel()

    def result(self) -> RequestOutput:
        """Waits for the end. Raises what ended the request if that was an error; "abort" is a finish_reason."""
        for _ in self.deltas():
            pass
        assert self._output is not None
        if self._output.error is not None:
            raise self._output.error
        return self._output

    def cancel(self) -> None:
        self._loop.post(lambda engine: engine.cancel(self._request_id))
