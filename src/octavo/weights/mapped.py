"""Opens a weight file as read-only mapped bytes; tensors are views into it."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelFileError


def map_file(path: Path, smallest: int) -> mmap.mmap:
    """The regular file `path`, mapped read-only. A file shorter than `smallest` bytes is refused."""
    try:
        # Without O_NONBLOCK opening a named pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise ModelFileError(path, f"cannot be opened: {getattr(error, 'strerror', None) or error}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ModelFileError(path, "is not a regular file")
        if info.st_size < smallest:
            raise ModelFileError(path, f"is truncated: {info.st_size} bytes, at least {smallest} expected")
        return mmap.mmap(fd, info.st_size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(path, f"cannot be mapped: {error.strerror}") from None
    finally:
        os.close(fd)


def byte_view(mapped: mmap.mmap) -> npt.NDArray[np.uint8]:
    """All bytes of the file, read-only; the view keeps the mapping alive."""
    return np.frombuffer(mapped, dtype=np.uint8)


def release_pages(views: Iterable[npt.NDArray[np.uint8]]) -> None:
    """Gives the memory back that mapped files take under these views; what is read again comes from the file again."""
    files = {id(file): file for view in views if (file := _mapped_file(view)) is not None}
    for file in files.values():
        file.madvise(mmap.MADV_DONTNEED)


def _mapped_file(view: Any) -> mmap.mmap | None:
    while view is not None and not isinstance(view, mmap.mmap):
        view = view.obj if isinstance(view, memoryview) else getattr(view, "base", None)
    return view


def check_no_overlap(path: Path, spans: list[tuple[int, int, str]]) -> None:
    """`spans` are (begin, end, tensor name). Shared bytes would let a small file describe a huge model."""
    last_end, last_name = 0, ""
    for begin, end, name in sorted(spans):
        if begin < last_end:
            raise ModelFileError(path, f"tensors {last_name!r:.200} and {name!r:.200} overlap")
        if end > begin:
            last_end, last_name = end, name
