"""host-read, host-copy: lines at which the host waits for the device, or copies across."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding
from ampopt.diagnosis.host_reads import HostRead
from ampopt.diagnosis.watch import Watched


def find(case: Case) -> Iterator[Finding]:
    """Each line that reads a value back, makes a shape of values, or copies between devices.

    There is no counterfactual: without it the model would be another one.
    """
    case.notes += at_first(case.watched)
    for read in case.watched.reads:
        yield told(read, case.device, case.latency["fp32"].median)


def at_first(watched: Watched) -> list[str]:
    """A note for each read of the first of two calls alone: how often later ones read is not known."""
    return [f"in the first call and not in the second, {_doing(read)}" for read in watched.at_first]


def told(
    read: HostRead,
    device: torch.device,
    whole_s: float,
    *,
    lane: str = "fp32",
    each: str = "call",
    instead: str = "compute on tensors instead: torch.where for a branch, a mask for a selection",
) -> Finding:
    """A read as a finding; `each` ("call", "step") takes `whole_s` seconds, `instead` is advice."""
    spent = f", in {1e6 * read.seconds:.0f} µs" if read.seconds else ""
    after = "" if read.is_copy else ", after which nothing is queued, and no CUDA graph is possible"
    return Finding(
        "host-copy" if read.is_copy else "host-read",
        f"{_doing(read)} in every {each}{spent}{after}",
        places=tuple(part for part in (read.module,) if part),
        advice="keep the tensors on one device" if read.is_copy else instead,
        lane=lane,
        share=min(read.seconds / whole_s, 1.0) if device.type == "cuda" else 0.0,
    )


def _doing(read: HostRead) -> str:
    """`net.py:8, "y = x.item()" waits for a value on the host (.item(), once)`."""
    times = "once" if read.count == 1 else f"{read.count} times"
    by = f"{read.what} of PyTorch's own" if read.is_own else read.what
    does = f"makes a {by} {times}" if read.is_copy else f"waits for a value on the host ({by}, {times})"
    return f"{read.place or 'a line outside of the model'} {does}"
