"""The page about structured output says what is so, and its example runs."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import jsonschema
import pytest

from octavo.grammar import json_schema

PAGE = (Path(__file__).parents[2] / "docs" / "structured.md").read_text(encoding="utf-8")


def test_the_keywords_of_the_page_are_those_enforced() -> None:
    told = PAGE.partition("## JSON schemas")[2].partition("Titles,")[0]
    keywords = set(re.findall(r"`([$a-zA-Z]+)`", told))
    known = {*json_schema._VALUES, *json_schema._ONE, *json_schema._LISTED, *json_schema._NAMED}
    assert keywords == known - {"uniqueItems", "$defs", "definitions"}
    assert ", ".join(json_schema.FORMATS) in told.replace("\n", " ")


@pytest.mark.model
def test_the_example_of_the_page_runs() -> None:
    found = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    said = io.StringIO()
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(said):
        exec(found[1], names)  # noqa: S102
    names["llm"].close()  # type: ignore[attr-defined]
    jsonschema.validate(json.loads(said.getvalue()), names["city"])  # type: ignore[arg-type]
