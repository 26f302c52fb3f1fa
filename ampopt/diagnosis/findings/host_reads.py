"""host-read, host-copy: lines at which the host waits for the device, or copies across."""

from __future__ import annotations

from collections.abc import Iterator

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding


def find(case: Case) -> Iterator[Finding]:
    """Each line that reads a value back, makes a shape of values, or copies between devices.

    There is no counterfactual: without it the model would be another one.
    """
    for read in case.watched.reads:
        times = "once" if read.count == 1 else f"{read.count} times"
        does = (
            f"makes a {read.what} {times}"
            if read.is_copy
            else f"waits for a value on the host ({read.what}, {times})"
        )
        spent = f", in {1e6 * read.seconds:.0f} µs" if read.seconds else ""
        after = "" if read.is_copy else ", after which nothing is queued, and no CUDA graph is possible"
        call_s = case.latency["fp32"].median
        yield Finding(
            "host-copy" if read.is_copy else "host-read",
            f"{read.place or 'a line outside of the model'} {does} in every call{spent}{after}",
            places=tuple(part for part in (read.module,) if part),
            advice=(
                "keep the tensors on one device"
                if read.is_copy
                else "compute on tensors instead: torch.where for a branch, a mask for a selection"
            ),
            share=min(read.seconds / call_s, 1.0) if case.device.type == "cuda" else 0.0,
        )
