"""`octavo pull` and `octavo models`: what can be fetched and what is here."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli import options, terminal


def pull(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="A known name, org/name or org/name:file.gguf.")],
    revision: options.Revision = None,
) -> None:
    """Fetch models and print where each one is."""
    from octavo.weights.sources import resolve_model

    for name in names:
        print(resolve_model(name, revision=revision))


def models() -> None:
    """List the known models and those on this machine."""
    rows = [("NAME", "SIZE", "WHERE"), *_known(), *_from_hub()]
    print(terminal.table(rows))


def _known() -> list[tuple[str, str, str]]:
    from octavo.weights.cache import cache_dir
    from octavo.weights.known import KNOWN_MODELS

    rows = []
    for model in KNOWN_MODELS:
        path = cache_dir() / "models" / model.name / model.file_name
        where = str(path) if path.is_file() else f"not here yet: octavo pull {model.name}"
        rows.append((model.name, terminal.size(model.bytes), where))
    return rows


def _from_hub() -> list[tuple[str, str, str]]:
    """Repositories in huggingface_hub's cache, whoever put them there, that hold weights Octavo reads."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    rows = []
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model":
            continue
        files = {
            file.file_path.relative_to(revision.snapshot_path).as_posix(): file
            for revision in repo.revisions
            for file in revision.files
        }
        for name, file in sorted(files.items()):
            if name.endswith(".gguf"):
                rows.append((f"{repo.repo_id}:{name}", terminal.size(file.size_on_disk), str(file.file_path)))
        if any(name.endswith(".safetensors") for name in files):
            rows.append((repo.repo_id, terminal.size(repo.size_on_disk), str(repo.repo_path)))
    return rows
