"""The command line: what it prints, where, and how it ends. The engine behind it is scripted."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from octavo.cli import engine
from octavo.cli.chat import Conversation, converse, read_turn
from octavo.cli.main import app
from octavo.errors import CapacityError, ModelNotFoundError, OctavoError
from octavo.outputs import CompletionOutput, RequestOutput, TextDelta, Timings
from octavo.params import SamplingParams


@dataclass
class ScriptedLLM:
    """Answers with the words of `answer`; an exception among them is raised in its place."""

    answer: list[str | BaseException] = field(default_factory=lambda: ["Paris", " it", " is"])
    defaults: SamplingParams = field(default_factory=SamplingParams)
    asked: list[tuple[Any, Any]] = field(default_factory=list)
    closed_streams: int = 0
    closed: bool = False

    def __enter__(self) -> ScriptedLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def get_default_sampling_params(self) -> SamplingParams:
        return self.defaults

    def info(self) -> dict[str, Any]:
        return {"kv_memory": "KV memory 1 GiB"}

    def stream(self, prompt: Any, params: Any) -> Iterator[TextDelta]:
        self.asked.append((prompt, params))
        try:
            for position, word in enumerate(self.answer):
                if isinstance(word, BaseException):
                    raise word
                yield TextDelta(
                    "req-0", 0, word, [position], finish_reason="stop" if position == len(self.answer) - 1 else None
                )
        finally:
            self.closed_streams += 1

    def generate(self, prompt: str, params: Any, *, use_tqdm: bool = True) -> list[RequestOutput]:
        assert use_tqdm is False
        self.asked.append((prompt, params))
        text = "".join(word for word in self.answer if isinstance(word, str))
        outputs = [CompletionOutput(i, text, list(range(len(self.answer)))) for i in range(params.n)]
        timings = Timings(arrival=100.0, first_scheduled=100.5, first_token=101.0, finished=102.0)
        return [RequestOutput("req-0", prompt, [1, 2], outputs, True, seed=params.seed, timings=timings)]

    def chat(self, messages: Any, params: Any, *, use_tqdm: bool = True) -> list[RequestOutput]:
        return self.generate(messages[-1]["content"], params, use_tqdm=use_tqdm)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> ScriptedLLM:
    scripted = ScriptedLLM()
    monkeypatch.setattr(engine, "open_engine", lambda options: scripted)
    return scripted


def octavo(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin, prog_name="octavo")


# --- generate ---


def test_generate_streams_the_completion_and_closes_everything(llm: ScriptedLLM) -> None:
    result = octavo("generate", "The capital of France is")
    assert (result.exit_code, result.stdout) == (0, "Paris it is\n")
    assert llm.asked[0][0] == "The capital of France is"
    assert llm.closed
    assert llm.closed_streams == 1


def test_generate_reads_a_pipe_or_a_file_and_drops_one_line_end(llm: ScriptedLLM, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("from a file\n\n", encoding="utf-8")
    octavo("generate", stdin="from a pipe\n")
    octavo("generate", "--prompt-file", str(tmp_path / "prompt"))
    assert [prompt for prompt, _ in llm.asked] == ["from a pipe", "from a file\n"]


def test_generate_chat_sends_the_prompt_as_a_message(llm: ScriptedLLM) -> None:
    octavo("generate", "--chat", "hello")
    assert llm.asked[0][0] == [{"role": "user", "content": "hello"}]


def test_generate_json_is_one_line_with_the_whole_output(llm: ScriptedLLM) -> None:
    result = octavo("generate", "x", "--json", "--n", "2", "--seed", "7")
    assert result.stdout.count("\n") == 1
    output = json.loads(result.stdout)
    assert [completion["index"] for completion in output["outputs"]] == [0, 1]
    assert output["seed"] == 7
    assert output["timings"] == {"queue_time": 0.5, "ttft": 1.0, "latency": 2.0}


def test_generate_prints_every_answer_when_there_are_several(llm: ScriptedLLM) -> None:
    assert octavo("generate", "x", "--n", "2").stdout == "--- 0\nParis it is\n--- 1\nParis it is\n"


def test_every_sampling_option_reaches_the_parameters(llm: ScriptedLLM) -> None:
    given = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "seed": 11, "logprobs": 2}
    given["repetition_penalty"] = 1.5
    flags = [text for name, value in given.items() for text in ("--" + name.replace("_", "-"), str(value))]
    octavo("generate", "x", *flags, "--stop", "a", "--stop", "b", "--ignore-eos", "--json")
    params = llm.asked[0][1]
    assert {name: getattr(params, name) for name in given} == given
    assert list(params.stop) == ["a", "b"]
    assert params.ignore_eos is True


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_options_not_given_have_the_values_the_model_recommends(llm: ScriptedLLM, command: str) -> None:
    llm.defaults = SamplingParams(temperature=0.2, top_k=5)
    octavo(command, "x", "--top-k", "9", "--model", "org/name")
    params = llm.asked[0][1]
    assert (params.temperature, params.top_k) == (0.2, 9)


def test_chat_is_calmer_than_raw_sampling_when_the_model_recommends_nothing(llm: ScriptedLLM) -> None:
    octavo("chat", "x", "--model", "org/name")
    octavo("generate", "x", "--model", "org/name")
    assert (llm.asked[0][1].temperature, llm.asked[0][1].top_p) == (0.6, 0.95)
    assert llm.asked[1][1] == SamplingParams()


@pytest.mark.parametrize("command", [["generate", "x"], ["chat", "x"]])
def test_every_engine_option_reaches_the_engine(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    seen: list[Any] = []

    def record(options: Any) -> ScriptedLLM:
        seen.append(options)
        return ScriptedLLM()

    monkeypatch.setattr(engine, "open_engine", record)
    given = {
        "model": "org/name",
        "revision": "abc",
        "weights": "q8",
        "kv_dtype": "f32",
        "kv_memory": "2GiB",
        "max_model_len": 512,
        "threads": 3,
        "kernels": "scalar",
    }
    flags = [text for name, value in given.items() for text in ("--" + name.replace("_", "-"), str(value))]
    assert octavo(*command, *flags).exit_code == 0
    assert {name: getattr(seen[0], name) for name in given} == given


# --- chat ---


def test_chat_with_a_question_answers_it_and_leaves(llm: ScriptedLLM) -> None:
    result = octavo("chat", "capital of France?", "--system", "Be brief.")
    assert (result.exit_code, result.stdout) == (0, "Paris it is\n")
    assert llm.asked[0][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "capital of France?"},
    ]


def test_chat_from_a_pipe_keeps_the_conversation_until_reset(llm: ScriptedLLM) -> None:
    result = octavo("chat", stdin="one\ntwo\n/reset\nthree\n")
    assert result.exit_code == 0
    assert result.stdout == "Paris it is\nParis it is\nA new conversation.\nParis it is\n"
    assert [[message["content"] for message in messages] for messages, _ in llm.asked] == [
        ["one"],
        ["one", "Paris it is", "two"],
        ["three"],
    ]


def test_chat_system_command_starts_a_new_conversation(llm: ScriptedLLM) -> None:
    octavo("chat", stdin="one\n/system Be brief.\ntwo\n/exit\nnever sent\n")
    assert [message["role"] for message in llm.asked[1][0]] == ["system", "user"]
    assert len(llm.asked) == 2


def test_chat_does_not_send_an_unknown_command(llm: ScriptedLLM) -> None:
    assert "No command /rest." in octavo("chat", stdin="/rest\n /sent with a space\n").stdout
    assert [messages[-1]["content"] for messages, _ in llm.asked] == ["/sent with a space"]


def lines(*texts: str | type[BaseException]) -> Callable[[str], str]:
    """Types these lines at a prompt; an exception type is a key (Ctrl-C). Then the input ends."""
    waiting = list(texts)

    def read_line(_prompt: str) -> str:
        if not waiting:
            raise EOFError
        line = waiting.pop(0)
        if isinstance(line, str):
            return line
        raise line

    return read_line


@pytest.mark.parametrize(
    ("typed", "turn"),
    [
        (["plain"], "plain"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""one', "", 'two"""'], "one\n\ntwo"),
        (['"""', "one\\", "two", '"""'], "one\\\ntwo"),
        (['"""on one line"""'], "on one line"),
        (["cut\\"], "cut"),
        (['"""cut'], "cut"),
    ],
)
def test_turns_may_have_several_lines(typed: list[str], turn: str) -> None:
    assert read_turn(lines(*typed)).strip() == turn


def test_quoted_text_is_never_a_command() -> None:
    assert not read_turn(lines('"""/exit"""')).startswith("/")


def test_ctrl_c_stops_the_answer_only_and_keeps_what_was_shown(llm: ScriptedLLM) -> None:
    llm.answer = ["Par", KeyboardInterrupt()]
    conversation = Conversation(llm, params=None)  # type: ignore[arg-type]
    converse(conversation, lines("one"), interactive=True)
    assert llm.closed_streams == 1
    assert conversation.messages[-1] == {"role": "assistant", "content": "Par"}


def test_ctrl_c_before_any_text_drops_the_turn(llm: ScriptedLLM) -> None:
    llm.answer = [KeyboardInterrupt()]
    conversation = Conversation(llm, params=None)  # type: ignore[arg-type]
    converse(conversation, lines("one"), interactive=True)
    assert conversation.messages == []


def test_ctrl_c_at_the_prompt_leaves_only_when_pressed_twice_in_a_row(llm: ScriptedLLM) -> None:
    conversation = Conversation(llm, params=None)  # type: ignore[arg-type]
    converse(conversation, lines(KeyboardInterrupt, "one", KeyboardInterrupt), interactive=True)
    assert len(llm.asked) == 1
    with pytest.raises(KeyboardInterrupt):
        converse(conversation, lines(KeyboardInterrupt, KeyboardInterrupt), interactive=True)


def test_a_conversation_that_no_longer_fits_is_told_plainly_and_goes_on(
    llm: ScriptedLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(llm, params=None)  # type: ignore[arg-type]
    converse(conversation, lines("one"), interactive=True)
    kept = list(conversation.messages)
    llm.answer = [CapacityError("9,000 tokens do not fit the context of 8,192")]
    converse(conversation, lines("two"), interactive=True)
    assert conversation.messages == kept
    error = capsys.readouterr().err
    assert "9,000 tokens do not fit" in error
    assert "/reset" in error


def test_an_error_from_a_pipe_ends_the_conversation(llm: ScriptedLLM) -> None:
    llm.answer = [OctavoError("broken")]
    result = octavo("chat", stdin="one\ntwo\n")
    assert result.exit_code == 1
    assert len(llm.asked) == 1


# --- how it ends ---


def test_an_error_is_one_line_on_stderr_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: Any) -> Any:
        raise ModelNotFoundError("no model 'x':\n  known are a, b")

    monkeypatch.setattr(engine, "open_engine", fail)
    monkeypatch.delenv("OCTAVO_DEBUG", raising=False)
    result = octavo("chat", "x")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "octavo: error: no model 'x': known are a, b\n"
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    assert isinstance(octavo("chat", "x").exception, ModelNotFoundError)


def test_an_invalid_parameter_is_named(llm: ScriptedLLM) -> None:
    result = octavo("generate", "x", "--temperature", "-1")
    assert result.exit_code == 1
    assert "temperature=-1" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "--no-such-option"],
        ["no-such-command"],
        ["generate", "x", "--max-tokens", "many"],
        ["generate", "--prompt-file", "/no/such/file"],
        ["generate", "x", "--prompt-file", "/dev/null"],
        ["generate", "x", "--logprobs", "3"],
    ],
)
def test_wrong_usage_is_exit_code_2(llm: ScriptedLLM, arguments: list[str]) -> None:
    result = octavo(*arguments)
    assert result.exit_code == 2
    assert result.stderr


def test_ctrl_c_is_exit_code_130(llm: ScriptedLLM) -> None:
    llm.answer = ["Par", KeyboardInterrupt()]
    result = octavo("generate", "x")
    assert (result.exit_code, result.stdout) == (130, "Par\n" if result.stdout.endswith("\n") else "Par")
    assert llm.closed


def test_help_says_each_command_in_a_whole_line() -> None:
    listed = octavo("--help").stdout.partition("Commands:")[2].splitlines()[1:]
    assert [line.split()[0] for line in listed] == ["generate", "chat", "serve", "pull", "models", "info", "bench"]
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_version() -> None:
    import octavo as package

    assert octavo("--version").stdout == f"octavo {package.__version__}\n"


# Runs `octavo ARGUMENTS` in a process of its own, with an engine that never stops talking.
SCRIPT = """
import sys, time
from octavo.cli import engine
from octavo.cli.main import main
from tests.unit.test_cli import ScriptedLLM

class Slow(ScriptedLLM):
    def stream(self, prompt, params):
        for delta in super().stream(prompt, params):
            yield delta
            time.sleep(0.01)

engine.open_engine = lambda options: Slow(["word \x1b[2J"] * 100_000)
main()
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path), "TERM": "xterm"}


def start_endless_answer() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SCRIPT, "generate", "x"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)


def test_a_reader_that_leaves_ends_the_command_without_a_traceback() -> None:
    with start_endless_answer() as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5) == b"word "
        process.stdout.close()
        assert process.wait(timeout=30) == 1
        assert process.stderr.read() == b""


def test_a_real_sigint_ends_the_command_with_130_and_no_traceback() -> None:
    with start_endless_answer() as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5) == b"word "
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr.read().strip() == b""


@dataclass
class Terminal:
    """`octavo chat` on a terminal of its own."""

    pid: int
    fd: int
    seen: bytes = b""

    def expect(self, text: bytes, nudge: bytes = b"") -> None:
        """Reads on until `text` is shown; what comes before it is used up. Types `nudge` while nothing comes."""
        deadline = time.monotonic() + 30
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} did not come; last seen: {self.seen[-500:]!r}"
            ready, _, _ = select.select([self.fd], [], [], min(left, 3.0))
            if ready:
                self.seen += os.read(self.fd, 65536)
            elif nudge:
                self.type(nudge)
        self.seen = self.seen.partition(text)[2]

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)


@pytest.fixture
def chat_terminal() -> Iterator[Terminal]:
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", SCRIPT, "chat"], ENVIRONMENT)
    yield Terminal(pid, fd)
    os.close(fd)  # hangs up: the child ends if it still runs


def test_chat_on_a_terminal_survives_ctrl_c_and_shows_no_escape_codes_of_the_model(chat_terminal: Terminal) -> None:
    chat_terminal.expect(b"/help")
    chat_terminal.expect(b"> ")
    chat_terminal.type(b"hello\n")
    chat_terminal.expect("word \N{REPLACEMENT CHARACTER}[2J".encode())
    chat_terminal.type(b"\x03")
    chat_terminal.expect(b"(stopped)")
    chat_terminal.expect(b"> ")
    chat_terminal.type(b"half")
    chat_terminal.expect(b"half")
    chat_terminal.type(b"\x03")
    # Python holds back a Ctrl-C that comes just before readline waits for keys, until another interrupts the wait.
    chat_terminal.expect(b"Ctrl-C again", nudge=b"\x03")
    chat_terminal.expect(b"> ")
    chat_terminal.type(b"/exit\n")
    assert os.waitstatus_to_exitcode(os.waitpid(chat_terminal.pid, 0)[1]) == 0
