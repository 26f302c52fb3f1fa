"""The play-off: what lost its trial in noise meets the best once more."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ampopt.measure.entry import Verdict
from ampopt.measure.sampling import Gain
from ampopt.search.lane_search import LaneSearch
from ampopt.search.openings import Opening
from ampopt.search.play_off import MOST_RIVALS, PLAY_OFF, note_rival
from ampopt.search.subject import Subject
from tests.helpers import program_of
from tests.search.test_lane_search import Fast
from tests.support.planted import Bench, Planted

X = torch.ones(2, 4)

KEPT, REVERTED = Verdict.KEPT, Verdict.REVERTED


def at_first_noisy(name: str, samples: int, then: float) -> Callable[[frozenset[str]], float]:
    """A program takes 1 s; one with this pass takes anything for so many samples, and `then` this."""
    noise, count = itertools.cycle((0.1, 9.0, 9.0)), itertools.count()

    def cost(names: frozenset[str]) -> float:
        if name not in names:
            return 1.0
        return next(noise) if next(count) < samples else then

    return cost


def lane_of(bench: Bench, *passes: Planted | Fast, monkeypatch: pytest.MonkeyPatch) -> LaneSearch:
    monkeypatch.setattr("ampopt.search.lane_search.opening_of", lambda *_: Opening(()))
    return bench.search(*passes)


def rows(bench: Bench) -> list[tuple[str, Verdict]]:
    return [(entry.name, entry.verdict) for entry in bench.ledger.entries]


def test_a_rewrite_that_lost_in_noise_is_the_best_after_the_play_off(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, nn.Linear(4, 4), X, cost=at_first_noisy("good", 7, 0.5))
    lane = lane_of(bench, Planted("good"), monkeypatch=monkeypatch)
    lane.rewrite(bench.deadline)
    assert rows(bench) == [("good", REVERTED)]
    lane.engines.run(bench.deadline)
    assert rows(bench) == [("good", REVERTED), (PLAY_OFF, KEPT)]
    assert bench.kept == ["good"]
    assert bench.state.best_s == 0.5
    assert (
        "it had lost in noise, and is faster: 2.000x (2.000 to 2.000): good"
        in bench.ledger.entries[-1].reason
    )
    assert bench.ledger.best_so_far[-1].name == PLAY_OFF
    assert bench.state.rivals == []


def test_what_is_not_faster_in_calm_either_does_not_replace_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, nn.Linear(4, 4), X, cost=at_first_noisy("bad", 7, 2.0))
    lane = lane_of(bench, Planted("bad"), monkeypatch=monkeypatch)
    lane.rewrite(bench.deadline)
    lane.engines.run(bench.deadline)
    assert rows(bench) == [("bad", REVERTED), (PLAY_OFF, REVERTED)]
    assert bench.kept == []


def test_on_a_quiet_machine_there_is_no_play_off(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, nn.Linear(4, 4), X, cost={"good": 0.5, "bad": 2.0, "same": 1.0})
    lane = lane_of(bench, *(Planted(name) for name in ("good", "bad", "same")), monkeypatch=monkeypatch)
    lane.rewrite(bench.deadline)
    lane.engines.run(bench.deadline)
    assert rows(bench) == [("good", KEPT), ("bad", REVERTED), ("same", REVERTED)]


def test_an_engine_whose_trial_was_noise_is_tuned_and_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has measured to choose its options was noise, too."""
    bench = Bench(monkeypatch, nn.Linear(4, 4), X, cost=at_first_noisy("fast", 7, 0.5))
    lane = lane_of(bench, Fast(), monkeypatch=monkeypatch)
    lane.engines.run(bench.deadline)
    assert rows(bench)[:2] == [("fast", REVERTED), ("fast, again", KEPT)]
    assert bench.kept == ["fast"]


def test_it_is_not_tried_a_third_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, nn.Linear(4, 4), X, cost=at_first_noisy("fast", 10_000, 0.5))
    lane = lane_of(bench, Fast(), monkeypatch=monkeypatch)
    lane.engines.run(bench.deadline)
    names = [name for name, _ in rows(bench)]
    assert names == ["fast", "fast, again", PLAY_OFF]
    assert bench.state.rivals  # another play-off may come, on a quieter machine


def gain(low: float, high: float) -> Gain:
    return Gain((low + high) / 2, low, high)


@pytest.mark.parametrize(
    ("found", "kept", "loser"),
    [
        (gain(0.9, 4.9), False, "candidate"),
        (gain(1.01, 3.0), True, "before"),
        (gain(9.2, 15.0), True, None),  # vague, and sure all the same
        (gain(0.2, 0.6), False, None),
        (gain(0.95, 1.2), False, None),  # told well enough
        (gain(1.01, 1.2), True, None),
    ],
)
def test_who_is_a_rival(found: Gain, kept: bool, loser: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, nn.Linear(4, 4), X, cost={})
    subjects = {name: Subject(program_of(nn.ReLU(), X)) for name in ("before", "candidate")}
    for _ in range(2):
        note_rival(bench.state, subjects["before"], subjects["candidate"], found, kept=kept)
    assert bench.state.rivals == ([subjects[loser]] if loser else [])


def test_only_the_latest_rivals_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, nn.Linear(4, 4), X, cost={})
    subjects = [Subject(program_of(nn.ReLU(), X)) for _ in range(MOST_RIVALS + 2)]
    for subject in subjects:
        note_rival(bench.state, bench.state.best, subject, gain(0.9, 4.9), kept=False)
    assert bench.state.rivals == subjects[2:]
