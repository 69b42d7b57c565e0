"""Octavo's own model cache: where it is, one puller at a time, files that are whole or absent."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from octavo.errors import DownloadError


def cache_dir() -> Path:
    """$OCTAVO_CACHE, else $XDG_CACHE_HOME/octavo, else ~/.cache/octavo. Not created here."""
    own = os.environ.get("OCTAVO_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


@contextmanager
def pull_lock(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Held by one process (or thread) at a time; calls `on_wait` once if another holds it. The kernel frees it when its
    holder dies, however that happens."""
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A temporary file beside `target` that takes its place when the block succeeds, and vanishes otherwise."""
    fd, name = tempfile.mkstemp(prefix=".part-", dir=target.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot
            raise
    finally:
        os.close(fd)


def remove_leftovers(folder: Path) -> None:
    """What a killed puller left behind. Call while holding the lock."""
    for path in folder.iterdir():
        if path.name.startswith(".part-"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def require_free(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise disk_full(folder, needed, free)


def disk_full(folder: Path, needed: int, free: int | None = None) -> DownloadError:
    if free is None:
        free = shutil.disk_usage(folder).free
    return DownloadError(
        f"no room on the disk of {folder}: {needed:,} bytes are needed, {free:,} are free; "
        "free some space or set OCTAVO_CACHE to a folder on another disk"
    )
