"""The extension module is written in C++ (native/bindings); its callers name the types they get."""

from typing import Any

def __getattr__(name: str) -> Any: ...
