"""Fewer threads for a search where PyTorch's wait for each other: on a busy machine, or beyond a quota.

An operator in several threads ends with the last of them. Where other work has the cores, that one runs some
milliseconds later, in each operator anew: on two cores with a load average of 8 a call of MobileNetV3-small
took 1.9 s in two threads, and 0.02 s in one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from ampopt.measure.headline import load_now
from ampopt.search.lane_probe import SLOW_CALL_S
from ampopt.system.cores import cpu_quota, threads_within_quota

WAITING = 3.0
"""From this ratio of its times in all threads and in fewer on, a call is said to wait for its threads."""


@contextlib.contextmanager
def fewer_threads_if_they_wait(
    call_s: float, device: torch.device, again: Callable[[], float]
) -> Iterator[tuple[float, str | None]]:
    """Within the block PyTorch has fewer threads, if a call of `call_s` seconds waits for its threads.

    One on a busy machine, as many as a quota has CPUs for on another one. Gives the seconds of a call as it
    is in the block, and what to tell the user; the latter is None where the threads stay as they are: on a
    GPU, where a call is not slow, and where `again`, which measures a call, gives more than a third of
    `call_s` in fewer threads.
    """
    threads, load = torch.get_num_threads(), load_now()
    is_busy = load is not None and load.is_high
    fewer = 1 if is_busy else threads_within_quota(threads)
    if device.type != "cpu" or call_s < SLOW_CALL_S or fewer == threads:
        yield call_s, None
        return
    try:
        torch.set_num_threads(fewer)
        alone_s = again()
        if WAITING * alone_s > call_s:
            torch.set_num_threads(threads)
            yield call_s, None
            return
        why = f"the machine is busy ({load})"
        if not is_busy:
            why = f"a control group gives this process {cpu_quota():.3g} CPUs' time"
        few = "one thread" if fewer == 1 else f"{fewer} threads"
        told = (
            f"{why}, and PyTorch's {threads} threads wait for each other: a call takes {call_s:.2g} s, and "
            f"{alone_s:.2g} s in {few}. All times are of {few}: torch.set_num_threads({fewer}) gives them to "
            "your calls, too"
        )
        yield alone_s, told
    finally:
        torch.set_num_threads(threads)
