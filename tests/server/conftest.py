"""A server with a tiny model in this process, for the files that need no other; each file has its own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.live_server import LiveServer, serve
from tests.support.tiny_llm import write_tiny_llm


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(write_tiny_llm(tmp_path_factory.mktemp("tiny"))) as server:
        yield server


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=30) as client:
        yield client
