"""How many threads a step may use."""

from __future__ import annotations

import os
from pathlib import Path


def default_threads() -> int:
    """min(physical cores in the affinity mask, the cgroup's CPU quota), at least 1."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    threads = len(_physical_cores(cpus)) or len(cpus)
    quota = _cgroup_quota()
    if quota is not None:
        threads = min(threads, max(1, int(quota)))
    return max(1, threads)


def _physical_cores(cpus: set[int]) -> set[tuple[str, str]]:
    cores = set()
    for cpu in cpus:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
        except OSError:
            return set()
    return cores


def _cgroup_quota() -> float | None:
    """CPUs the cgroup may use, or None when it sets no limit (cgroup v2, then v1)."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        v1_quota = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        v1_period = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return None if v1_quota <= 0 else v1_quota / v1_period
    except (OSError, ValueError):
        return None
