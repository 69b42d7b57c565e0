"""A program's text as it comes, by variable or whole, from threads and event loops."""

from __future__ import annotations

import asyncio
import threading

import pytest

from octavo import LLM, InvalidParameterError, ProgramError, ProgramState, assistant, function, gen, select, user
from tests.support.llms import assert_idle


@function
def talk(s: ProgramState) -> None:
    s += user("hi")
    s += assistant(gen("a", max_tokens=12, ignore_eos=True) + "!" + select("b", [" yes", " no"]))


def test_what_comes_is_the_text() -> None:
    whole = talk.run(seed=4)
    state = talk.run(seed=4, stream=True)
    assert "".join(state.text_iter()) == state.text() == whole.text()


def test_a_variable_comes_in_pieces_by_itself() -> None:
    state = talk.run(seed=4, stream=True)
    pieces = list(state.text_iter("a"))
    assert len(pieces) > 3
    assert "".join(pieces) == state["a"]
    assert list(state.text_iter("b")) == [state["b"]]


def test_a_reader_waits_for_a_variable_but_not_for_the_end() -> None:
    go = threading.Event()

    @function
    def slow(s: ProgramState) -> None:
        s += "x" + gen("first", max_tokens=2, ignore_eos=True)
        assert go.wait(10)
        s += gen("second", max_tokens=2, ignore_eos=True)

    state = slow.run(stream=True)
    assert isinstance(state["first"], str)
    go.set()
    assert isinstance(state["second"], str)
    assert state.error() is None


def test_forks_of_a_streaming_run_are_read_as_they_come_too() -> None:
    forks: list[ProgramState] = []

    @function
    def split(s: ProgramState) -> None:
        s += "x"
        forks.extend(s.fork(2))
        forks[0].__iadd__(gen("a", max_tokens=6, ignore_eos=True))

    state = split.run(stream=True)
    state.sync()
    assert "".join(forks[0].text_iter("a")) == forks[0]["a"]
    assert list(forks[1].text_iter()) == []


def test_an_error_comes_at_the_end_of_what_there_is() -> None:
    @function
    def broken(s: ProgramState) -> None:
        s += "hello"
        s += gen("x", stop_token_ids=[10**6])

    state = broken.run(stream=True)
    texts = state.text_iter()
    assert next(texts) == "hello"
    with pytest.raises(ProgramError, match=r"gen\('x'\)"):
        next(texts)
    with pytest.raises(ProgramError):
        state["x"]


def test_only_a_streaming_run_can_be_read_as_it_comes() -> None:
    with pytest.raises(InvalidParameterError, match="true in `run`"):
        talk.run().text_iter()


def test_event_loops_read_many_programs_at_once() -> None:
    async def read(seed: int) -> tuple[str, ProgramState]:
        state = talk.run(seed=seed, stream=True)
        return "".join([piece async for piece in state.text_async_iter()]), state

    async def all_of_them() -> list[tuple[str, ProgramState]]:
        return await asyncio.gather(*(read(seed) for seed in range(8)))

    for text, state in asyncio.run(all_of_them()):
        assert text == state.text()


def test_an_async_reader_gets_meta_data_on_request() -> None:
    async def read() -> list[tuple[str, dict[str, object]]]:
        state = talk.run(stream=True)
        return [piece async for piece in state.text_async_iter("b", return_meta_data=True)]

    [(text, _)] = asyncio.run(read())
    assert text in (" yes", " no")


def test_a_reader_whose_loop_is_gone_does_not_stop_the_program() -> None:
    go = threading.Event()

    @function
    def slow(s: ProgramState) -> None:
        s += "x"
        assert go.wait(10)
        s += "y" + gen("a", max_tokens=2, ignore_eos=True)

    state = slow.run(stream=True)
    pieces = state.text_async_iter()
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(pieces.__anext__()) == "x"
    loop.close()
    go.set()
    assert state.text() == "xy" + state["a"]
    assert "".join(state.text_iter()) == state.text()


def test_run_async_gives_what_run_gives_and_raises_what_it_raises() -> None:
    @function
    def broken(s: ProgramState) -> None:
        s += "x" + gen("x", stop_token_ids=[10**6])

    async def main() -> list[ProgramState]:
        with pytest.raises(ProgramError, match=r"gen\('x'\)"):
            await broken.run_async()
        return await asyncio.gather(*(talk.run_async(seed=seed) for seed in range(4)))

    states = asyncio.run(main())
    assert [state.text() for state in states] == [talk.run(seed=seed).text() for seed in range(4)]


def test_a_cancelled_task_ends_its_program_and_frees_its_memory(llm: LLM) -> None:
    ended = threading.Event()

    @function
    def endless(s: ProgramState) -> None:
        s += "x"
        try:
            s += gen("x", max_tokens=1900, ignore_eos=True)
        finally:
            ended.set()

    async def main() -> None:
        task = asyncio.create_task(endless.run_async())
        while llm.stats()["running"] == 0:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = llm.stats()["computed_tokens"]
    asyncio.run(main())
    assert ended.wait(5)
    assert llm.stats()["computed_tokens"] - before < 1900 / 2
    assert_idle(llm)
