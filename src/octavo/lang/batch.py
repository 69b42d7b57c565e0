"""Many programs side by side, on bounded threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from octavo.engine.progress import Progress
from octavo.errors import InvalidParameterError
from octavo.lang.run import Crew
from octavo.lang.state import ProgramState
from octavo.limits import MAX_BATCH_THREADS

Prepared = Callable[[int], tuple[ProgramState, Callable[[], None]]]  # the i-th state, and what runs its program


def _threads(asked: int | str, items: int) -> int:
    if asked == "auto":
        return max(1, min(items, MAX_BATCH_THREADS))
    if not isinstance(asked, int) or isinstance(asked, bool) or not 1 <= asked <= MAX_BATCH_THREADS:
        raise InvalidParameterError("num_threads", asked, f'"auto", or an integer from 1 to {MAX_BATCH_THREADS}')
    return max(1, min(items, asked))


def run_all(
    prepared: Prepared, items: int, num_threads: int | str, crew: Crew, *, progress_bar: bool
) -> list[ProgramState]:
    threads = _threads(num_threads, items)
    states: list[ProgramState] = []
    futures: list[Future[None]] = []
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="octavo-batch") as pool:
            try:
                for i in range(items):
                    state, call = prepared(i)
                    states.append(state)
                    futures.append(pool.submit(call))
                with Progress(items, enabled=progress_bar) as progress:
                    for _ in as_completed(futures):
                        progress.finished()
            except BaseException:
                _end(states, futures)
                raise
    finally:
        crew.close()
    return states


def stream_all(
    prepared: Prepared, items: int, num_threads: int | str, crew: Crew
) -> Generator[ProgramState, None, None]:
    threads = _threads(num_threads, items)
    return _stream_all(prepared, items, threads, crew)


def _stream_all(prepared: Prepared, items: int, threads: int, crew: Crew) -> Generator[ProgramState, None, None]:
    under_way: deque[tuple[ProgramState, Future[None]]] = deque()
    started = 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="octavo-batch")
    try:
        while started < items or under_way:
            while started < items and len(under_way) < 2 * threads:
                state, call = prepared(started)
                under_way.append((state, pool.submit(call)))
                started += 1
            state, future = under_way.popleft()
            try:
                future.result()
            finally:
                if not future.done():  # interrupted: it is still to be ended
                    under_way.appendleft((state, future))
            yield state
    finally:
        _end([state for state, _ in under_way], [future for _, future in under_way])
        pool.shutdown()
        crew.close()


def _end(states: list[ProgramState], futures: list[Future[None]]) -> None:
    for future in futures:
        future.cancel()
    for state in states:
        state._interpreter.run.cancellation.cancel()
