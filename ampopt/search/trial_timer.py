"""Times the candidate of a trial beside the best program so far, on the host's clock and on the device's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ampopt.measure.clocks import device_time, engine_latency, latency, peak_memory
from ampopt.measure.entry import Timing
from ampopt.measure.sampling import Gain, Measurement, Sampler, gain, interleave, joined, tells_soon
from ampopt.search.subject import Subject, rest_s
from ampopt.search.trial import Trial

HOST_SHARE = 0.25
"""Share of a comparison's time for the host's clock, if another clock judges."""

DEVICE_S = 0.15
"""Time in seconds of a comparison on the device clock, whose samples agree within a thousandth."""

ENOUGH = 10
"""Where so many rounds tell plainly which is faster, see `Gain.is_plain`, more samples change no verdict."""

LARGE_GAIN, MORE_ROUNDS = 1.1, 3
"""A gain of 1.1x or more that lies inside the noise is sampled again, at most 3 times."""


class TrialTimer:
    """Compares two programs for about `sample_s` seconds."""

    def __init__(self, sample_s: float) -> None:
        self._sample_s = sample_s

    def time(self, trial: Trial, best: Subject, candidate: Subject, runs: bool, matters: bool) -> Gain:
        """Both clocks for the best so far and for the candidate, sampled in turn.

        `runs`: the candidate is another way to run, which the host's clock judges. `matters`: the gain
        decides, so that a large one inside the noise is sampled again.
        """
        device = candidate.device
        subjects = {"before": best, "after": candidate}
        calls = {name: _sampler(subject, runs) for name, subject in subjects.items()}
        graphs = {name: graph for name, s in subjects.items() if (graph := s.replayed()) is not None}
        replays = {name: device_time(graph.replay, device) for name, graph in graphs.items()}
        judged_on_host = runs or len(replays) < 2
        seconds = self._sample_s if judged_on_host else HOST_SHARE * self._sample_s
        on_host = interleave(calls, seconds=seconds, until=_is_plain)
        on_device: dict[str, Measurement] = interleave(replays, seconds=DEVICE_S) if replays else {}
        if matters and judged_on_host:
            on_host = _for_longer(on_host, calls, seconds, trial.deadline)
        elif matters:
            on_device = _for_longer(on_device, replays, DEVICE_S, trial.deadline)
        judge = on_host if judged_on_host else on_device
        found = gain(judge["before"], judge["after"])
        trial.note(
            before=Timing(on_host["before"], on_device.get("before")),
            after=Timing(on_host["after"], on_device.get("after")),
            gain=found,
            memory=peak_memory(candidate.call, device),
        )
        return found

    def fastest(
        self, trial: Trial, best: Subject, rivals: Sequence[Subject]
    ) -> tuple[Subject, list[Subject]]:
        """The fastest of some programs, on latency, and the rivals of which it stays open.

        It is `best` where no rival is faster outside the noise. They are sampled for longer where it is open
        who is faster.
        """
        subjects = [best, *rivals]
        calls = {f"{place}": _sampler(subject, True) for place, subject in enumerate(subjects)}
        seconds = self._sample_s * len(subjects)
        timed = interleave(calls, seconds=seconds)
        for seed in range(1, 1 + MORE_ROUNDS):
            if time.perf_counter() > trial.deadline or not _still_open(timed):
                break
            more = interleave(calls, seconds=seconds, seed=seed)
            timed = {name: joined(first, more[name]) for name, first in timed.items()}
        place = min(timed, key=lambda name: timed[name].median)
        found = gain(timed["0"], timed[place])
        trial.note(before=Timing(timed["0"]), after=Timing(timed[place]), gain=found)
        left = [subjects[int(name)] for name in _still_open(timed)]
        return (subjects[int(place)], []) if found.is_real else (best, left)


def _for_longer(
    timed: dict[str, Measurement], calls: Mapping[str, Sampler], seconds: float, deadline: float
) -> dict[str, Measurement]:
    """`before` and `after`, sampled again until `deadline` where a large gain lies in the noise.

    The device's clock has noise, too, where a compiler's process or other people's use the same GPU.
    """
    for seed in range(1, 1 + MORE_ROUNDS):
        found = gain(timed["before"], timed["after"])
        if time.perf_counter() > deadline or found.is_real or found.ratio < LARGE_GAIN:
            break
        more = interleave(calls, seconds=seconds, seed=seed)
        timed = {name: joined(first, more[name]) for name, first in timed.items()}
    return timed


def _still_open(timed: Mapping[str, Measurement]) -> list[str]:
    """What may be faster than "0", as far as the samples tell."""
    gains = {name: gain(timed["0"], other) for name, other in timed.items() if name != "0"}
    return [name for name, found in gains.items() if found.is_vague and found.high > 1]


def _is_plain(timed: Mapping[str, Measurement]) -> bool:
    before, after = timed["before"], timed["after"]
    return tells_soon(before, after) or (len(before.samples) >= ENOUGH and gain(before, after).is_plain)


def _sampler(subject: Subject, runs: bool) -> Sampler:
    """A sampler of a program's latency; `runs`: it is compared with another way to run."""
    if not runs:
        return latency(subject.call, subject.device)
    return engine_latency(subject.call, subject.device, rest_s=rest_s(subject.program))
