"""What the API process and the engine process say to each other: typed, length-capped msgspec frames; never pickle.

A frame is its length as four bytes, most significant first, and one message in MessagePack. The engine sends one frame
a step for all requests; entries are atomic, and positions tell the reader which it has already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from octavo import errors
from octavo.errors import FrameError, InvalidParameterError, OctavoError, RequestFailedError
from octavo.limits import BLOCK_TOKENS, MAX_BATCH_SEQUENCES, MAX_FRAME_BYTES
from octavo.params import SamplingParams

_LENGTH_BYTES = 4


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine is opened; the fields and defaults are `LLM`'s arguments."""

    model: str = "smollm2"
    revision: str | None = None
    weights: str = "auto"
    kv_dtype: str = "f16"
    kv_memory: int | str | None = None
    max_model_len: int | None = None
    threads: int | None = None
    kernels: str = "auto"
    fusion: bool = True
    cascade: bool = True
    policy: str = "fcfs"
    max_num_seqs: int = MAX_BATCH_SEQUENCES
    inter_token_target: float = 0.1
    chunk_size: int | None = None
    jump_forward: bool = True
    enable_prefix_caching: bool = True


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What runs in the engine process.

    fingerprint: equal ones give equal bits: arithmetic, model digest, weight formats, KV dtype. max_model_len: prompt
    and output tokens together. weights: bytes by kernel format. recommended_sampling: the model authors' values by
    SamplingParams names. macs_per_token: multiply-adds of the matrices for one row.
    """

    model: str
    path: str
    fingerprint: str
    arithmetic: str
    digest: str
    architecture: str
    context: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    recommended_sampling: dict[str, float]
    weights: dict[str, int]
    weight_bytes: int
    kv_dtype: str
    kv_memory: str
    num_blocks: int
    block_bytes: int
    block_tokens: int = BLOCK_TOKENS
    macs_per_token: int = 0
    threads: int = 1
    kernels: str = ""
    max_num_seqs: int = MAX_BATCH_SEQUENCES
    max_rows: int = 512
    load_seconds: float = 0.0
    pid: int = 0


# What the engine says of a request


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One candidate at one position; rank 1 is the most likely. `text`: its bytes, perhaps part of a character."""

    token_id: int
    logprob: float
    rank: int
    text: bytes


class Token(msgspec.Struct, array_like=True, gc=False):
    """One token of output `index` of a request. position: 0-based in that output.

    text: what it makes certain, behind stop strings and broken characters; often "". logprobs: the token itself first,
    then the most likely others; None unless asked for.
    """

    index: int
    position: int
    token_id: int
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Started(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Comes with a request's first token, or says that a Cancel(queued) is too late. first_scheduled: monotonic
    seconds, which processes of a machine share."""

    cached_tokens: int
    first_scheduled: float


class Done(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """A request's regular end. Tokens are counted over all n outputs; prompt_logprobs: an entry a prompt token."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seed: int
    timings: Moments
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None


class Moments(msgspec.Struct, array_like=True, frozen=True):
    """Moments of a request in monotonic seconds, whatever restarts lay between."""

    arrival: float
    first_scheduled: float
    first_token: float
    finished: float


class Failure(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """An OctavoError on its way between processes."""

    kind: str
    message: str
    field: str = ""
    allowed: str = ""

    @staticmethod
    def of(error: Exception) -> Failure:
        if isinstance(error, InvalidParameterError):
            return Failure("InvalidParameterError", str(error), error.field, error.allowed)
        if isinstance(error, OctavoError):
            return Failure(type(error).__name__, str(error))
        return Failure("RequestFailedError", f"{type(error).__name__} while the request ran")

    def error(self) -> OctavoError:
        """The same type with the same message; an InvalidParameterError without its value."""
        kind = getattr(errors, self.kind, None)
        if not isinstance(kind, type) or not issubclass(kind, OctavoError):
            kind = RequestFailedError
        error = kind.__new__(kind)
        Exception.__init__(error, self.message)
        if isinstance(error, InvalidParameterError):
            error.field, error.value, error.allowed = self.field, None, self.allowed
        return error


class Cancelled(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """The request is out of the engine, as was asked."""


class Update(msgspec.Struct, array_like=True):
    """What a step did for one request."""

    number: int
    tokens: list[Token]
    started: Started | None = None
    end: Done | Failure | Cancelled | None = None


class Counters(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Numbers of the engine: the first ones now, the others since it was started."""

    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_used: int = 0
    waste_percent: float = 0.0
    step_seconds: float = 0.0
    step_rows: int = 0
    steps: int = 0
    computed_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    jump_forward_tokens: int = 0


# Messages


class Open(msgspec.Struct, array_like=True, tag=1):
    options: EngineOptions


class Submit(msgspec.Struct, array_like=True, tag=2):
    """emitted: token ids each of the n outputs already has. params.seed is set: a replay must draw the same."""

    number: int
    prompt_token_ids: list[int]
    params: SamplingParams
    emitted: list[list[int]]


class Cancel(msgspec.Struct, array_like=True, tag=3):
    """queued: only if no step has computed anything of it yet; if one has, Started is the answer."""

    number: int
    queued: bool = False


class Call(msgspec.Struct, array_like=True, tag=4):
    """name: one of "ping", "stats", "flush_cache"."""

    number: int
    name: str


class Loading(msgspec.Struct, array_like=True, tag=1):
    """Sent now and then until Hello or LoadFailed: the process lives."""


class Hello(msgspec.Struct, array_like=True, tag=2):
    info: EngineInfo


class LoadFailed(msgspec.Struct, array_like=True, tag=3):
    failure: Failure


class Step(msgspec.Struct, array_like=True, tag=4):
    counters: Counters
    updates: list[Update]


class Reply(msgspec.Struct, array_like=True, tag=5):
    number: int
    value: Any
    failure: Failure | None = None


ToEngine = Open | Submit | Cancel | Call
FromEngine = Loading | Hello | LoadFailed | Step | Reply

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """One frame, ready to send. Raises FrameError if it is longer than a reader takes."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes is longer than the {MAX_FRAME_BYTES} allowed")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def decode_to_engine(body: bytes | memoryview) -> ToEngine:
    """Raises FrameError when it is no such message."""
    try:
        return _to_engine.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a malformed frame of {len(body)} bytes: {error}") from None


def decode_from_engine(body: bytes | memoryview) -> FromEngine:
    """Raises FrameError when it is no such message."""
    try:
        return _from_engine.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a malformed frame of {len(body)} bytes: {error}") from None


class FrameReader:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes | memoryview]:
        """The frames that are complete now. Raises FrameError as soon as a length is over the cap."""
        if not self._rest and len(data) == _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big"):
            if len(data) - _LENGTH_BYTES > MAX_FRAME_BYTES:
                raise _too_long(len(data) - _LENGTH_BYTES)
            yield memoryview(data)[_LENGTH_BYTES:]  # nearly always: one frame arrives as one piece
            return
        self._rest += data
        while len(self._rest) >= _LENGTH_BYTES:
            size = int.from_bytes(self._rest[:_LENGTH_BYTES], "big")
            if size > MAX_FRAME_BYTES:
                raise _too_long(size)
            end = _LENGTH_BYTES + size
            if len(self._rest) < end:
                return
            body = bytes(self._rest[_LENGTH_BYTES:end])
            del self._rest[:end]
            yield body


def _too_long(size: int) -> FrameError:
    return FrameError(f"a frame of {size} bytes is longer than the {MAX_FRAME_BYTES} allowed")
