"""slow-first-call, slow-after-idling: calls that are slower than those that follow closely on another."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Counterfactual, Finding, milliseconds
from ampopt.measure.clocks import latency
from ampopt.measure.sampling import Measurement, gain

IDLE_S = 0.3
"""The pause before a call: of a camera of 3 frames a second."""

TIMES = 6

WORTH = 1.25
"""From this ratio to a call without a pause on, it is told."""

IN_ONE_THREAD = "in one thread after the same pause"

FIRST = 5.0
"""From this ratio on, the first call is told."""


def find(case: Case) -> Iterator[Finding]:
    """The first call, which was timed, and calls after a pause; executed: without it, or in one thread.

    To wake several threads can take longer than the work: on two virtual cores a call took 10.4 ms after a
    pause in two threads, 6.8 in one, and 4.9 right after another call.
    """
    usual = case.latency["fp32"]
    if case.first_call_s > FIRST * usual.median:
        ratio = case.first_call_s / usual.median
        yield Finding(
            "slow-first-call",
            f"the first call took {milliseconds(case.first_call_s)} ms, {ratio:.0f} times a later one",
            advice="call the model once before it is needed, with the shapes that will come",
        )
    yield from _after_idling(case)


def _after_idling(case: Case) -> Iterator[Finding]:
    call_s = case.latency["fp32"].median
    if not case.has_time(f"calls after {IDLE_S:g} s without one", TIMES * (IDLE_S + 2 * call_s)):
        return
    sampler = latency(case.eager(), case.device, long_s=0.0)  # no untimed call before it: that ends the rest
    sampler()
    idle, close = [], []
    for _ in range(TIMES):
        time.sleep(IDLE_S)
        idle.append(sampler())
        close.append(sampler())
    rested, warm = Measurement(tuple(idle)), Measurement(tuple(close))
    found = gain(rested, warm)
    if not found.is_real or found.ratio < WORTH:
        return
    says = f"a call after {IDLE_S:g} s without one takes {milliseconds(rested.median)} ms"
    advice = "measure at the rate of your camera, not in a loop; ampopt verify --hz does"
    if (alone := _in_one_thread(case, call_s)) is not None:
        says = (
            f"{says}, and {milliseconds(warm.median)} right after another: threads have gone to rest, and to "
            "wake them takes longer than they save"
        )
        advice = f"torch.set_num_threads(1) where calls are rare; {advice}"
    else:
        says = f"{says}: caches, clocks or threads have gone to rest"
    yield Finding(
        "slow-after-idling",
        says,
        advice=advice,
        counterfactual=alone or Counterfactual("right after another call", rested, warm, found),
    )


def _in_one_thread(case: Case, call_s: float) -> Counterfactual | None:
    """Calls after the same pause in one thread, where that is certainly faster; the threads are put back.

    Not where one thread is faster right after another call, too: that is no matter of a pause.
    """
    now = torch.get_num_threads()
    if case.device.type != "cpu" or now == 1:
        return None
    if not case.has_time(IN_ONE_THREAD, 2 * TIMES * (IDLE_S + 3 * call_s)):
        return None
    sampler = latency(case.eager(), case.device, long_s=0.0)
    close: dict[int, list[float]] = {now: [], 1: []}
    rested: dict[int, list[float]] = {now: [], 1: []}
    try:
        for _ in range(TIMES):
            for count in rested:
                torch.set_num_threads(count)
                sampler()  # makes the threads
                close[count].append(sampler())
                time.sleep(IDLE_S)
                rested[count].append(sampler())
    finally:
        torch.set_num_threads(now)
    before, after = (Measurement(tuple(samples)) for samples in rested.values())
    found = gain(before, after)
    if not found.is_real or found.ratio < WORTH:
        return None
    without_pause = gain(*(Measurement(tuple(samples)) for samples in close.values()))
    return None if without_pause.is_real else Counterfactual(IN_ONE_THREAD, before, after, found)
