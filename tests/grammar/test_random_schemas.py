"""Whatever the schema and whatever the logits: a finished output is valid. `make grammar` runs 500 schemas."""

from __future__ import annotations

from pathlib import Path

from tests.grammar.validate import check_random_schemas
from tests.support.engines import load_tiny


def test_outputs_of_random_schemas_are_valid(tmp_path: Path) -> None:
    found = check_random_schemas(load_tiny(tmp_path), range(1000, 1060))
    assert found["stop"] >= 100
    assert found["refused"] <= 6
