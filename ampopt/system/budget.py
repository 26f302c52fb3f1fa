"""Estimates the number of calls before and after a search, and checks that they fit the time budget."""

from __future__ import annotations

import dataclasses
import math
import time

MARGIN_S = 3.0
"""Seconds by which preparing and the last comparison may overrun a time budget, however small it is."""

MODULE_S = 5e-3
"""Seconds that exporting takes for each submodule, calls aside: 2 to 8 ms in networks of torchvision."""

CALLS_TO_LOOK = 3
"""To find out how long a call takes, see `optimizer.seconds_of_a_call`."""

CALLS_TO_CAPTURE = 8
"""Copies are called to learn what they keep, one is exported, one says how the results are put together."""

FLOAT64 = 3
"""How many times as long a call takes in float64."""

CALLS_TO_COMPARE = 45
"""The last comparison at its shortest: the original, eager and the best in six rounds, and checks."""

FAULTS = 2
"""Inputs with NaN or an infinity in them, for which there are references, too."""

CALLS_TO_SETTLE = 7 * (FLOAT64 + 2)
"""Inputs outside of the examples' range (`draws.range_draws`), in float64, in eager and in a program."""

CALLS_OF_A_TRIAL = 20
"""Calls that verify and time a pass at the least: three draws, warm-ups, six samples before and after."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Seconds since `started` on `time.perf_counter`'s clock that everything may take."""

    started: float
    seconds: float

    @property
    def left_s(self) -> float:
        """What is left of it and its margin."""
        return self.started + self.seconds + MARGIN_S - time.perf_counter()

    def why_not(self, needed_s: float, call_s: float, what: str) -> str | None:
        """Why `what`, which takes so many seconds with calls of `call_s`, does not fit; None: it does."""
        if needed_s <= self.left_s:
            return None
        whole = time.perf_counter() - self.started + needed_s
        unit = 10.0 ** max(math.floor(math.log10(whole)) - 1, 0)
        return (
            f"a call takes {call_s:.2g} s here, so that {what} takes about {needed_s:.2g} s, and "
            f"{max(self.left_s - MARGIN_S, 0.0):.2g} s of the time budget are left: "
            f"give budget_s={unit * math.ceil(whole / unit):.0f}"
        )


def calls_to_verify(draws: int) -> int:
    """Calls for the references of the example inputs and of `draws` random ones, and for eager's errors."""
    return draws + FLOAT64 + (1 + draws + FAULTS) * (FLOAT64 + 1)
