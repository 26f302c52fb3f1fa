"""launch-bound: the GPU waits for the host, which issues many small kernels."""

from __future__ import annotations

from collections.abc import Iterator

from ampopt.diagnosis.case import LEAST_GAPS, Case
from ampopt.diagnosis.finding import Finding, counted, milliseconds, saved
from ampopt.passes import CudaGraph


def find(case: Case) -> Iterator[Finding]:
    """The share of a call in which no kernel runs; executed: the same kernels in one CUDA graph."""
    for name, lane in case.lanes.items():
        kernels = case.kernels(name)
        if not kernels or name not in case.device_time or name not in case.latency:
            continue
        call_s, busy_s = case.latency[name].median, case.device_time[name].median
        gaps = 1 - busy_s / call_s
        ran = case.against_eager("under a CUDA graph", lane, CudaGraph()) if gaps >= LEAST_GAPS else None
        if ran is None or not ran.helps:
            continue
        mean_us = 1e6 * sum(kernel.seconds for kernel in kernels) / len(kernels)
        yield Finding(
            "launch-bound",
            f"{gaps:.0%} of the {milliseconds(call_s)} ms is gaps between launches "
            f"({counted(len(kernels), 'kernel', 'kernels')}, mean {mean_us:.3g} µs)",
            advice="launch all kernels as one CUDA graph: ampopt.optimize does",
            lane=name,
            share=saved(ran),
            counterfactual=ran,
        )
