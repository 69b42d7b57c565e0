"""Octavo: LLM serving on CPUs that gives the same request the same bits, whatever happens around it.

    from octavo import LLM, SamplingParams

Names are imported when they are first used, so that `import octavo` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine.llm import LLM as LLM
    from octavo.errors import CapacityError as CapacityError
    from octavo.errors import ChatTemplateError as ChatTemplateError
    from octavo.errors import DownloadError as DownloadError
    from octavo.errors import EngineClosedError as EngineClosedError
    from octavo.errors import InvalidParameterError as InvalidParameterError
    from octavo.errors import ModelFileError as ModelFileError
    from octavo.errors import ModelNotFoundError as ModelNotFoundError
    from octavo.errors import OctavoError as OctavoError
    from octavo.errors import QueueFullError as QueueFullError
    from octavo.errors import RequestFailedError as RequestFailedError
    from octavo.errors import UnsupportedModelError as UnsupportedModelError
    from octavo.outputs import CompletionOutput as CompletionOutput
    from octavo.outputs import Logprob as Logprob
    from octavo.outputs import RequestOutput as RequestOutput
    from octavo.outputs import TextDelta as TextDelta
    from octavo.outputs import Timings as Timings
    from octavo.params import SamplingParams as SamplingParams

    __version__: str

_HOME = {
    "LLM": "octavo.engine.llm",
    "SamplingParams": "octavo.params",
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
