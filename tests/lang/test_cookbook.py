"""The programs that the documentation shows run as they stand, on the model they name."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, set_default_backend
from tests.support.llms import environment

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    with LLM("smollm2", max_model_len=2048) as llm:
        yield llm


def run(block: str, llm: LLM, folder: Path) -> dict[str, Any]:
    """From a file, as programs are: their lines are then in error messages."""
    set_default_backend(llm)
    path = folder / "program.py"
    path.write_text(block)
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(block, path, "exec"), names)  # noqa: S102
    return names


@pytest.mark.model
def test_the_ten_lines_of_the_readme_run_as_pasted(tmp_path: Path) -> None:
    """In a process of their own, with no word about where they run."""
    [program] = [block for block in blocks("README.md") if "@function" in block]
    assert len(list(filter(None, program.splitlines()))) <= 10
    path = tmp_path / "pasted.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment(), timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("A", "B", "C", "D")


@pytest.mark.model
def test_the_program_of_the_language_page_runs(smollm2: LLM, tmp_path: Path) -> None:
    [program] = blocks("docs/language.md")
    assert run(program, smollm2, tmp_path)["state"]["answer"] in ("A", "B", "C", "D")


COOKBOOK = blocks("docs/cookbook.md")


@pytest.mark.model
def test_few_shot_classifier(smollm2: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(COOKBOOK[0], smollm2, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] in ("good", "bad") for line in lines] == [True] * 3


@pytest.mark.model
def test_json_extractor(smollm2: LLM, tmp_path: Path) -> None:
    person = run(COOKBOOK[1], smollm2, tmp_path)["person"]
    assert [type(person[name]) for name in ("name", "age", "member")] == [str, int, bool]
    assert set(person) == {"name", "age", "member"}


@pytest.mark.model
def test_forked_self_consistency(smollm2: LLM, tmp_path: Path) -> None:
    state = run(COOKBOOK[2], smollm2, tmp_path)["state"]
    assert [type(answer) for answer in state["answer"]] == [int] * 5
    assert state["answer"].count(state["best"]) == state["votes"]
    again = run(COOKBOOK[2], smollm2, tmp_path)["state"]
    assert again["steps"] == state["steps"]


@pytest.mark.model
def test_loop_with_tools(smollm2: LLM, tmp_path: Path) -> None:
    state = run(COOKBOOK[3], smollm2, tmp_path)["state"]
    assert all(type(result) is int for result in state["results"])
    assert [message["role"] for message in state.messages()][:3] == ["system", "user", "assistant"]
    assert state.messages()[-1]["content"] == "The answer is " + state["answer"]


@pytest.mark.model
def test_judge(smollm2: LLM, tmp_path: Path) -> None:
    assert run(COOKBOOK[4], smollm2, tmp_path)["state"]["votes for the calm one"] in (0, 1, 2)


def test_every_program_of_the_cookbook_is_tested() -> None:
    assert len(COOKBOOK) == 5
