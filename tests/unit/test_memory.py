"""The KV pool fits beside the weights and under every limit of the process; the weights' file leaves memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from octavo.engine import memory
from octavo.engine.memory import available_memory, parse_bytes, plan_memory
from octavo.errors import CapacityError, InvalidParameterError
from octavo.limits import MAX_BATCH_SEQUENCES
from octavo.weights.mapped import byte_view, map_file, release_pages

GIB = 1 << 30


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 8 * GIB)


@pytest.mark.usefixtures("available")
class TestPlan:
    def test_the_default_is_half_of_what_the_weights_leave(self) -> None:
        plan = plan_memory(1 << 20, 1 << 20, weight_bytes=2 * GIB)
        assert plan.available == 6 * GIB
        assert plan.kv_memory == 3 * GIB
        assert plan.num_blocks == 3 * 1024

    def test_no_more_than_every_sequence_could_use(self) -> None:
        plan = plan_memory(4096, 256)
        assert plan.num_blocks == MAX_BATCH_SEQUENCES * 256 // 16

    def test_a_small_pool_shortens_the_context(self) -> None:
        plan = plan_memory(4096, 2048, kv_memory=4096 * 10 + 5)
        assert (plan.num_blocks, plan.kv_tokens, plan.max_model_len) == (10, 160, 160)
        assert plan_memory(4096, 150, kv_memory=4096 * 10).max_model_len == 150

    def test_a_context_asked_for_must_fit(self) -> None:
        assert plan_memory(4096, 2048, kv_memory=4096 * 10, max_model_len=160).max_model_len == 160
        with pytest.raises(CapacityError, match="max_model_len=161"):
            plan_memory(4096, 2048, kv_memory=4096 * 10, max_model_len=161)

    @pytest.mark.parametrize("bad", [0, 1, -5, 2049, True, 16.0, "64"])
    def test_max_model_len_is_checked(self, bad: int) -> None:
        with pytest.raises(InvalidParameterError, match="max_model_len"):
            plan_memory(4096, 2048, max_model_len=bad)

    def test_more_than_is_there_is_refused(self) -> None:
        with pytest.raises(CapacityError, match=r"9\.0 GiB is more than the 8\.0 GiB"):
            plan_memory(4096, 2048, kv_memory="9GiB")
        with pytest.raises(CapacityError, match="beside the weights"):
            plan_memory(4096, 2048, kv_memory="3GiB", weight_bytes=6 * GIB)

    def test_less_than_a_block_is_refused(self) -> None:
        with pytest.raises(CapacityError, match="one block"):
            plan_memory(4096, 2048, kv_memory=4095)
        with pytest.raises(CapacityError, match="one block"):
            plan_memory(4096, 2048, weight_bytes=9 * GIB)

    def test_the_plan_says_itself_in_words(self) -> None:
        words = plan_memory(4096, 2048, kv_memory="1MiB").describe()
        assert "1.0 MiB of the 8.0 GiB" in words
        assert "256 blocks of 16 tokens" in words


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_bytes("m", text) for text in ("2GiB", "500MB", "1.5g", "64 kib", "10", "1TB", "3b", 7)] == [
        2 * GIB, 500_000_000, 1_500_000_000, 65536, 10, 10**12, 3, 7,
    ]  # fmt: skip
    for bad in ("", "lots", "-1", "0", "1e9", "5 XB", 0, -1, True, 2.5, None):
        with pytest.raises(InvalidParameterError, match="kv_memory"):
            parse_bytes("kv_memory", bad)  # type: ignore[arg-type]


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8388608 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_available_memory_is_the_systems_without_a_cgroup(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, {})) == 8 * GIB
    assert available_memory(tmp_path / "nothing") == 4 * GIB


def test_a_cgroup_limit_counts_less_what_is_used_and_not_reclaimable(tmp_path: Path) -> None:
    """Version 2, with the limit on a parent of the process's own group."""
    files = {
        "proc/self/cgroup": "0::/user.slice/app.scope\n",
        "sys/fs/cgroup/user.slice/app.scope/memory.max": "max\n",
        "sys/fs/cgroup/user.slice/app.scope/memory.current": "5\n",
        "sys/fs/cgroup/user.slice/app.scope/memory.stat": "inactive_file 0\n",
        "sys/fs/cgroup/user.slice/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/user.slice/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/user.slice/memory.stat": f"anon 7\ninactive_file {GIB // 2}\n",
    }
    assert available_memory(machine(tmp_path, files)) == 3 * GIB // 2


def test_a_containers_own_cgroup_counts_whatever_path_the_host_gives_it(tmp_path: Path) -> None:
    """Version 1; the path in /proc is the host's and is not there."""
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/kubepods/pod1/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 4}\n",
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 8}\n",
    }
    assert available_memory(machine(tmp_path, files)) == GIB * 7 // 8


def test_an_exhausted_cgroup_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB + 5}\n",
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
    }
    assert available_memory(machine(tmp_path, files)) == 0


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_released_pages_leave_memory_and_can_be_read_again(tmp_path: Path) -> None:
    size = 64 << 20
    path = tmp_path / "weights"
    np.arange(size // 8, dtype=np.int64).tofile(path)
    view = byte_view(map_file(path, 8))
    parts = [view[: size // 2], view[size // 2 :].view(np.int64)[3:].view(np.uint8), np.zeros(3, np.uint8)]
    total = int(view.view(np.int64).sum())
    before = resident()
    release_pages(parts)
    assert before - resident() > 0.9 * size
    assert int(view.view(np.int64).sum()) == total
