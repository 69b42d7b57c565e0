"""The short form of `make load`: on the tiny model, a few seconds."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.server import load
from tests.support.served import served
from tests.support.tiny_llm import write_tiny_llm


def test_many_streams_and_clients_that_leave_let_nothing_grow_and_leave_nothing(tmp_path: Path) -> None:
    with served(write_tiny_llm(tmp_path)) as server:
        report = asyncio.run(load.run(server, streams=24, seconds=5.0, sample_seconds=0.2))
        assert report.counts["read to the end"] > 20
        assert report.counts["left by their client"] > 5
        assert server.end() == 0
