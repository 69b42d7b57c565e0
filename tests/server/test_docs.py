"""The pages about serving say what is so: their examples run, their tables are the code's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import limits
from octavo.server.admission import Admission
from octavo.server.config import flag_options
from tests.support.full_server import FullServer, full_server
from tests.support.llms import environment
from tests.support.served import Served, served
from tests.support.tiny_llm import TEMPLATE, write_tiny_llm

DOCS = Path(__file__).parents[2] / "docs"
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = "{# tools <tool_call> #}" + TEMPLATE  # takes tools; there is no room to tell the tiny model of them
    folder = write_tiny_llm(tmp_path_factory.mktemp("tiny"), template=template)
    with served(folder, "--served-model-name", "smollm2") as found:
        yield found


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_curl_examples_work_as_written(server: Served) -> None:
    examples = blocks("serving.md", "bash")
    assert len(examples) == 6
    for example in examples:
        assert ADDRESS in example
        command = example.replace(ADDRESS, f"http://127.0.0.1:{server.port}")
        result = subprocess.run(["bash", "-c", command], capture_output=True, timeout=30)
        assert result.returncode == 0
        if b"data: " in result.stdout:
            assert result.stdout.strip().endswith(b"data: [DONE]")
        else:
            assert "error" not in json.loads(result.stdout)


def test_the_python_example_works_as_written(server: Served) -> None:
    examples = blocks("serving.md", "python")
    assert len(examples) == 2
    for example in examples:
        assert ADDRESS in example
        code = example.replace(ADDRESS, f"http://127.0.0.1:{server.port}")
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip()


def table(page: str) -> list[list[str]]:
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]


def test_the_table_of_settings_is_the_schema() -> None:
    rows = {row[0]: row[1:] for row in table("operations.md") if row[0].startswith("`--")}
    expected = {}
    for _, setting, _, default in flag_options():
        shown = "off" if default is False else "none" if default in (None, []) else f"`{default}`"
        expected[", ".join(f"`{flag}`" for flag in setting.flags)] = [shown, setting.help]
    assert rows == expected


def test_the_page_of_limits_is_the_module_of_limits() -> None:
    rows = {row[0].strip("`"): row[1] for row in table("limits.md") if re.fullmatch(r"`[A-Z_]+`", row[0])}
    assert rows == {name: f"{value:,}" for name, value in vars(limits).items() if name.isupper()}


def test_the_metrics_in_the_page_are_those_served(tmp_path: Path) -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(octavo_[a-z0-9_]+?)(?:\{[a-z_,]*\})?`", text))
    with full_server(write_tiny_llm(tmp_path)) as full:
        served_names = names(full)
    assert told == {name for name in served_names if not name.startswith("octavo_process_")}


def test_the_reasons_of_refusals_in_the_page_are_those_counted() -> None:
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    told = re.search(r"`octavo_admission_rejections_total{reason}` \| refused: (.*) \|", text)
    assert told is not None
    reasons = re.sub(r" \(.*?\)", "", told[1]).split(", ")
    assert reasons == list(Admission(max_queued_requests=1, max_queued_tokens=1).refused)


def names(full: FullServer) -> set[str]:
    """Of the metrics; counters with _total, as they are queried."""
    full.complete()
    lines = full.ask("/metrics").body.decode().splitlines()
    kinds = [line.split()[2:4] for line in lines if line.startswith("# TYPE ")]
    return {name for name, _ in kinds}


def test_every_tgi_flag_and_variable_of_the_page_that_is_accepted_is_accepted() -> None:
    flags = {flag for _, setting, _, _ in flag_options() for flag in setting.flags}
    variables = {setting.tgi for _, setting, _, _ in flag_options() if setting.tgi}
    rows = [row for row in table("migration-from-tgi.md") if len(row) == 3 and row[0] != "TGI flag"]
    same = [
        row
        for row in rows
        if row[2].startswith(("the same", "`--model-id`", "`--revision`", "`--hostname`", "`--port`"))
    ]
    assert len(same) >= 12
    for row in same:
        assert set(re.findall(r"`(--?[a-z-]+)`", row[0])) <= flags, row
    assert {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row[1])} == variables


def quick_start() -> tuple[list[str], str]:
    """README's commands and its Python about the server."""
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## Server\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return [line.strip() for line in section.partition("```")[0].splitlines() if line.startswith("    ")], code


@pytest.mark.model
def test_the_quick_start_of_the_readme_works_as_pasted(tmp_path: Path) -> None:
    (serve, install), code = quick_start()
    assert install.split("#")[0].split() == ["pip", "install", "openai"]  # which is here
    script = tmp_path / "octavo"  # as an installation has it
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m octavo "$@"\n')
    script.chmod(0o755)
    variables = {**environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}", "OCTAVO_PORT": "0"}
    process = subprocess.Popen(["sh", "-c", "exec " + serve], stderr=subprocess.PIPE, text=True, env=variables)
    try:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if " is ready at " in line)
        address = re.search(r"http://[\d.:]+", ready)
        assert address is not None
        assert ADDRESS in code
        pasted = code.replace(ADDRESS, address[0])
        result = subprocess.run([sys.executable, "-c", pasted], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        assert "octavo" in result.stdout.lower()  # it was asked what one is
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 0


def test_every_client_of_the_pages_is_told_to_be_installed() -> None:
    for page in (DOCS / "serving.md", DOCS.parent / "README.md"):
        text = page.read_text(encoding="utf-8")
        before = text.partition("from openai import")[0]
        assert re.search(r"^    pip install openai\b", before, re.MULTILINE), page


def test_every_link_of_the_pages_about_serving_leads_somewhere() -> None:
    for page in ("serving.md", "operations.md", "migration-from-tgi.md", "limits.md", "README.md", "../README.md"):
        for target in re.findall(r"\]\(([^)]+)\)", (DOCS / page).read_text(encoding="utf-8")):
            if not target.startswith("http"):
                file, _, heading = target.partition("#")
                found = ((DOCS / page).parent / file) if file else DOCS / page
                assert found.exists(), (page, target)
                headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE) if heading else []
                assert not heading or heading in {each.lower().replace(" ", "-") for each in headings}, (page, target)
