"""A sample of `python -m tests.fuzz.fields`."""

from __future__ import annotations

import random
from pathlib import Path

from tests.fuzz.fields import ROUTES, cases, run
from tests.support.live_server import serve
from tests.support.tiny_llm import write_tiny_llm


def test_i20_no_value_of_any_field_is_a_server_error_or_disturbs_the_next_request(tmp_path: Path) -> None:
    chosen = random.Random(4).sample(list(cases()), 700)
    assert {case.route for case in chosen} == set(ROUTES)
    with serve(write_tiny_llm(tmp_path / "tiny")) as live:
        seen = run(live, chosen)
    assert seen[200] > 20
    assert seen[400] + seen[422] > 100
