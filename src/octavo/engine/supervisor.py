"""One engine process as its parent sees it: start, talk, notice the end, tell why."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from octavo.engine import ipc
from octavo.errors import FrameError, OctavoError

_POLL = 0.01  # seconds between looks at a process that is about to end
_GRACE = 0.5  # seconds for a process to end by itself after its socket closed
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS})  # which may pass
_OWN_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP})


@dataclass(frozen=True, slots=True)
class Death:
    """own_fault: what the process did ended it; otherwise it may have been anybody."""

    reason: str
    own_fault: bool


class EngineProcess(asyncio.Protocol):
    """A child on one end of a socket pair, which nobody else can reach. `ended` is done when the socket has closed."""

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str] | None,
        on_message: Callable[..., None],
        logs: tuple[str, str] = ("info", "plain"),
    ) -> None:
        """`logs`: level and format of its log. Raises OSError when there is no process to be had."""
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._frames = ipc.FrameReader()
        self._transport: asyncio.Transport | None = None
        self._cause: Death | None = None  # why we ended it, if we did
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.hello: asyncio.Future[ipc.EngineInfo | OctavoError | None] = self._loop.create_future()
        self._ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", module, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
            command += ["--log-level", logs[0], "--log-format", logs[1]]
            try:
                # A session of its own: Ctrl-C in the terminal is for this process only.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    # Whatever lies in the working directory is not ours to import.
                    env={**(os.environ if environment is None else environment), "PYTHONSAFEPATH": "1"},
                )
            except OSError:
                self._ours.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    async def connect(self, options: ipc.EngineOptions) -> None:
        self._ours.setblocking(False)
        await self._loop.create_unix_connection(lambda: self, sock=self._ours)
        self.send(ipc.Open(options))

    def send(self, message: ipc.ToEngine) -> None:
        """Never waits; nothing happens when the process is ending. Raises FrameError for what is too long, TypeError or
        OverflowError for what is no such message."""
        frame = ipc.encode(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def is_stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP, a debugger)."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
        except (OSError, IndexError):
            return False

    def ask_where(self) -> None:
        """Has it print the stack of the thread that hangs to standard error."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def kill(self, cause: Death) -> None:
        self._cause = self._cause or cause
        if self._process.poll() is None:
            self._process.kill()
        self._close()

    async def wait(self) -> Death:
        """Until the process has gone and nothing of it is left."""
        await self.ended
        return await self._reap(_GRACE)

    async def stop(self) -> None:
        """Ends the process."""
        self._close()
        if self._process.poll() is None:
            self._process.terminate()
        await self._reap(_GRACE)

    async def _reap(self, grace: float) -> Death:
        for _ in range(int(grace / _POLL)):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(_POLL)
        else:
            self._process.kill()
        while (code := self._process.poll()) is None:
            await asyncio.sleep(_POLL)
        if self._cause is not None:
            return self._cause
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return Death(f"the engine was ended by {name}", -code in _OWN_SIGNALS)
        return Death(f"the engine ended with status {code}", code > 0)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        else:
            self._ours.close()
            self._set_ended()

    def _set_ended(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        if not self.hello.done():
            self.hello.set_result(None)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                if self._cause is None:
                    self._on_message(self, ipc.decode_from_engine(body))
        except FrameError as error:
            self.kill(Death(f"the engine sent {error}", True))

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_ended()
