"""Models by org/name from a Hugging Face hub, through huggingface_hub: it honours HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE
and HF_HOME and keeps the cache.

Only what is needed is fetched: one set of weights (safetensors, else the one GGUF) and the small files beside it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.errors import DownloadError, ModelFileError, ModelNotFoundError, OctavoError
from octavo.weights.progress import wanted
from octavo.weights.safetensors import INDEX_NAME, SINGLE_NAME, shard_names
from octavo.weights.strict_json import read_object

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
HUB_NAME = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?::(?P<file>[A-Za-z0-9._+/ -]{{1,240}}\.gguf))?")

_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def resolve_hub(repo: str, file: str | None, revision: str | None, progress: bool | None) -> Path:
    """The folder (safetensors) or file (GGUF) in the hub's cache. Raises ModelNotFoundError or DownloadError."""
    with _hub_errors(repo, file, revision), _bars(progress):
        from huggingface_hub import hf_hub_download

        # Also for a file that is named: hf_hub_download alone retries for half a minute before it says that the hub is
        # down.
        listing = _listing(repo, revision)
        if isinstance(listing, Path):
            return _from_cached(repo, listing, file)
        chosen = file or _choose(repo, listing)
        if chosen is None:
            return _fetch_safetensors(repo, listing, revision)
        return Path(hf_hub_download(repo, chosen, revision=revision))


def _listing(repo: str, revision: str | None) -> list[str] | Path:
    """The repository's files; when the hub cannot be reached, the cached snapshot instead."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        # Not list_repo_files: that one retries for most of a minute before it says that the hub is down.
        return [file.rfilename for file in HfApi().model_info(repo, revision=revision).siblings or []]
    except (RepositoryNotFoundError, GatedRepoError, RevisionNotFoundError):
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, HfHubHTTPError) and status in (401, 403):
            raise
        try:
            return Path(
                snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=["config.json"])
            )
        except LocalEntryNotFoundError:
            raise error from None


def _choose(repo: str, files: list[str]) -> str | None:
    """None: the safetensors at the root; else the one GGUF file to take."""
    if INDEX_NAME in files or SINGLE_NAME in files:
        return None
    ggufs = sorted(name for name in files if name.endswith(".gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        listed = "\n".join(f"  {repo}:{name}" for name in ggufs[:40])
        raise ModelNotFoundError(f"{repo} holds {len(ggufs)} GGUF files, name one of them:\n{listed}")
    pickled = [name for name in files if name.endswith((".bin", ".pth", ".pt"))]
    hint = "; its pickled weights are not read, since pickled files can run code" if pickled else ""
    raise ModelNotFoundError(f"{repo} holds no weights that can be read (safetensors or GGUF){hint}")


def _fetch_safetensors(repo: str, files: list[str], revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    wanted_files = [name for name in _SMALL_FILES if name in files]
    if INDEX_NAME in files:
        index = Path(hf_hub_download(repo, INDEX_NAME, revision=revision))
        wanted_files += [INDEX_NAME, *sorted(set(shard_names(index, read_object(index)).values()))]
    else:
        wanted_files.append(SINGLE_NAME)
    missing = [name for name in wanted_files if name not in files]
    if missing:
        raise ModelFileError(f"{repo}/{INDEX_NAME}", f"names {missing[0]}, which is not in the repository")
    return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted_files))


def _from_cached(repo: str, folder: Path, file: str | None) -> Path:
    if file is not None:
        if not (folder / file).is_file():
            raise DownloadError(f"the cached copy of {repo} has no {file}, and the hub cannot be reached")
        return folder / file
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    chosen = _choose(repo, files)
    if chosen is not None:
        return folder / chosen
    needed = {"config.json", SINGLE_NAME}
    if INDEX_NAME in files:
        needed = {"config.json", *shard_names(folder / INDEX_NAME, read_object(folder / INDEX_NAME)).values()}
    missing = sorted(needed - set(files))
    if missing:
        raise DownloadError(
            f"the cached copy of {repo} is incomplete ({missing[0]} is missing) and the hub cannot be reached; "
            "fetch it again with the network up"
        )
    return folder


@contextmanager
def _bars(progress: bool | None) -> Iterator[None]:
    """The hub's own progress bars, only where someone can see them; its setting is restored."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if wanted(progress) or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _hub_errors(repo: str, file: str | None, revision: str | None) -> Iterator[None]:
    """Whatever the library or its HTTP stack raises becomes one of our errors, in words for the one who can act."""
    try:
        yield
    except OctavoError:
        raise
    except Exception as error:
        raise _worded(error, repo, file, revision) from error


def _worded(error: Exception, repo: str, file: str | None, revision: str | None) -> OctavoError:
    from huggingface_hub import constants, errors

    at = f" at revision {revision}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFoundError(
            f"{repo} is gated: accept its terms at {constants.ENDPOINT}/{repo} and set HF_TOKEN to that account's token"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{repo} has no revision {revision}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"{constants.ENDPOINT} has no model {repo}, or it is private: check the name, or set "
            "HF_TOKEN to a token that may read it"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return DownloadError(f"{constants.ENDPOINT} refused access to {repo} ({status}): check HF_TOKEN")
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return ModelNotFoundError(f"{repo}{at} has no file {file}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"no room on the disk of {constants.HF_HUB_CACHE} for {repo}; free some or set HF_HOME to another disk"
        )
    if constants.HF_HUB_OFFLINE:
        return DownloadError(f"{repo}{at} is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set")
    if status is not None:
        return DownloadError(f"{constants.ENDPOINT} answered {status} for {repo}; try again later")
    reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return DownloadError(
        f"{constants.ENDPOINT} could not be reached for {repo}{at}, and the cache does not hold it "
        f"(is the network up?): {reason}"
    )
