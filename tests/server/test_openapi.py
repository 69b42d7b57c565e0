"""The description of the API is true: schemathesis, from an environment of its own, asks for all that it allows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from octavo.server.openapi import document
from tests.support.client_environments import client_python
from tests.support.live_server import serve
from tests.support.tiny_llm import write_tiny_llm

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_nothing_the_description_allows_is_a_server_error_or_answered_otherwise_than_described(tmp_path: Path) -> None:
    python = client_python("schemathesis", "schemathesis>=4.30,<5")
    with serve(write_tiny_llm(tmp_path)) as live:
        options = ["--checks", CHECKS, "--max-examples", "10", "--generation-deterministic", "--no-color"]
        phases = ["--phases", "coverage,fuzzing", "--continue-on-failure", "--warnings", "off"]
        command = [str(python.parent / "schemathesis"), "run", f"{live.url}/openapi.json", *options, *phases]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
        assert ran.returncode == 0, ran.stdout[-5000:]
        operations = sum(len(methods) for methods in document()["paths"].values())
        assert f"Operations:       {operations} selected" in ran.stdout
        tried = re.search(r"(\d+) generated", ran.stdout)
        assert tried is not None
        assert int(tried[1]) > 500
        assert any(record.completion_tokens for record in live.records)  # some of it came to the model
