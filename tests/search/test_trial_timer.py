"""The times of a trial: which clock judges, when an engine rests first, when noise is sampled again."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.measure.clocks import REST_S
from ampopt.measure.entry import Entry, Verdict
from ampopt.measure.sampling import Measurement
from ampopt.search import trial_timer
from ampopt.search.subject import Subject, rest_s
from ampopt.search.trial import Trial
from ampopt.search.trial_timer import ENOUGH, MORE_ROUNDS, TrialTimer
from tests.helpers import program_of

X = torch.ones(1, 3)


class Engine:
    """An engine with threads of its own, as far as anybody can tell."""

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)


@pytest.fixture
def subject() -> Subject:
    return Subject(program_of(nn.ReLU(), X))


@pytest.fixture
def in_an_engine(subject: Subject) -> Subject:
    return Subject(subject.program.replace(engine=Engine()))


def trial(deadline: float = float("inf")) -> Trial:
    return Trial(Entry("fp32", "it", Verdict.NOT_TRIED, ""), deadline)


def test_an_engine_on_a_cpu_rests_before_it_is_timed_and_a_graph_does_not(
    subject: Subject, in_an_engine: Subject
) -> None:
    assert rest_s(subject.program) == 0
    assert rest_s(in_an_engine.program) == REST_S
    on_a_gpu: Any = dataclasses.make_dataclass("_", ["engine", "device"])(Engine(), torch.device("cuda"))
    assert rest_s(on_a_gpu) == 0


@pytest.mark.parametrize("runs", [True, False])
def test_only_another_way_to_run_is_timed_after_a_rest(
    runs: bool, subject: Subject, in_an_engine: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("ampopt.measure.sampling.time.sleep", slept.append)
    TrialTimer(0.0).time(trial(), subject, in_an_engine, runs, False)
    assert set(slept) == ({REST_S} if runs else set())


def looks(monkeypatch: pytest.MonkeyPatch, after: tuple[float, ...]) -> list[int]:
    """Count how often programs are sampled; `before` takes 1 s, and `after` these."""
    count: list[int] = []

    def interleave(samplers: Mapping[str, Any], **_: object) -> dict[str, Measurement]:
        count.append(len(samplers))
        return {"before": Measurement((1.0,) * len(after)), "after": Measurement(after)}

    monkeypatch.setattr(trial_timer, "interleave", interleave)
    return count


NOISY, CLEAR, SMALL = (0.1, 0.5, 0.5, 0.5, 2.0, 9.0), (0.5,) * 6, (0.99, 0.99, 0.99, 0.99, 1.1, 1.2)


@pytest.mark.parametrize(
    ("after", "matters", "deadline", "times"),
    [
        (NOISY, True, float("inf"), 1 + MORE_ROUNDS),
        (NOISY, False, float("inf"), 1),
        (NOISY, True, 0.0, 1),
        (CLEAR, True, float("inf"), 1),
        (SMALL, True, float("inf"), 1),
    ],
    ids=["a large gain in the noise", "it decides nothing", "no time", "outside the noise", "a small gain"],
)
def test_a_large_gain_in_the_noise_is_sampled_again_while_it_decides_and_there_is_time(
    after: tuple[float, ...],
    matters: bool,
    deadline: float,
    times: int,
    subject: Subject,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = looks(monkeypatch, after)
    TrialTimer(0.0).time(trial(deadline), subject, subject, True, matters)
    assert len(count) == times

    graph = types.SimpleNamespace(replay=lambda: None)  # the device's clock judges what has one
    monkeypatch.setattr(Subject, "replayed", lambda _: graph)
    monkeypatch.setattr(trial_timer, "device_time", lambda replay, _: replay)
    del count[:]
    TrialTimer(0.0).time(trial(deadline), subject, subject, False, matters)
    assert len(count) == 1 + times


@pytest.mark.parametrize(
    ("after_s", "is_plain"),
    [(0.5, True), (0.79, True), (0.81, False), (1.0, False), (1.2, False), (2.0, True)],
)
def test_what_a_few_samples_leave_no_doubt_of_is_not_sampled_on(
    after_s: float, is_plain: bool, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {id(subject): 0.1}
    monkeypatch.setattr(trial_timer, "_sampler", lambda each, _: lambda: times.get(id(each), 0.1 * after_s))
    done = trial()
    TrialTimer(0.05).time(done, subject, Subject(subject.program), True, True)
    assert done.entry.before is not None
    rounds = len(done.entry.before.latency.samples)
    assert rounds >= ENOUGH
    assert (rounds < 2 * ENOUGH) == is_plain


@pytest.mark.parametrize(("after_s", "rounds"), [(0.7, 3), (0.9, 6), (1.0, 6), (1.1, 6), (1.3, 3)])
def test_costly_calls_are_sampled_until_it_is_plain_who_is_faster(
    after_s: float, rounds: int, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {id(subject): 1.0}
    monkeypatch.setattr(trial_timer, "_sampler", lambda each, _: lambda: times.get(id(each), after_s))
    done = trial()
    TrialTimer(0.0).time(done, subject, Subject(subject.program), True, True)
    assert done.entry.before is not None
    assert len(done.entry.before.latency.samples) == rounds
