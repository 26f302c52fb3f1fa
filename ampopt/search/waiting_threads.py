"""One thread for a search on a busy machine, where PyTorch's threads wait for each other.

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

WAITING = 3.0
"""From this ratio of its times in all threads and in one on, a call is said to wait for its threads."""


@contextlib.contextmanager
def one_thread_if_they_wait(
    call_s: float, device: torch.device, again: Callable[[], float]
) -> Iterator[tuple[float, str | None]]:
    """Within the block PyTorch has one thread, if a call of `call_s` seconds waits for its threads.

    Gives the seconds of a call as it is in the block, and what to tell the user; the latter is None where the
    threads stay as they are: on a GPU, on a machine that is not busy, where a call is not slow, and where
    `again`, which measures a call in one thread, gives more than a third of `call_s`.
    """
    threads, load = torch.get_num_threads(), load_now()
    is_slow = device.type == "cpu" and call_s >= SLOW_CALL_S
    if not is_slow or threads == 1 or load is None or not load.is_high:
        yield call_s, None
        return
    try:
        torch.set_num_threads(1)
        alone_s = again()
        if WAITING * alone_s > call_s:
            torch.set_num_threads(threads)
            yield call_s, None
            return
        told = (
            f"the machine is busy ({load}), and PyTorch's {threads} threads wait for each other: "
            f"a call takes {call_s:.2g} s, and {alone_s:.2g} s in one thread. All times are of one thread: "
            "torch.set_num_threads(1) gives them to your calls, too"
        )
        yield alone_s, told
    finally:
        torch.set_num_threads(threads)
