"""Octavo: LLM serving on CPUs that gives the same request the same bits, whatever happens around it.

    from octavo import LLM, SamplingParams
    from octavo import function, gen, select

Names are imported when they are first used, so that `import octavo` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine.llm import LLM as LLM
    from octavo.errors import BackendError as BackendError
    from octavo.errors import CapacityError as CapacityError
    from octavo.errors import ChatTemplateError as ChatTemplateError
    from octavo.errors import DownloadError as DownloadError
    from octavo.errors import EngineClosedError as EngineClosedError
    from octavo.errors import InvalidParameterError as InvalidParameterError
    from octavo.errors import ModelFileError as ModelFileError
    from octavo.errors import ModelNotFoundError as ModelNotFoundError
    from octavo.errors import OctavoError as OctavoError
    from octavo.errors import ProgramError as ProgramError
    from octavo.errors import QueueFullError as QueueFullError
    from octavo.errors import RequestFailedError as RequestFailedError
    from octavo.errors import UnsupportedByBackendError as UnsupportedByBackendError
    from octavo.errors import UnsupportedModelError as UnsupportedModelError
    from octavo.lang import ProgramState as ProgramState
    from octavo.lang import assistant as assistant
    from octavo.lang import assistant_begin as assistant_begin
    from octavo.lang import assistant_end as assistant_end
    from octavo.lang import flush_cache as flush_cache
    from octavo.lang import function as function
    from octavo.lang import gen as gen
    from octavo.lang import gen_int as gen_int
    from octavo.lang import gen_string as gen_string
    from octavo.lang import select as select
    from octavo.lang import set_default_backend as set_default_backend
    from octavo.lang import set_var as set_var
    from octavo.lang import system as system
    from octavo.lang import system_begin as system_begin
    from octavo.lang import system_end as system_end
    from octavo.lang import user as user
    from octavo.lang import user_begin as user_begin
    from octavo.lang import user_end as user_end
    from octavo.lang.backends.octavo_server import OctavoServer as OctavoServer
    from octavo.lang.backends.openai import OpenAIEndpoint as OpenAIEndpoint
    from octavo.outputs import CompletionOutput as CompletionOutput
    from octavo.outputs import Logprob as Logprob
    from octavo.outputs import RequestOutput as RequestOutput
    from octavo.outputs import TextDelta as TextDelta
    from octavo.outputs import Timings as Timings
    from octavo.params import SamplingParams as SamplingParams
    from octavo.structured import StructuredOutputs as StructuredOutputs

    __version__: str

_HOME = {
    "LLM": "octavo.engine.llm",
    "SamplingParams": "octavo.params",
    "StructuredOutputs": "octavo.structured",
    "RequestOutput": "octavo.outputs",
    "CompletionOutput": "octavo.outputs",
    "Logprob": "octavo.outputs",
    "TextDelta": "octavo.outputs",
    "Timings": "octavo.outputs",
    "OctavoError": "octavo.errors",
    "InvalidParameterError": "octavo.errors",
    "ModelNotFoundError": "octavo.errors",
    "DownloadError": "octavo.errors",
    "ModelFileError": "octavo.errors",
    "UnsupportedModelError": "octavo.errors",
    "ChatTemplateError": "octavo.errors",
    "CapacityError": "octavo.errors",
    "QueueFullError": "octavo.errors",
    "RequestFailedError": "octavo.errors",
    "EngineClosedError": "octavo.errors",
    "ProgramError": "octavo.errors",
    "BackendError": "octavo.errors",
    "UnsupportedByBackendError": "octavo.errors",
    "function": "octavo.lang",
    "gen": "octavo.lang",
    "gen_int": "octavo.lang",
    "gen_string": "octavo.lang",
    "select": "octavo.lang",
    "system": "octavo.lang",
    "system_begin": "octavo.lang",
    "system_end": "octavo.lang",
    "user": "octavo.lang",
    "user_begin": "octavo.lang",
    "user_end": "octavo.lang",
    "assistant": "octavo.lang",
    "assistant_begin": "octavo.lang",
    "assistant_end": "octavo.lang",
    "set_var": "octavo.lang",
    "set_default_backend": "octavo.lang",
    "flush_cache": "octavo.lang",
    "ProgramState": "octavo.lang",
    "OctavoServer": "octavo.lang.backends.octavo_server",
    "OpenAIEndpoint": "octavo.lang.backends.openai",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value = version("octavo")
        except PackageNotFoundError:  # run from a source tree
            value = "0+unknown"
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
