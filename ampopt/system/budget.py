"""Estimates the number of calls before and after a search, and checks that they fit the time budget."""

from __future__ import annotations

import dataclasses
import math
import time

from ampopt.system.wording import argument

DEFAULT_S = 60.0
"""The time budget in seconds, if the user gives none and calls are not slow."""

DEFAULT_CALLS = 600
"""The time budget in calls, if the user gives none and they are slow: about six times what one pass needs.

Half of them go into verification and the last comparison, and what is left is for a compiler, too.
"""

CAPTURES = 6
"""The time budget in captures, if the user gives none and that takes long.

CoaT-tiny has 1,701 operators, and `torch.compile` took 79 s to be ready on a slow host of an H200 (25533f8 in
`benchmarks/results/h200/breadth.json`). What takes 10 s to capture gets the usual time.
"""

MOST_FOR_CAPTURES_S = 120.0
"""The longest time budget in seconds that the capture alone brings."""

MOST_BY_DEFAULT_S = 600.0
"""The longest time budget in seconds that the user did not ask for."""

MARGIN_S = 3.0
"""Seconds by which preparation and the last comparison may exceed any time budget."""

MODULE_S = 5e-3
"""Export time in seconds for each submodule, without calls: 2 to 8 ms in networks of torchvision."""

CALLS_TO_LOOK = 3
"""Number of calls to measure the time of a call, see `optimizer.seconds_of_a_call`."""

CALLS_TO_CAPTURE = 9
"""Number of calls for a capture.

Copies are called to find the model's state, one is exported, one shows the structure of the results, and the
graph is called once.
"""

FLOAT64 = 3
"""How many times longer a call takes in float64."""

COSTLY_CALL_S = 0.5
"""From this duration on calls are costly: a minute has too few of them to be spent on what is plain."""

FAULTS = 2
"""Number of inputs with NaN or infinity, for which references are computed, too."""

CALLS_OF_A_TRIAL = 20
"""Minimum number of calls to verify and time a pass: three draws, warm-ups, six samples before and after."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """The time budget in seconds from `started`, on `time.perf_counter`'s clock."""

    started: float
    seconds: float

    @property
    def left_s(self) -> float:
        """The remaining time, including the margin."""
        return self.started + self.seconds + MARGIN_S - time.perf_counter()

    @property
    def rest_s(self) -> float:
        """The remaining time, without the margin; 0 once it is over."""
        return max(self.left_s - MARGIN_S, 0.0)

    def why_not(self, needed_s: float, call_s: float, what: str) -> str | None:
        """Why `what`, which takes the given seconds with calls of `call_s`, does not fit; None if it fits."""
        if needed_s <= self.left_s:
            return None
        whole = time.perf_counter() - self.started + needed_s
        unit = 10.0 ** max(math.floor(math.log10(whole)) - 1, 0)
        return (
            f"a call takes {call_s:.2g} s here, so that {what} takes about {_told(needed_s)} s, and "
            f"{_told(self.rest_s)} s of the time budget are left: "
            f"give {argument('budget_s', round(unit * math.ceil(whole / unit)))}"
        )


def _told(seconds: float) -> str:
    """Two digits of a time, and all of it from 100 s on."""
    return f"{seconds:.2g}" if seconds < 99.5 else f"{seconds:.0f}"


def default_budget_s(call_s: float, capture_s: float = 0.0) -> float:
    """The time budget in seconds for a model, if the user gives none, by what a call and its capture take."""
    for_graph = min(CAPTURES * capture_s, MOST_FOR_CAPTURES_S)
    return min(max(DEFAULT_S, DEFAULT_CALLS * call_s, for_graph), MOST_BY_DEFAULT_S)


@dataclasses.dataclass(frozen=True)
class Finish:
    """What follows the search.

    `calls`: the number of calls of the shortest last comparison. `least`: the least share of the time budget
    for trying passes, also where calls take long in what follows.
    """

    calls: int
    least: float


WHOLE = Finish(45, 0.55)
"""Original, eager and best are compared in six rounds, and checked."""

COSTLY_PART = Finish(24, 0.75)
"""Of a part whose calls are costly the lanes alone are compared: an engine takes 30 calls to be judged."""


def finish_of(call_s: float, *, is_part: bool) -> Finish:
    """That of a model, or of a part of one, that takes `call_s` seconds a call."""
    return COSTLY_PART if is_part and call_s >= COSTLY_CALL_S else WHOLE


def calls_to_verify(draws: int) -> int:
    """Calls for the references of the example inputs and of `draws` random ones, and for eager's errors."""
    return draws + FLOAT64 + (1 + draws + FAULTS) * (FLOAT64 + 1)
