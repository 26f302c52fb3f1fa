"""The two regimes in which calls are timed: back to back, and at 30 Hz with idle gaps between the frames.

Back to back everything is warm: the processor's caches and its clock, and the GPU's. After a gap they are
not, which a program with much Python in it feels most. Subjects take turns, a block of calls each, so that
within a block nobody else disturbs a regime. This file needs no PyTorch: other environments use it.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ampopt.measure.sampling import Gain, Measurement, gain

BACK_TO_BACK, AT_30_HZ = "back to back", "30 Hz"

REGIMES = (BACK_TO_BACK, AT_30_HZ)

PERIOD_S = 1 / 30

BLOCK_S, LEAST_CALLS, WARM_S = 0.2, 5, 0.05
"""A block back to back: its length, the fewest calls in it, and how long calls before it are not timed."""

QUEUED_CALLS = 200
"""The most calls that are queued without waiting for each."""

FRAMES = 10
"""Timed frames in a block at 30 Hz, after one that is not timed: the wait before it was longer."""

LONG_S, FEWEST = 1.0, 2
"""Calls of seconds: a block of either regime that has lasted so long ends, if it has so many of them."""

ROUNDS = 6
"""The fewest blocks of each subject in each regime: an interval that six pairs can give, and 60 frames."""

Meter = Callable[[], Mapping[str, float]]
"""Reads what a device has used so far and how it runs, see `ampopt.system.meters`."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is timed: a call, what waits for its end, and what reads the device's meters."""

    call: Callable[[], object]
    synchronize: Callable[[], None] = lambda: None
    meter: Meter = dict
    queues: bool = False

    def timed(self) -> float:
        """Seconds of one call until its results are there."""
        start = time.perf_counter()
        self.call()
        self.synchronize()
        return time.perf_counter() - start


Block = dict[str, Any]
"""Of one subject in one regime: seconds of its calls, and means over it of what else was read."""


def block(subject: Subject, regime: str) -> Block:
    """Time one block in a regime."""
    return _back_to_back(subject) if regime == BACK_TO_BACK else _at_30_hz(subject)


def _back_to_back(subject: Subject) -> Block:
    end = time.perf_counter() + WARM_S
    subject.timed()
    while time.perf_counter() < end:
        subject.timed()
    before, cpu, seconds = subject.meter(), time.process_time(), list[float]()
    end = time.perf_counter() + BLOCK_S
    while len(seconds) < LEAST_CALLS or time.perf_counter() < end:
        seconds.append(subject.timed())
        if _is_long(seconds):
            break
    used = {"cpu_s": (time.process_time() - cpu) / len(seconds)}
    used |= _used(before, subject.meter(), len(seconds))
    return {"seconds": seconds, **used, **({"queued_s": _queued(subject)} if subject.queues else {})}


def _queued(subject: Subject) -> float:
    """Seconds of a call among many that are queued on the device at once."""
    count = max(LEAST_CALLS, min(QUEUED_CALLS, int(BLOCK_S / max(subject.timed(), 1e-6))))
    start = time.perf_counter()
    for _ in range(count):
        subject.call()
    subject.synchronize()
    return (time.perf_counter() - start) / count


def _at_30_hz(subject: Subject) -> Block:
    before, cpu, seconds = subject.meter(), time.process_time(), list[float]()
    tick = time.perf_counter()
    for frame in range(FRAMES + 1):
        while (now := time.perf_counter()) >= tick:  # a frame that comes too late waits for the next tick
            tick += PERIOD_S
        time.sleep(tick - now)
        took = subject.timed()
        if frame == 0:
            before, cpu = subject.meter(), time.process_time()
        else:
            seconds.append(took)
        if _is_long(seconds):
            break
    used = {"cpu_s": (time.process_time() - cpu) / len(seconds)}
    return {"seconds": seconds, **used, **_used(before, subject.meter(), len(seconds))}


def _is_long(seconds: Sequence[float]) -> bool:
    return len(seconds) >= FEWEST and sum(seconds) >= LONG_S


def _used(before: Mapping[str, float], after: Mapping[str, float], calls: int) -> dict[str, float]:
    """Means over a block: what counts up is divided by the calls, what is a state is as it was at its end."""
    energy = {
        key: (after[key] - before[key]) / calls for key in after if key.endswith("_j") and key in before
    }
    return {**{key: value for key, value in after.items() if not key.endswith("_j")}, **energy}


def in_turn(
    blocks: Mapping[str, Callable[[str], Block]],
    *,
    seconds: float,
    pause_s: float = 0.0,
    rounds: int = ROUNDS,
) -> dict[str, dict[str, list[Block]]]:
    """Blocks of every subject in every regime: a round each, in random order, until `seconds` have passed.

    At least `rounds` rounds are made. `pause_s` before each block lets the threads of the last subject rest.
    """
    found: dict[str, dict[str, list[Block]]] = {name: {regime: [] for regime in REGIMES} for name in blocks}
    order, end = random.Random(0), time.perf_counter() + seconds
    done = 0
    while done < rounds or time.perf_counter() < end:
        for regime in REGIMES:
            names = list(blocks)
            order.shuffle(names)
            for name in names:
                time.sleep(pause_s)
                found[name][regime].append(blocks[name](regime))
        done += 1
    return found


def summary(blocks: Sequence[Block]) -> dict[str, Any]:
    """Quantiles of all calls in ms, the medians of the blocks, and the medians of what else was read."""
    measured = Measurement(tuple(s for each in blocks for s in each["seconds"]))
    medians = [round(1e3 * statistics.median(each["seconds"]), 6) for each in blocks]
    keys = dict.fromkeys(key for each in blocks for key in each if key != "seconds")
    others = {key: statistics.median(each[key] for each in blocks if key in each) for key in keys}
    return {
        **measured.to_dict(),
        "blocks_ms": medians,
        **{_in_ms(key): _scaled(key, value) for key, value in others.items()},
    }


def _in_ms(key: str) -> str:
    return f"{key.removesuffix('_s')}_ms" if key.endswith("_s") else key.replace("_j", "_mj")


def _scaled(key: str, value: float) -> float:
    return round(1e3 * value if key.endswith(("_s", "_j")) else value, 6)


def speedup(before: Mapping[str, Any], after: Mapping[str, Any]) -> Gain:
    """How many times faster `after` is by the medians of the blocks of both, taken in the same rounds."""
    return gain(*(Measurement(tuple(each["blocks_ms"])) for each in (before, after)))
