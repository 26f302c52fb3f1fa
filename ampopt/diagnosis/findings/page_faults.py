"""page-faults: a call takes its memory from the system anew, because it was given back after the last one."""

from __future__ import annotations

from collections.abc import Iterator

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding, counted, saved

ADVICE = (
    "start the process with MALLOC_MMAP_THRESHOLD_=33554432 and MALLOC_TRIM_THRESHOLD_=268435456 (one alone "
    "may make it worse), or with another allocator preloaded, such as jemalloc"
)


def find(case: Case) -> Iterator[Finding]:
    """Minor page faults of a call; executed: with as much free memory kept in the heap, see `heap`."""
    found = case.refilled
    if found is None:
        return
    if not found.kept.helps:
        case.notes.append(f"tried in the fp32 lane, not certainly faster: {found.kept}")
        return
    case.notes.append("all times but those of page-faults are of a process that keeps its memory")
    yield Finding(
        "page-faults",
        f"before anything else was done here, every call took {found.taken / 2**20:.1f} MiB anew from the "
        f"system ({counted(round(found.faults), 'page fault', 'page faults')}): the memory had been given "
        "back after the call before",
        advice=ADVICE,
        share=saved(found.kept),
        counterfactual=found.kept,
    )
