"""The processor's hardware threads that this process may use."""

from __future__ import annotations

import os
from collections.abc import Sequence


def usable_cpus() -> Sequence[int]:
    """The hardware threads on which this process may run, by number."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)
