"""Models by org/name, against a hub of our own on 127.0.0.1. huggingface_hub reads its environment when imported, so
each case runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.weights.checkpoint import load_checkpoint
from tests.support.fake_hub import FakeHub, commit_of, running_hub
from tests.support.safetensors_writer import safetensors_bytes
from tests.support.tiny_files import HF_CONFIG, hf_weights, tiny_gguf

_CLIENT = """
import json, sys
from octavo.errors import OctavoError
from octavo.weights.sources import resolve_model
for name, revision in json.loads(sys.argv[1]):
    try:
        print(json.dumps({"path": str(resolve_model(name, revision=revision))}))
    except OctavoError as error:
        print(json.dumps({"error": type(error).__name__, "words": str(error)}))
"""

WEIGHTS = safetensors_bytes(hf_weights())
FILES = {
    "config.json": json.dumps(HF_CONFIG).encode(),
    "generation_config.json": b'{"top_k": 1}',  # all of different content: equal files are fetched once
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b'{"eos_token": "x"}',
    "model.safetensors": WEIGHTS,
}
NOT_NEEDED = {
    "README.md": b"x",
    ".gitattributes": b"x",
    "pytorch_model.bin": b"x",
    "consolidated.safetensors": b"x",
    "original/consolidated.00.pth": b"x",
    "onnx/model.onnx": b"x",
    "model.Q4.gguf": b"x",
    "training_args.bin": b"x",
}


def sharded() -> dict[str, bytes]:
    names = sorted(hf_weights())
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    files = {name: raw for name, raw in FILES.items() if name != "model.safetensors"}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    for part in range(2):
        files[f"model-{part}.safetensors"] = safetensors_bytes({name: hf_weights()[name] for name in names[part::2]})
    return files


def resolve(hub: FakeHub, home: Path, *names: str | tuple[str, str], **env: str) -> list[dict[str, Any]]:
    """What `resolve_model` gives for each name, in a fresh process with this hub and an empty or kept `home`."""
    wanted = [name if isinstance(name, tuple) else (name, None) for name in names]
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()
    }
    environment = {
        **clean,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        **env,
    }
    command = [sys.executable, "-c", _CLIENT, json.dumps(wanted)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "it/s" not in done.stderr, "a progress bar without a terminal"
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_only_needed_files_are_fetched_and_reused_when_the_hub_is_gone(tmp_path: Path) -> None:
    repos = {
        "org/one": {"main": {**FILES, **NOT_NEEDED}},
        "org/shards": {"main": {**sharded(), **NOT_NEEDED}},
        "org/gguf": {"main": {"README.md": b"x", "config.json": b"{}", "model.Q4_1.gguf": tiny_gguf()}},
    }
    names = ("org/one", "org/shards", "org/gguf", "org/gguf:model.Q4_1.gguf")
    with running_hub(FakeHub(repos)) as hub:
        answers = resolve(hub, tmp_path / "home", *names)
        paths = [answer["path"] for answer in answers]
        assert hub.downloaded() == {*FILES, *sharded(), "model.Q4_1.gguf"}
        first = len(hub.requests)
        assert [answer["path"] for answer in resolve(hub, tmp_path / "home", *names)] == paths
        assert [method for method, path, _ in hub.requests[first:] if method == "GET" and "/resolve/" in path] == []
    one, shards, gguf, gguf_again = map(Path, paths)
    assert load_checkpoint(one).digest == load_checkpoint(shards).digest
    assert gguf == gguf_again
    assert load_checkpoint(gguf).config.architecture == "llama"
    # The server is down now: first found out by trying, then said by HF_HUB_OFFLINE.
    assert [answer.get("path") for answer in resolve(hub, tmp_path / "home", *names)] == paths
    assert [answer.get("path") for answer in resolve(hub, tmp_path / "home", *names, HF_HUB_OFFLINE="1")] == paths


def test_the_revision_is_the_one_asked_for(tmp_path: Path) -> None:
    other = {**FILES, "config.json": json.dumps({**HF_CONFIG, "max_position_embeddings": 64}).encode()}
    with running_hub(FakeHub({"org/m": {"main": FILES, "v2": other}})) as hub:
        main, v2, commit, absent = resolve(
            hub,
            tmp_path,
            "org/m",
            ("org/m", "v2"),
            ("org/m", commit_of("org/m", "v2")),
            ("org/m", "v9"),
        )
    assert load_checkpoint(main["path"]).config.context == 128
    assert load_checkpoint(v2["path"]).config.context == 64
    assert commit["path"] == v2["path"]
    assert absent == {"error": "ModelNotFoundError", "words": "org/m has no revision v9"}


def test_the_token_is_sent_and_a_gated_model_says_what_to_do(tmp_path: Path) -> None:
    with running_hub(FakeHub({"org/gated": {"main": FILES}}, gated={"org/gated"})) as hub:
        (refused,) = resolve(hub, tmp_path, "org/gated")
        assert refused["error"] == "ModelNotFoundError"
        assert "gated" in refused["words"]
        assert "HF_TOKEN" in refused["words"]
        hub.requests.clear()
        (allowed,) = resolve(hub, tmp_path, "org/gated", HF_TOKEN="hf_good")
        assert {authorization for _, _, authorization in hub.requests} == {"Bearer hf_good"}
    assert load_checkpoint(allowed["path"]).config.layers == 2


def test_errors_of_the_hub_are_said_in_plain_words(tmp_path: Path) -> None:
    ggufs = {"a.Q4_0.gguf": b"x", "b.Q8_0.gguf": b"x"}
    pickled = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    outside = {**FILES, "model.safetensors.index.json": b'{"weight_map": {"a": "../../x.safetensors"}}'}
    repos = {"org/many": {"main": ggufs}, "org/bin": {"main": pickled}, "org/evil": {"main": outside}}
    with running_hub(FakeHub(repos)) as hub:
        absent, many, pickle, file, evil = resolve(
            hub, tmp_path, "org/absent", "org/many", "org/bin", "org/many:c.gguf", "org/evil"
        )
        hub.status = 500
        (broken,) = resolve(hub, tmp_path, "org/many")
        hub.status = 401
        (unauthorised,) = resolve(hub, tmp_path, "org/many", HF_TOKEN="hf_bad")
    down, offline = resolve(hub, tmp_path, "org/x")[0], resolve(hub, tmp_path, "org/x", HF_HUB_OFFLINE="1")[0]
    assert absent["error"] == "ModelNotFoundError"
    assert "no model org/absent" in absent["words"]
    assert "org/many:a.Q4_0.gguf" in many["words"]
    assert "org/many:b.Q8_0.gguf" in many["words"]
    assert "pickled" in pickle["words"]
    assert file == {"error": "ModelNotFoundError", "words": "org/many has no file c.gguf"}
    assert evil["error"] == "ModelFileError"
    assert "plain file name" in evil["words"]
    assert broken["error"] == "DownloadError"
    assert "500" in broken["words"]
    assert unauthorised["error"] in ("DownloadError", "ModelNotFoundError")
    assert "HF_TOKEN" in unauthorised["words"]
    assert down["error"] == "DownloadError"
    assert "could not be reached" in down["words"]
    assert offline["error"] == "DownloadError"
    assert "HF_HUB_OFFLINE" in offline["words"]


def test_an_incomplete_cached_copy_is_not_taken_for_the_model(tmp_path: Path) -> None:
    with running_hub(FakeHub({"org/shards": {"main": sharded()}})) as hub:
        (answer,) = resolve(hub, tmp_path, "org/shards")
    (Path(answer["path"]) / "model-1.safetensors").unlink()
    (offline,) = resolve(hub, tmp_path, "org/shards", HF_HUB_OFFLINE="1")
    assert offline["error"] == "DownloadError"
    assert "incomplete" in offline["words"]


@pytest.mark.parametrize("errno_name", ["ENOSPC", "EDQUOT"])
def test_a_full_disk_is_said_in_plain_words(errno_name: str) -> None:
    import errno

    from octavo.weights.hub import _worded

    error = _worded(OSError(getattr(errno, errno_name), "full"), "org/m", None, None)
    assert "no room on the disk" in str(error)
