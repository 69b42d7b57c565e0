"""Programs run on an `LLM` over the tiny model, with room for a long prefix; at the end all of it is free again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM, set_default_backend
from tests.support.llms import assert_idle, open_llm
from tests.support.tiny_llm import write_tiny_llm


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llm(tmp_path_factory.mktemp("tiny"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="package")
def shared(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, kv_memory="16MB") as llm:
        yield llm


@pytest.fixture(autouse=True)
def llm(shared: LLM) -> Iterator[LLM]:
    """The default backend, cold; and idle again after the test."""
    shared.flush_cache()
    set_default_backend(shared)
    yield shared
    set_default_backend(None)
    assert_idle(shared)
