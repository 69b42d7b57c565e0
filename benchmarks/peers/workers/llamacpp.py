"""llama.cpp through its C API: batches are built here, as its server does, with as little Python as that allows.

Settings: {"model": path, "threads": n, "amx": bool}. Options of a call: {"flash_attention": bool, "ubatch": n,
"unified_kv": bool}.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp as lib
import numpy as np

from benchmarks.peers.protocol import Run, Stopwatch, serve

BATCH = 2048  # tokens handed to one llama_decode; it works on `ubatch` of them at a time
SLOTS = 32  # sequences that run at once


class LlamaCpp:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._log: list[str] = []
        if not settings["amx"]:
            _deny_amx()
        self._callback = lib.llama_log_callback(
            lambda _level, text, _data: self._log.append(text.decode(errors="replace"))
        )
        lib.llama_log_set(self._callback, ctypes.c_void_p(0))
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        self._model = lib.llama_model_load_from_file(settings["model"].encode(), params)
        if not self._model:
            raise RuntimeError("".join(self._log[-10:]))
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._contexts: dict[tuple[Any, ...], _Context] = {}

    def about(self) -> dict[str, Any]:
        text = "".join(self._log)
        buffers = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model buffer size" in line]
        return {
            "version": f"llama-cpp-python {lib.__version__}",
            "system": lib.llama_print_system_info().decode(),
            "weight_bytes": lib.llama_model_size(self._model),
            "buffers": buffers,
        }

    def generate(self, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Run:
        """Continuous batching: each step one token of every running sequence, then prompt tokens up to BATCH."""
        slots = min(SLOTS, len(prompts))
        context = self._context(slots, max(len(p) + n for p, n in zip(prompts, lengths)), options)
        context.forget()
        clock = Stopwatch()
        outputs: list[list[int]] = [[] for _ in prompts]
        waiting, running = list(range(len(prompts))), {}
        done = [0] * len(prompts)  # prompt tokens computed
        free = list(range(slots))
        while waiting or running:
            while waiting and free:
                running[waiting.pop(0)] = free.pop()
            context.clear()
            rows: list[tuple[int, int]] = []  # request, row whose logits are wanted
            for i, slot in running.items():
                if outputs[i]:
                    rows.append((i, context.add([outputs[i][-1]], len(prompts[i]) + len(outputs[i]) - 1, slot)))
            for i, slot in running.items():
                part = prompts[i][done[i] : done[i] + BATCH - context.count]
                if part:
                    row = context.add(part, done[i], slot, logits=done[i] + len(part) == len(prompts[i]))
                    done[i] += len(part)
                    if done[i] == len(prompts[i]):
                        rows.append((i, row))
            context.run()
            for i, row in rows:
                outputs[i].append(context.greedy(row))
                if len(outputs[i]) == lengths[i]:
                    free.append(running[i])
                    context.remove(running.pop(i), 0)
        return clock.run(outputs)

    def decode(self, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Run:
        context = self._context(len(prompts), len(prompts[0]) + lengths[0], options)
        outputs = [[token] for token in context.prefill(prompts)]
        clock = Stopwatch()
        for n in range(lengths[0] - 1):
            context.clear()
            rows = [context.add([out[-1]], len(p) + n, s) for s, (p, out) in enumerate(zip(prompts, outputs))]
            context.run()
            for out, row in zip(outputs, rows):
                out.append(context.greedy(row))
        return clock.run(outputs, before=len(prompts))

    def _context(self, sequences: int, tokens: int, options: dict[str, Any]) -> _Context:
        """Kept from call to call, with what is prefilled in it."""
        tokens = -(-tokens // 256) * 256
        key = (sequences, tokens, *options.values())
        if key not in self._contexts:
            settings = self._settings | options
            self._contexts[key] = _Context(self._model, self._vocabulary, sequences, tokens, settings)
        return self._contexts[key]


def _deny_amx() -> None:
    """Has the kernel refuse this process AMX, so that llama.cpp repacks weights for AVX-512 instead; it has no option.

    Linux grants it only if every alternative signal stack could hold the tiles' 8 KiB; this one cannot.
    """

    class Stack(ctypes.Structure):
        _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))

    libc = ctypes.CDLL(None, use_errno=True)
    memory = ctypes.create_string_buffer(8192)
    stack = Stack(ctypes.addressof(memory), 0, len(memory))
    if libc.sigaltstack(ctypes.byref(stack), None) != 0:
        raise OSError(ctypes.get_errno(), "sigaltstack")
    _DENIED.append(memory)


_DENIED: list[Any] = []  # the stack must outlive the process's threads


class _Context:
    """A KV memory for a number of sequences, and one batch that is filled again for each step."""

    def __init__(self, model: Any, vocabulary: int, sequences: int, tokens: int, settings: dict[str, Any]) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx = sequences * tokens
        params.n_seq_max = sequences
        params.n_batch = BATCH
        params.n_ubatch = settings["ubatch"]
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.kv_unified = settings["unified_kv"]
        on = settings["flash_attention"]
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if on else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"no context for {sequences} sequences of {tokens} tokens")
        self._memory = lib.llama_get_memory(self._context)
        self._row = ctypes.c_float * vocabulary
        self._prefilled: list[list[int]] = []
        self._first: list[int] = []
        self.count = 0
        self._token, self._position, self._sequence = (np.zeros(BATCH, np.int32) for _ in range(3))
        self._one, self._logits = np.ones(BATCH, np.int32), np.zeros(BATCH, np.int8)
        ids = self._sequence.ctypes.data + 4 * np.arange(BATCH, dtype=np.uint64)
        self._sequence_pointers = ids
        self._batch = lib.llama_batch()
        self._batch.embd = None
        for name, array in (
            ("token", self._token),
            ("pos", self._position),
            ("n_seq_id", self._one),
            ("seq_id", ids),
            ("logits", self._logits),
        ):
            kind = dict(lib.llama_batch._fields_)[name]
            setattr(self._batch, name, ctypes.cast(array.ctypes.data, kind))

    def clear(self) -> None:
        self.count = 0

    def add(self, tokens: list[int], start: int, sequence: int, *, logits: bool = True) -> int:
        """Adds tokens of one sequence from position `start`; the row of the last."""
        begin, end = self.count, self.count + len(tokens)
        self._token[begin:end] = tokens
        self._position[begin:end] = range(start, start + len(tokens)) if len(tokens) > 1 else start
        self._sequence[begin:end] = sequence
        self._logits[begin:end] = 0
        self._logits[end - 1] = logits
        self.count = end
        return end - 1

    def run(self) -> None:
        self._batch.n_tokens = self.count
        status = lib.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: {status}")

    def greedy(self, row: int) -> int:
        pointer = lib.llama_get_logits_ith(self._context, row)
        return int(np.frombuffer(self._row.from_address(ctypes.addressof(pointer.contents)), np.float32).argmax())

    def remove(self, sequence: int, start: int) -> None:
        lib.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def forget(self) -> None:
        lib.llama_memory_clear(self._memory, False)
        self._prefilled = []

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        """The first token of each; what was prefilled before is kept."""
        if self._prefilled == prompts:
            for sequence, prompt in enumerate(prompts):
                self.remove(sequence, len(prompt))
            return self._first
        self.forget()
        first = []
        for sequence, prompt in enumerate(prompts):
            for start in range(0, len(prompt), BATCH):
                self.clear()
                row = self.add(prompt[start : start + BATCH], start, sequence, logits=start + BATCH >= len(prompt))
                self.run()
            first.append(self.greedy(row))
        self._prefilled, self._first = prompts, first
        return first


if __name__ == "__main__":
    serve(LlamaCpp)
