"""The processor's hardware threads that this process may use, and how much of their time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Linux's control groups, and those that this process is in (cgroups(7))."""


def usable_cpus() -> Sequence[int]:
    """The hardware threads on which this process may run, by number."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def cpu_quota() -> float | None:
    """How many CPUs' time this process may use, as `docker run --cpus` limits it; None without a limit.

    A group's limit holds for all in it, and for the groups in it. Threads beyond it make a process wait for
    the rest of each period, 0.1 s by default.
    """
    quotas = [quota for folder in _own_groups() if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def threads_within_quota(threads: int) -> int:
    """How many of so many threads the quota has CPUs for, at least one."""
    quota = cpu_quota()
    return threads if quota is None else max(1, min(threads, math.floor(quota)))


def _own_groups() -> Iterator[Path]:
    """The folders of the groups that this process is in and that limit CPUs, and of those around them.

    In a container a group's folder may not be seen, or be the root: the root is always among them.
    """
    try:
        lines = OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = PurePosixPath(path.lstrip("/"))
        for each in (group, *group.parents):
            yield GROUPS / controllers / each


def _quota(folder: Path) -> float | None:
    """A group's limit in CPUs: `cpu.max` of cgroup v2, or the files of v1."""
    try:
        if (limit := folder / "cpu.max").is_file():
            quota, period = limit.read_text(encoding="ascii").split()
        else:
            names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
            quota, period = ((folder / name).read_text(encoding="ascii") for name in names)
        return float(quota) / float(period) if float(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such group, no limit ("max"), or not Linux's format
        return None
