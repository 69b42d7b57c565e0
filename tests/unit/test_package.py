"""The package keeps its shape: quick to import, small to install, rooms that only look downwards."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import octavo

SOURCE = Path(octavo.__file__).parent

# --- quick ---

CPU_SECONDS = 0.45  # promised: 0.3 s; the rest is slack for a slow or busy machine


def run_python(code: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True).stdout


def least_cpu_seconds(code: str, *arguments: str) -> float:
    """CPU time of a fresh interpreter, its start included; the best of three."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_python(code, *arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)

    return min(once() for _ in range(3))


def test_import_octavo_is_quick() -> None:
    assert least_cpu_seconds("import octavo") <= CPU_SECONDS


def test_help_of_the_command_line_is_quick() -> None:
    assert least_cpu_seconds("from octavo.cli.main import main; main()", "--help") <= CPU_SECONDS


@pytest.mark.parametrize("code", ["import octavo", "import octavo.cli.main"])
def test_importing_loads_nothing_heavy(code: str) -> None:
    loaded = run_python(f"{code}; import sys, json; print(json.dumps(sorted(sys.modules)))")
    heavy = {"numpy", "torch", "transformers", "tokenizers", "huggingface_hub", "jinja2", "rich", "octavo._native"}
    assert heavy.isdisjoint(json.loads(loaded))


def test_every_public_name_can_be_imported() -> None:
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    assert set(octavo.__all__) <= set(dir(octavo))
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        octavo.nothing_of_this_name  # noqa: B018


def test_version_is_the_installed_one() -> None:
    assert octavo.__version__ == importlib.metadata.version("octavo")


# --- small ---


def runtime_closure(root: str) -> set[str]:
    """Names of every distribution that installing `root` brings, extras left out."""
    found: set[str] = set()
    waiting = [Requirement(root)]
    while waiting:
        requirement = waiting.pop()
        name = requirement.name.lower().replace("_", "-")
        extras = requirement.extras or {""}
        if name in found:
            continue
        found.add(name)
        for text in importlib.metadata.requires(requirement.name) or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return found


def installed_bytes(name: str) -> int:
    files = importlib.metadata.files(name) or ()
    paths = {Path(str(file.locate())).resolve() for file in files if file.suffix != ".pyc"}
    return sum(path.stat().st_size for path in paths if path.is_file())


def test_runtime_install_is_at_most_250_megabytes_and_has_no_torch() -> None:
    closure = runtime_closure("octavo")
    assert {"octavo", "numpy", "tokenizers"} <= closure
    assert {"torch", "transformers", "gguf", "safetensors"}.isdisjoint(closure)
    assert sum(installed_bytes(name) for name in closure) <= 250_000_000


# --- rooms ---

# What a room may import besides itself. `interface` is executor/interface.py, the seam: types without behaviour.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "limits": set(),
    "structured": {"errors", "limits"},
    "logs": set(),
    "params": {"errors", "limits", "structured"},
    "outputs": {"errors", "limits", "params"},
    "interface": set(),
    "program": {"errors", "limits"},
    "models": {"errors", "limits", "program"},
    "weights": {"errors", "limits", "models", "program"},
    "tokenizer": {"errors", "limits", "weights"},
    "kv": {"errors", "limits"},
    "scheduler": {"errors", "limits", "kv"},
    "grammar": {"errors", "limits", "structured", "tokenizer"},
    "sampling": {"errors", "limits", "params", "outputs", "interface", "grammar"},
    "executor": {"errors", "limits", "interface", "program", "models", "weights", "_native"},
}
ARROWS["engine"] = {"errors", "limits", "params", "outputs", "_native", *ARROWS}
ARROWS["chat"] = {"errors", "limits", "structured", "grammar", "tokenizer"}
ARROWS["server"] = {"engine", "chat", "__init__", *ARROWS["engine"]}
ARROWS["lang"] = {"errors", "limits", "params", "structured", "engine"}
ARROWS["bench"] = {"engine", *ARROWS["engine"]}
ARROWS["cli"] = {"errors", "limits", "params", "outputs", "engine", "executor", "weights", "_native", "__init__"}
ARROWS["cli"] |= {"bench", "logs", "server"}
ARROWS["__main__"] = {"cli"}
ARROWS["__init__"] = {"errors", "params", "outputs", "structured", "engine", "lang"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of ours, a package as its __init__."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        yield name, ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(module: str, tree: ast.Module, names: set[str]) -> set[str]:
    """Modules of ours that a module imports anywhere, also inside functions and for types only."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = (
                ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            for alias in node.names:
                inner = f"{home}.{alias.name}"
                found.add(inner if inner in names or inner == "octavo._native" else str(home))
    ours = {name for name in found if name.split(".")[0] == "octavo"}
    return {f"{name}.__init__" if f"{name}.__init__" in names else name for name in ours}


def room(module: str) -> str:
    if module == "octavo.executor.interface":
        return "interface"
    return module.split(".")[1]


def import_graph() -> dict[str, set[str]]:
    trees = dict(modules())
    return {name: imports(name, tree, set(trees)) for name, tree in trees.items()}


def test_imports_between_rooms_only_go_downwards() -> None:
    forbidden = [
        f"{module} imports {target}"
        for module, targets in import_graph().items()
        for target in sorted(targets)
        if room(target) != room(module) and room(target) not in ARROWS[room(module)]
    ]
    assert forbidden == []


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done or node not in graph:
            return []
        for target in sorted(graph[node]):
            if cycle := visit(target, [*path, node]):
                return cycle
        done.add(node)
        return []

    for start in sorted(graph):
        if cycle := visit(start, []):
            return cycle
    return []


def test_no_module_imports_itself_through_others() -> None:
    graph = import_graph()
    graph.pop("octavo.__init__")  # its names are looked up on first use
    assert find_cycle(graph) == []
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


# --- safe ---


def unsafe_uses(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in UNSAFE_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            found.append(node.func.id)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and getattr(node.value, "value", True):
            found.append("allow_pickle")
    return found


UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}


def test_i37_no_pickle_eval_or_exec() -> None:
    assert [(name, uses) for name, tree in modules() if (uses := unsafe_uses(tree))] == []
    assert unsafe_uses(ast.parse("import pickle\nfrom marshal import loads\neval('1')\nload(p, allow_pickle=True)"))
