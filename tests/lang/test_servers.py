"""The same program on an LLM, on an Octavo server, and on an OpenAI-compatible endpoint as far as that goes."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import (
    BackendError,
    InvalidParameterError,
    OctavoServer,
    OpenAIEndpoint,
    ProgramError,
    ProgramState,
    UnsupportedByBackendError,
    assistant,
    function,
    gen,
    select,
    system,
    user,
)
from tests.support.full_server import KEY, MODEL, FullServer, full_server
from tests.support.llms import environment


@function
def talk(s: ProgramState, asked: str) -> None:
    s += system("Be brief.")
    s += user(asked)
    s += assistant(gen("a", max_tokens=8, ignore_eos=True))
    s += user("more")
    forks = s.fork(2)
    forks += assistant(gen("b", max_tokens=4, ignore_eos=True) + " so " + select("c", ["yes", "no", "yep"]))
    forks.join()
    s += "end" + gen("d", max_tokens=4, n=2, stop=["e", "t"])
    s += select("e", ["x", "yz"], choices_method="unconditional_likelihood_normalized")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[FullServer]:
    with full_server(folder, api_key=[KEY]) as full:
        yield full


def url(server: FullServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_an_octavo_server_gives_the_bits_of_an_llm(server: FullServer) -> None:
    backend = OctavoServer(url(server), api_key=KEY)
    for seed in range(3):
        here, there = talk.run("hi", seed=seed), talk.run("hi", seed=seed, backend=backend)
        assert there.text() == here.text()
        for name in "abcde":
            assert there[name] == here[name]
        assert there.get_meta_info("a")["token_ids"] == here.get_meta_info("a")["token_ids"]
        wanted = here.get_meta_info("e")["scores"]
        assert there.get_meta_info("e")["scores"] == wanted


def test_constraints_hold_on_an_octavo_server_with_the_same_bits(server: FullServer) -> None:
    @function
    def held(s: ProgramState) -> None:
        s += "It is" + gen("i", max_tokens=40, dtype=int) + " or " + gen("r", max_tokens=20, regex="[a-c]{3,6}")
        s += gen("j", max_tokens=80, json_schema={"type": "array", "items": {"type": "boolean"}, "maxItems": 3})
        s += gen("t", max_tokens=1500, dtype=str)

    backend = OctavoServer(url(server), api_key=KEY)
    for seed in range(3):
        here, there = held.run(seed=seed), held.run(seed=seed, backend=backend)
        assert there.text() == here.text()
        assert (type(there["i"]), there["t"]) == (int, here["t"])


def test_a_stream_from_an_octavo_server_gives_the_same(server: FullServer) -> None:
    state = talk.run("hi", seed=1, stream=True, backend=OctavoServer(url(server), api_key=KEY))
    pieces = list(state.text_iter("a"))
    assert len(pieces) > 3
    assert state.text() == talk.run("hi", seed=1).text()


def test_a_stream_with_logprobs_of_the_prompt_comes_at_once(server: FullServer) -> None:
    @function
    def scored(s: ProgramState) -> None:
        s += "hello" + gen("a", max_tokens=6, ignore_eos=True, prompt_logprobs=1)

    state = scored.run(seed=1, stream=True, backend=OctavoServer(url(server), api_key=KEY))
    assert list(state.text_iter("a")) == [state["a"]] == [scored.run(seed=1)["a"]]
    assert len(state.get_meta_info("a")["prompt_logprobs"]) == 5


def test_a_batch_on_an_octavo_server_shares_the_prefix(server: FullServer) -> None:
    backend = OctavoServer(url(server), api_key=KEY, model=MODEL)

    @function
    def long(s: ProgramState, x: str) -> None:
        s += "A long beginning of every item. " * 20 + x
        s += gen("y", max_tokens=2, ignore_eos=True)

    states = long.run_batch([{"x": str(i)} for i in range(6)], backend=backend)
    assert all(state.get_meta_info("y")["cached_tokens"] >= 639 for state in states)


def test_a_refusal_of_a_server_is_told_with_the_programs_line(server: FullServer) -> None:
    with pytest.raises(ProgramError, match="answered 401") as error:
        talk.run("hi", backend=OctavoServer(url(server), api_key="wrong"))
    assert isinstance(error.value.error, BackendError)

    @function
    def long(s: ProgramState) -> None:
        s += "x" * 3000 + gen("y")

    with pytest.raises(ProgramError, match=r"answered 400.*tokens") as error:
        long.run(backend=OctavoServer(url(server), api_key=KEY))
    assert error.value.file == __file__


def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(ProgramError, match="cannot be reached"):
        chat.run(backend=OpenAIEndpoint("http://127.0.0.1:9/v1", "m"))
    with pytest.raises(InvalidParameterError, match=r"http://127\.0\.0\.1:8000"):
        OctavoServer("127.0.0.1:8000")


@function
def chat(s: ProgramState) -> None:
    s += system("Be brief.") + user("hi")
    s += assistant(gen("a", max_tokens=8, temperature=0))
    s += user("more")
    s += assistant(gen("b", max_tokens=8, temperature=0, logprobs=1))


def test_a_chat_runs_on_an_openai_endpoint(server: FullServer) -> None:
    backend = OpenAIEndpoint(url(server) + "/v1", MODEL, api_key=KEY)
    here, there, streamed = chat.run(), chat.run(backend=backend), chat.run(backend=backend, stream=True)
    assert there["a"] == here["a"] == "".join(streamed.text_iter("a"))
    assert [each["role"] for each in there.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert there.messages() == streamed.messages()
    assert there.get_meta_info("b")["logprobs"] == streamed.get_meta_info("b")["logprobs"]
    assert len(streamed.get_meta_info("b")["logprobs"]["content"]) > 0
    assert there.text() == "".join(f"{each['role']}: {each['content']}\n" for each in there.messages())


def test_plain_text_runs_on_an_openai_endpoint_without_chat(server: FullServer) -> None:
    @function
    def plain(s: ProgramState) -> None:
        s += "hello" + gen("a", max_tokens=8, temperature=0) + "!" + gen("b", max_tokens=4, n=2)

    backend = OpenAIEndpoint(url(server) + "/v1", MODEL, api_key=KEY, chat=False)
    state = plain.run(backend=backend, seed=1)
    assert state["a"] == plain.run(seed=1)["a"]
    assert len(state["b"]) == 2


@pytest.mark.parametrize(
    ("program", "is_chat", "message"),
    [
        (lambda s: s.assistant(select("x", ["a", "b"])), True, "does not tell how likely"),
        (lambda s: s.assistant(gen(regex="a+")), True, "cannot hold an output to a regex"),
        (lambda s: s.assistant(gen(dtype=int)), True, "cannot hold an output to a regex"),
        (lambda s: s.assistant(gen(top_k=3, min_p=0.1)), True, "has no min_p, top_k"),
        (lambda s: s.assistant("So " + gen()), True, "must be the first thing"),
        (lambda s: s.__iadd__("hi" + gen()), True, "must be the first thing"),
        (lambda s: s.assistant(gen()), False, "no template for turns"),
        (lambda s: s.__iadd__("hi" + gen(json_schema={"type": "object"})), False, "to JSON only with chat"),
    ],
)
def test_what_an_openai_endpoint_cannot_do_is_said(program: Any, is_chat: bool, message: str) -> None:
    backend = OpenAIEndpoint("http://127.0.0.1:9/v1", "m", chat=is_chat)
    with pytest.raises(ProgramError, match=message) as error:
        function(lambda s: program(s)).run(backend=backend)
    assert isinstance(error.value.error, UnsupportedByBackendError)
    with pytest.raises(UnsupportedByBackendError):
        backend.flush_cache()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers from a list; keeps what it was sent."""

    answers: list[tuple[int, dict[str, str], bytes]]
    bodies: list[Any]

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        status, headers, body = self.answers.pop(0)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[tuple[type[Handler], OpenAIEndpoint]]:
    handler = type("OwnHandler", (Handler,), {"answers": [], "bodies": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield handler, OpenAIEndpoint(f"http://127.0.0.1:{server.server_address[1]}/v1", "m")
        server.shutdown()
        thread.join()


def answer(content: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}).encode()


def test_an_overloaded_server_is_asked_again(endpoint: tuple[type[Handler], OpenAIEndpoint]) -> None:
    handler, backend = endpoint
    handler.answers += [(429, {"retry-after": "0"}, b"{}"), (503, {"retry-after": "0"}, b"{}")]
    handler.answers += [(200, {}, answer("one")), (200, {}, answer("two"))]
    state = chat.run(backend=backend)
    assert (state["a"], state["b"]) == ("one", "two")
    assert handler.bodies[-1]["messages"][-2:] == [
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "more"},
    ]


def test_a_schema_goes_out_as_response_format(endpoint: tuple[type[Handler], OpenAIEndpoint]) -> None:
    handler, backend = endpoint
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    @function
    def extract(s: ProgramState) -> None:
        s += user("hi") + assistant(gen("x", json_schema=schema))

    handler.answers.append((200, {}, answer('{"a": 1}')))
    assert extract.run(backend=backend)["x"] == '{"a": 1}'
    wanted = {"name": "answer", "schema": schema, "strict": True}
    assert handler.bodies[0]["response_format"] == {"type": "json_schema", "json_schema": wanted}


def test_an_endpoint_gets_the_length_under_its_own_name_and_a_short_seed_or_none(
    endpoint: tuple[type[Handler], OpenAIEndpoint],
) -> None:
    handler, plain = endpoint
    other = OpenAIEndpoint(plain._http.url, "m", max_tokens_field="max_completion_tokens", sends_seed=False)

    @function
    def short(s: ProgramState) -> None:
        s += user("hi") + assistant(gen("a", max_tokens=7)) + user("more") + assistant(gen("b", seed=(5 << 31) + 9))

    for backend in (plain, plain, other):
        handler.answers += [(200, {}, answer("x")), (200, {}, answer("y"))]
        short.run(backend=backend, seed=1)
    first, second, *again, third, _ = handler.bodies
    assert [first, second] == again
    assert 0 <= first["seed"] < 1 << 31
    assert second["seed"] == 9
    assert (first["max_tokens"], "max_completion_tokens" in first) == (7, False)
    assert third == {**{k: v for k, v in first.items() if k not in ("seed", "max_tokens")}, "max_completion_tokens": 7}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((500, {}, b'{"error": {"message": "out of luck"}}'), "answered 500: out of luck"),
        ((200, {}, b"<html>"), "not JSON"),
        ((200, {}, b'{"choices": [{}]}'), "another shape"),
    ],
)
def test_a_broken_answer_is_told(
    endpoint: tuple[type[Handler], OpenAIEndpoint], given: tuple[int, dict[str, str], bytes], message: str
) -> None:
    handler, backend = endpoint
    handler.answers.append(given)
    with pytest.raises(ProgramError, match=message) as error:
        chat.run(backend=backend)
    assert isinstance(error.value.error, BackendError)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n', "before its end"),
        (b'data: {"error": {"message": "broke"}}\n\n', "broke"),
    ],
)
def test_a_stream_that_breaks_off_is_an_error(
    endpoint: tuple[type[Handler], OpenAIEndpoint], body: bytes, message: str
) -> None:
    handler, backend = endpoint
    handler.answers.append((200, {"content-type": "text/event-stream"}, body))
    state = chat.run(backend=backend, stream=True)
    with pytest.raises(ProgramError, match=message):
        list(state.text_iter())


def test_an_answer_of_another_server_is_told(endpoint: tuple[type[Handler], OpenAIEndpoint]) -> None:
    handler, backend = endpoint
    handler.answers.append((200, {}, b"[]"))
    other = OctavoServer(backend._http.url.removesuffix("/v1"))
    with pytest.raises(ProgramError, match="another shape than an Octavo server's"):
        chat.run(backend=other)


def test_the_choices_of_a_select_are_tokenised_side_by_side() -> None:
    together = threading.Barrier(3, timeout=10)
    choices = ["yes", "no", "maybe"]

    class Server(Handler):
        """Bytes as tokens. The texts that end with a choice wait for each other."""

        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/v1/score":
                scores = [{"logprobs": [-float(len(ids))] * len(ids)} for ids in given["continuations"]]
                body: dict[str, Any] = {"scores": scores}
            else:
                body = {"tokens": list(given["prompt"].encode()), "token_strs": list(given["prompt"])}
                if given["prompt"].endswith(tuple(choices)):
                    together.wait()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    @function
    def ask(s: ProgramState) -> None:
        s += "is: " + select("a", choices)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            state = ask.run(backend=OctavoServer(f"http://127.0.0.1:{server.server_address[1]}"))
        finally:
            server.shutdown()
            thread.join()
    assert state["a"] == "no"
    assert [bytes(each["token_ids"]).decode() for each in state.get_meta_info("a")["scores"]] == choices


def test_cancelling_hangs_up_on_a_server(server: FullServer) -> None:
    @function
    def endless(s: ProgramState) -> None:
        s += "x"
        for fork in s.fork(2):
            fork += gen("x", max_tokens=1900, ignore_eos=True)
        server.wait_until(lambda: stats()["running"] == 2)
        raise LookupError("mine")

    def stats() -> dict[str, Any]:
        return server.run(lambda: server.engine.call("stats"))

    before = stats()["computed_tokens"]
    with pytest.raises(LookupError):
        endless.run(backend=OctavoServer(url(server), api_key=KEY))

    server.wait_until(lambda: stats()["requests"] == 0)
    assert stats()["computed_tokens"] - before < 2 * 1900 / 2


def test_a_program_on_a_server_needs_nothing_heavy_here() -> None:
    code = (
        "import sys; from octavo import OctavoServer, function, gen\n"
        "function(lambda s: s.__iadd__('x')).run(backend=OctavoServer('http://127.0.0.1:9'))\n"
        "print({'numpy', 'tokenizers', 'octavo.engine.llm', 'octavo._native'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
