"""A short form of `make fuzz`; the long one runs tests.fuzz.loaders for minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import loaders
from tests.fuzz.loaders import Broken, Corpus, fuzz, run_case


def test_damaged_models_load_or_give_one_of_our_errors() -> None:
    counts = fuzz(range(400), seconds=60)
    assert sum(counts.values()) == 400
    damaged = {name.split(" ")[0] for name, _ in counts}
    assert damaged == {"bpe.gguf", "spm.gguf", *Corpus().folder}
    assert {outcome for _, outcome in counts} >= {"loads", "ModelFileError", "UnsupportedModelError"}


def test_a_case_is_the_same_damage_each_time(tmp_path: Path) -> None:
    contents = []
    for place in (tmp_path / "a", tmp_path / "b"):
        place.mkdir()
        for number in range(6):
            Corpus().case(number, place)
        contents.append({path.name: path.read_bytes() for path in place.iterdir()})
    assert contents[0] == contents[1]


def crash(path: Path) -> None:
    raise ZeroDivisionError


def hoard(path: Path) -> None:
    bytearray(loaders.MOST_BYTES + 1)


@pytest.mark.parametrize(("fault", "words"), [(crash, "ZeroDivisionError"), (hoard, "MiB are allowed")])
def test_a_broken_loader_is_found(monkeypatch: pytest.MonkeyPatch, fault: Any, words: str) -> None:
    import tracemalloc

    monkeypatch.setattr(loaders, "load_everything", fault)
    tracemalloc.start()
    try:
        with pytest.raises(Broken, match=words):
            run_case(Corpus(), 1)
    finally:
        tracemalloc.stop()
