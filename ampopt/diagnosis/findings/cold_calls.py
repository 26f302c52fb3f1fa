"""slow-first-call, slow-after-idling: calls that are slower than those that follow closely on another."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Counterfactual, Finding, milliseconds
from ampopt.measure.clocks import latency
from ampopt.measure.sampling import Measurement, gain

IDLE_S = 0.3
"""The pause before a call: of a camera of 3 frames a second."""

TIMES = 6

WORTH = 1.25
"""From this ratio to a call without a pause on, it is told."""

FIRST = 5.0
"""From this ratio on, the first call is told."""


def find(case: Case) -> Iterator[Finding]:
    """The first call, which was timed, and calls after a pause; executed: the same calls without one."""
    usual = case.latency["fp32"]
    if case.first_call_s > FIRST * usual.median:
        ratio = case.first_call_s / usual.median
        yield Finding(
            "slow-first-call",
            f"the first call took {milliseconds(case.first_call_s)} ms, {ratio:.0f} times a later one: it "
            "loads libraries and chooses kernels",
            advice="call the model once before it is needed, with the shapes that will come",
        )
    if not case.has_time(f"calls after {IDLE_S:g} s without one", TIMES * (IDLE_S + 2 * usual.median)):
        return
    call = case.eager()
    sampler = latency(call, case.device, long_s=0.0)  # no untimed call before it: that would end the rest
    sampler()
    idle, close = [], []
    for _ in range(TIMES):
        time.sleep(IDLE_S)
        idle.append(sampler())
        close.append(sampler())
    rested, warm = Measurement(tuple(idle)), Measurement(tuple(close))
    found = gain(rested, warm)
    if found.is_real and found.ratio >= WORTH:
        yield Finding(
            "slow-after-idling",
            f"a call after {IDLE_S:g} s without one takes {milliseconds(rested.median)} ms: caches, clocks "
            "or threads have gone to rest",
            advice="measure at the rate of your camera, not in a loop; ampopt verify --hz does",
            share=0.0,
            counterfactual=Counterfactual("right after another call", rested, warm, found),
        )
