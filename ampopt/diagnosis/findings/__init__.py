"""The findings, one file each: `find(case)` gives those that its evidence supports."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding
from ampopt.diagnosis.findings import (
    autocast_casts,
    batch_norm,
    channels,
    cold_calls,
    cpu_threads,
    graph_break,
    grouped,
    host_reads,
    input_device,
    launch_bound,
    memory_layout,
    mixed_precision,
    no_numbers,
    overflow,
    page_faults,
    redundant,
    tf32,
    training_mode,
)

Find = Callable[[Case], Iterator[Finding]]

FINDINGS: tuple[Find, ...] = (
    graph_break.find,
    host_reads.find,
    mixed_precision.find,
    training_mode.find,
    no_numbers.find,
    input_device.find,
    launch_bound.find,
    memory_layout.find,
    batch_norm.find,
    autocast_casts.find,
    channels.find,
    grouped.find,
    redundant.find,
    tf32.find,
    overflow.find,
    cpu_threads.find,
    page_faults.find,
    cold_calls.find,
)
"""In the order in which they are looked for: first what costs no time, then what is most often the cause."""


def in_order(*, is_busy: bool) -> tuple[Find, ...]:
    """All findings; on a busy machine, where threads wait for each other, first the one about threads.

    MobileNetV3-small took 350 ms in two threads on two cores beside other work there, and 11 in one.
    """
    if not is_busy:
        return FINDINGS
    return (cpu_threads.find, *(find for find in FINDINGS if find is not cpu_threads.find))
