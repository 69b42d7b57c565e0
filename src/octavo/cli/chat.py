"""`octavo chat`: a conversation in the terminal, or one question and its answer."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli import engine, options, terminal
from octavo.errors import CapacityError, OctavoError

if TYPE_CHECKING:
    from octavo.engine.llm import LLM
    from octavo.params import SamplingParams

HELP = '''\
/reset          forget the conversation and start a new one
/system TEXT    set the system message and start a new conversation; without TEXT, show it
/help           this list
/exit           leave; so does Ctrl-D
A line that ends in \\ goes on in the next one; """ opens and closes a text of several lines.
Ctrl-C stops the answer; at the prompt, twice leaves. A message that starts with a space is never a command.'''

ReadLine = Callable[[str], str]  # shows a prompt, returns a line without its end; raises EOFError


def chat(
    question: Annotated[
        str | None, typer.Argument(help="Answer this and leave; without it, talk until Ctrl-D.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.  [default: the template's own]")] = None,
    max_tokens: options.MaxTokens = 1024,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    model: options.Model = "smollm2",
    revision: options.Revision = None,
    weights: options.Weights = "auto",
    kv_dtype: options.KVDtype = "f16",
    kv_memory: options.KVMemory = None,
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
    kernels: options.Kernels = "auto",
) -> None:
    """Talk with a model. Earlier turns stay in the prefix cache, so a new turn costs only its own tokens.

    Sampling options that are not given have the model's recommended values; if it has none, temperature 0.6 and
    top-p 0.95.
    """
    from octavo.params import SamplingParams

    given = options.given_sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    engine_options = options.EngineOptions(
        model, revision, weights, kv_dtype, kv_memory, max_model_len, threads, kernels
    )
    interactive = question is None and terminal.is_terminal(sys.stdin) and terminal.is_terminal(sys.stdout)
    with engine.open_engine(engine_options) as llm:
        defaults = llm.get_default_sampling_params()
        if defaults == SamplingParams():
            defaults = replace(defaults, temperature=0.6, top_p=0.95)
        conversation = Conversation(llm, replace(defaults, **given), system)
        if question is not None:
            _answer(conversation, question)
        elif interactive:
            import readline  # noqa: F401  (line editing and history for input())

            print(terminal.dim(str(llm.info()["kv_memory"]), sys.stdout))
            print(terminal.dim(f"{model} is ready. /help lists commands, Ctrl-D leaves.", sys.stdout))
            converse(conversation, input, interactive=True)
        else:
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(errors="replace")
            converse(conversation, _read_piped_line, interactive=False)


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    tokens: int
    decode_seconds: float  # from the first delta to the last
    finish_reason: str | None


class Conversation:
    """What was said so far. A turn enters it with its answer, also with one that Ctrl-C cut short."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, question: str, show: Callable[[str], None]) -> Answer:
        """Streams the answer to `show`. KeyboardInterrupt passes through, after what was shown is remembered."""
        asked = [*self.messages, {"role": "user", "content": question}]
        shown: list[str] = []
        tokens, first, last, finish_reason = 0, 0.0, 0.0, None
        try:
            with closing(self._llm.stream(asked, self._params)) as deltas:
                for delta in deltas:
                    last = time.perf_counter()
                    first = first or last
                    tokens += len(delta.token_ids)
                    finish_reason = delta.finish_reason
                    shown.append(delta.text)
                    show(delta.text)
        finally:
            if shown:
                self.messages = [*asked, {"role": "assistant", "content": "".join(shown)}]
        return Answer("".join(shown), tokens, last - first, finish_reason)


def converse(conversation: Conversation, read_line: ReadLine, *, interactive: bool) -> None:
    """Reads turns and answers them until the input ends or /exit.

    At a terminal an error or Ctrl-C ends one turn; from a pipe, the conversation.
    """
    interrupted = False
    while True:
        try:
            turn = read_turn(read_line)
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:
            if interrupted or not interactive:
                raise
            interrupted = True
            print(terminal.dim("\nCtrl-C again, or Ctrl-D, leaves.", sys.stdout))
            continue
        interrupted = False
        if turn.startswith("/"):
            if _command(conversation, turn.strip()):
                return
        elif turn.strip():
            try:
                _answer(conversation, turn.strip())
            except KeyboardInterrupt:
                if not interactive:
                    raise
                print(terminal.dim("\n(stopped)", sys.stdout))
            except OctavoError as error:
                if not interactive:
                    raise
                terminal.warn(f"error: {error}")
                if isinstance(error, CapacityError):
                    terminal.warn("this turn was dropped; /reset starts a new conversation, a shorter message may fit")


def read_turn(read_line: ReadLine) -> str:
    """One message: a line, lines joined by a closing backslash, or a text between triple quotes."""
    text = read_line("> ")
    if text.lstrip().startswith('"""'):
        text = text.lstrip().removeprefix('"""')
        while not text.rstrip().endswith('"""') and (more := _next_line(read_line)) is not None:
            text = f"{text}\n{more}"
        return " " + text.rstrip().removesuffix('"""').strip("\n")  # the space: a quoted text is no command
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{_next_line(read_line) or ''}"
    return text


def _next_line(read_line: ReadLine) -> str | None:
    try:
        return read_line(". ")
    except EOFError:
        return None


def _read_piped_line(_prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _command(conversation: Conversation, line: str) -> bool:
    """Carries out a /command; true when it ends the conversation."""
    name, _, rest = line.partition(" ")
    if name in ("/exit", "/quit"):
        return True
    if name == "/reset":
        conversation.reset()
        print("A new conversation.")
    elif name == "/system" and rest:
        conversation.system = rest.strip()
        conversation.reset()
        print("System message set; a new conversation.")
    elif name == "/system":
        print(conversation.system or "No system message of your own; the model's template may add one.")
    elif name == "/help":
        print(HELP)
    else:
        print(f"No command {name}. /help lists them; to send this as a message, start it with a space.")
    return False


def _answer(conversation: Conversation, question: str) -> None:
    answer = conversation.ask(question, terminal.show)
    print()
    if terminal.is_terminal(sys.stdout):
        print(terminal.dim(_closing_line(answer), sys.stdout))


def _closing_line(answer: Answer) -> str:
    facts = [f"{answer.tokens} tokens"]
    if answer.tokens > 1 and answer.decode_seconds > 0:
        facts.append(f"{(answer.tokens - 1) / answer.decode_seconds:.0f} tokens/s")
    if answer.finish_reason == "length":
        facts.append("cut at the token limit")
    return f"({', '.join(facts)})"
