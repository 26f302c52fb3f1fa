"""cpu-threads: another number of threads than the one that is fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ampopt.diagnosis.case import Case, timed_call, trial_s
from ampopt.diagnosis.finding import Counterfactual, Finding, counted, saved
from ampopt.system.cores import threads_within_quota, usable_cpus

SLOWER = 2.0
"""A call that once takes so many times longer in other threads is not sampled."""

WORTH = 1.1
"""From this gain on, another number of threads is told."""


def find(case: Case) -> Iterator[Finding]:
    """PyTorch's threads and the cores; executed: one, half of the cores, all, and the quota."""
    if case.device.type != "cpu":
        return
    now = torch.get_num_threads()
    try:
        yield from _compared(case, now)
    finally:
        torch.set_num_threads(now)


def _compared(case: Case, now: int) -> Iterator[Finding]:
    cores = len(usable_cpus())
    best: tuple[int, Counterfactual] | None = None
    for count in sorted({1, max(cores // 2, 1), threads_within_quota(cores), cores} - {now}):
        if not case.has_time(_change(count), trial_s(case.latency["fp32"].median)):
            continue
        once_s = timed_call(_in_threads(count, case.eager()), case.device)
        if once_s > SLOWER * case.latency["fp32"].median:
            continue
        ran = _with_threads(case, now, count)
        if ran.helps and ran.gain.ratio >= WORTH and (best is None or ran.gain.ratio > best[1].gain.ratio):
            best = count, ran
    if best is not None:
        count, ran = best
        yield Finding(
            "cpu-threads",
            f"PyTorch computes in {counted(now, 'thread', 'threads')}, and this process may use "
            f"{counted(cores, 'core', 'cores')}",
            advice=f"torch.set_num_threads({count})",
            share=saved(ran),
            counterfactual=ran,
        )


def _with_threads(case: Case, now: int, count: int) -> Counterfactual:
    call = case.eager()
    return case.counterfactual(_change(count), _in_threads(now, call), _in_threads(count, call))


def _change(count: int) -> str:
    return f"in {counted(count, 'thread', 'threads')}"


def _in_threads(count: int, call: Callable[[], object]) -> Callable[[], object]:
    """The call in so many threads, which stay: the untimed call before a sample makes them."""

    def run() -> object:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        return call()

    return run
