"""From settings to a running server, and to its orderly end.

The listeners open before the model is loaded, so that probes are answered from the first moment. SIGTERM and Ctrl-C
drain: new work gets 503, what runs may finish; the second one cuts that short. The engine process never outlives this.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from octavo import limits
from octavo.errors import ConfigError
from octavo.server.config import ServerConfig

if TYPE_CHECKING:
    import uvicorn

    from octavo.engine.ipc import EngineInfo
    from octavo.server.app import Server

log = logging.getLogger("octavo")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_HURRY_SECONDS = 1.0  # for answers to end after the drain's limit or the second signal


Announce = Callable[["EngineInfo", str], None]


def run(config: ServerConfig, announce: Announce = lambda info, where: None) -> int:
    """Serves until a signal; returns the exit code. `announce` is called when it is ready, with its address.

    Raises ConfigError, and why the model can't be loaded.
    """
    import uvloop

    with _listeners(config) as (main, ops):
        code = uvloop.run(_serve(config, main, ops, announce))
    for number in _SIGNALS:  # threads may still be at a long text
        signal.signal(number, lambda *_: os._exit(code))
    return code


# Sockets


@contextlib.contextmanager
def _listeners(config: ServerConfig) -> Iterator[tuple[list[socket.socket], list[socket.socket]]]:
    """Bound and listening; closed at the end, and a unix socket's file removed."""
    with contextlib.ExitStack() as stack:
        if config.uds is not None:
            main = [stack.enter_context(contextlib.closing(_listen_unix(config.uds)))]
            stack.callback(_unlink_socket, config.uds, os.stat(config.uds).st_ino)
        else:
            main = _listen(config.host, config.port, "--port")
            for each in main:
                stack.enter_context(contextlib.closing(each))
        ops = [] if config.ops_port is None else _listen(config.ops_host, config.ops_port, "--ops-port")
        for each in ops:
            stack.enter_context(contextlib.closing(each))
        yield main, ops


def _listen(host: str, port: int, flag: str) -> list[socket.socket]:
    """A socket for each address of the host that this machine has, all on one port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host {host!r}", f"an address of this machine ({error.strerror})") from None
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            sockets.append(_bound(family, (address[0], port, *address[2:])))
            port = sockets[-1].getsockname()[1]
        except OSError as error:
            failure = error
            if error.errno not in _NOT_HERE:
                break
    if failure is not None and (not sockets or failure.errno not in _NOT_HERE):
        for listener in sockets:
            listener.close()
        taken = failure.errno == errno.EADDRINUSE
        problem = "is taken by another program" if taken else f"can't be opened: {failure.strerror}"
        raise ConfigError(f"{flag} {port} on {host}", f"it {problem}; choose another with {flag}")
    return sockets


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def _listen_unix(path: str) -> socket.socket:
    """A file that a dead server left is replaced; one that somebody listens on, or that is no socket, is not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ConfigError(f"--uds {path}", "a path where no other file lies")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)
                else:
                    raise ConfigError(f"--uds {path}", "another server listens there")
        listener.bind(path)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds {path}", f"a path where a socket can be made ({error.strerror})") from None
    except ConfigError:
        listener.close()
        raise
    return listener


def _unlink_socket(path: str, inode: int) -> None:
    """Only our own: a successor may have put its socket there."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_ino == inode:
            os.unlink(path)


# Life


async def _serve(config: ServerConfig, main: list[socket.socket], ops: list[socket.socket], announce: Announce) -> int:
    from octavo.engine.client import EngineClient
    from octavo.server.app import build

    signals = _Signals()
    engine = EngineClient(
        engine_options(config),
        stall_seconds=config.stall_timeout,
        keep_alive=config.keep_alive_interval,
        logs=(config.log_level, config.log_format),
    )
    server = build(config, engine)
    listeners = [(http_listener(config, server.app, _most_connections(config.max_connections)), main)]
    if ops:
        listeners.append((http_listener(config, server.ops_app, limits.MAX_OPS_CONNECTIONS), ops))
    serving = [asyncio.ensure_future(each.serve(sockets)) for each, sockets in listeners]
    ready = asyncio.ensure_future(engine.wait_ready())
    stopping = asyncio.ensure_future(signals.wait(1))
    try:
        await engine.start()
        await asyncio.wait((ready, stopping, *serving), return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and ready.exception() is None:
            announce(ready.result(), _address(config, main))
            await asyncio.wait((stopping, *serving), return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            await _drain(server, signals, config.drain_timeout)
            return 0
        if ready.done():
            ready.result()  # why the model can't be loaded
        return 1  # a listener ended by itself
    finally:
        for task in (ready, stopping):
            task.cancel()
        await engine.close()  # ends the streams that are left, with an error to their clients
        for each, _ in listeners:
            each.should_exit = True
        await asyncio.wait(serving, timeout=2 * _HURRY_SECONDS)
        server.state.close()
        if server.tracer is not None:
            server.tracer.close()
        log.info("the server has ended")


def _address(config: ServerConfig, main: list[socket.socket]) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = main[0].getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def engine_options(config: ServerConfig) -> Any:
    from octavo.engine.ipc import EngineOptions

    return EngineOptions(
        model=config.model,
        revision=config.revision,
        weights=config.weights,
        kv_dtype="f16" if config.kv_dtype == "auto" else config.kv_dtype,
        kv_memory=config.kv_memory,
        max_model_len=config.max_model_len,
        threads=config.threads,
        kernels=config.kernels,
        policy=config.policy,
        max_num_seqs=config.max_num_seqs,
        inter_token_target=config.inter_token_target,
        enable_prefix_caching=config.enable_prefix_caching,
        jump_forward=config.jump_forward,
    )


def _most_connections(wanted: int) -> int:
    """How many the system's limit of open files allows, after it was raised as far as that takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + limits.RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    most = max(1, soft - limits.RESERVED_DESCRIPTORS)
    log.warning("at most %d connections at once: no more than %d files may be open (ulimit -n)", most, soft)
    return most


def http_listener(config: ServerConfig, app: Any, connections: int | None = None) -> uvicorn.Server:
    """`connections`: the most at once; the setting, if not given."""
    import uvicorn

    from octavo.server.connection import ConnectionBounds, connection_class

    bounds = ConnectionBounds(
        header_seconds=config.header_timeout,
        body_seconds=config.body_timeout,
        slow_client_seconds=config.slow_client_timeout,
        body_bytes=config.max_body_bytes,
        connections=config.max_connections if connections is None else connections,
    )
    settings = uvicorn.Config(
        app,
        http=connection_class(bounds, lambda: log.warning("a client that did not read its answer was cut off")),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=config.idle_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=_HURRY_SECONDS,  # type: ignore[arg-type]
    )

    class Listener(uvicorn.Server):
        def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
            return contextlib.nullcontext()  # they are this module's

    return Listener(settings)


class _Signals:
    """Counts SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._came)

    def _came(self) -> None:
        self.count += 1
        self._changed.set()

    async def wait(self, count: int) -> None:
        while self.count < count:
            self._changed.clear()
            await self._changed.wait()


async def _drain(server: Server, signals: _Signals, seconds: float) -> None:
    """Until nothing is inside, the limit has passed or another signal says to hurry."""
    admission = server.admission
    admission.draining = True
    admission.drain_seconds = max(1, round(seconds))
    text = "shutting down; requests that may finish within %g s, or until a second signal: %d"
    log.info(text, seconds, admission.inside)
    hurry = asyncio.ensure_future(signals.wait(2))
    end = asyncio.get_running_loop().time() + seconds
    while admission.inside and not hurry.done() and asyncio.get_running_loop().time() < end:
        await asyncio.wait((hurry,), timeout=0.05)
    hurry.cancel()
    if admission.inside:
        log.warning("requests cut short: %d", admission.inside)
