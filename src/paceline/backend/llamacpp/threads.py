"""How many threads a forward should use: the physical cores this process may run on.

llama.cpp's threads spin at barriers, so one thread too many makes a forward several times slower; two
threads on one core's hyper-threads gain nothing either.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["physical_cores"]

SYSFS_CPU = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")


def physical_cores(sysfs: Path = SYSFS_CPU, cgroup: Path = CGROUP, cpus: set[int] | None = None) -> int:
    """Physical cores within the process's affinity and within its cgroup's quota; at least 1.

    cpus: the logical processors to count over (None: this process's). Where the topology cannot be read,
    every logical processor counts as a core.
    """
    if cpus is None:
        cpus = _affinity()
    cores = {_core(sysfs, cpu) for cpu in cpus}
    quota = _quota(cgroup)
    return max(1, min(len(cores), len(cores) if quota is None else int(quota)))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _core(sysfs: Path, cpu: int) -> tuple[str, str]:
    topology = sysfs / f"cpu{cpu}" / "topology"
    package, core = _text(topology / "physical_package_id"), _text(topology / "core_id")
    return (package, core) if package and core else ("unknown", str(cpu))


def _quota(cgroup: Path) -> float | None:
    """Processors' worth of time the cgroup (version 2, then 1) allows; None where it sets no limit."""
    limit, _, period = _text(cgroup / "cpu.max").partition(" ")
    if not period:
        limit, period = _text(cgroup / "cpu/cpu.cfs_quota_us"), _text(cgroup / "cpu/cpu.cfs_period_us")
    try:
        quota = float(limit) / float(period)
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return None
    return quota if quota > 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
