"""Which backend a program runs on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidParameterError
from octavo.lang.backends.interface import Backend

if TYPE_CHECKING:
    from octavo.lang.state import ProgramState

_lock = threading.Lock()
_default: Backend | None = None  # of the process: programs are written without saying where they run


def set_default_backend(backend: Any) -> None:
    """What programs run on that are not told otherwise: an LLM, an OctavoServer or an OpenAIEndpoint. None: an LLM()
    of the process's own, made when it is first needed, which is also what it is before this is called."""
    global _default
    chosen = None if backend is None else _wrapped(backend)
    with _lock:
        _default = chosen


def backend_for(backend: Any, parent: ProgramState | None = None) -> Backend:
    """The one given, that of the program around, or the default."""
    global _default
    if backend is not None:
        return _wrapped(backend)
    if parent is not None:
        return parent._interpreter.run.backend
    with _lock:
        if _default is None:
            from octavo.engine.llm import LLM

            _default = _wrapped(LLM())
        return _default


def flush_cache(backend: Any = None) -> None:
    """Empties the prefix cache, as far as nothing that runs uses it."""
    backend_for(backend).flush_cache()


def _wrapped(backend: Any) -> Backend:
    if all(callable(getattr(backend, name, None)) for name in ("generate", "kept", "score", "warm", "flush_cache")):
        chosen: Backend = backend
        return chosen
    from octavo.engine.llm import LLM

    if isinstance(backend, LLM):
        from octavo.lang.backends.engine import EngineBackend

        return EngineBackend(backend)
    raise InvalidParameterError("backend", backend, "an LLM, an OctavoServer or an OpenAIEndpoint")
