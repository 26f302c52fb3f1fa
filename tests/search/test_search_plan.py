"""The search over lanes: which are searched to the end, and what is said of the rest."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.numerics import Check
from ampopt.ir.pipeline import Pipeline
from ampopt.ir.transform import Pass
from ampopt.measure.entry import Verdict
from ampopt.measure.original import Run
from ampopt.measure.sampling import Measurement
from ampopt.measure.verify import Verifier
from ampopt.passes import BakeAutocast, KeepFp32
from ampopt.search.lane_search import LaneSearch
from ampopt.search.lane_state import LaneState
from ampopt.search.openings import Opening
from ampopt.search.pass_manager import PassManager
from ampopt.search.search_plan import Search
from ampopt.system.budget import Budget
from tests.helpers import BF16, Model
from tests.search.test_lane_search import Launch
from tests.support.planted import Bench, Compiler, Planted

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def found(
    monkeypatch: pytest.MonkeyPatch,
    pipeline: Pipeline,
    *,
    after_openings: dict[str, float],
    seconds_left: float = 1e6,
    bound: float | None = None,
    cost: Callable[[frozenset[str]], float] = lambda names: 1.0,
    begun: dict[str, tuple[Pass, ...]] | None = None,
    rival: Callable[[], object] | None = None,
) -> tuple[Bench, Search]:
    """The search of an FP32 and a bfloat16 lane, which take so long after their openings.

    With a `rival`, of the bfloat16 lane alone.
    """
    bench = Bench(monkeypatch, nn.Linear(4, 4).eval(), X, cost=cost, seconds_left=seconds_left)
    monkeypatch.setattr(
        "ampopt.search.search_plan.interleave",
        lambda calls, **_: {name: Measurement((after_openings[name],)) for name in calls},
    )
    budget = Budget(time.perf_counter(), seconds_left)
    search = Search(bench.manager, bench.verifier, bench.ledger, pipeline, budget, bound, rival)
    search.run({FP32: 1e-3, BF16: 1e-3} if rival is None else {BF16: 1e-3}, begun or {})
    return bench, search


def lanes_of(bench: Bench, name: str) -> set[str]:
    return {entry.lane for entry in bench.ledger.entries if entry.name == name}


PLANTED = Pipeline((Planted("one"),))


def test_a_lane_that_is_far_behind_is_not_searched_further(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = found(monkeypatch, PLANTED, after_openings={"fp32": 2.0, "amp": 1.0})
    assert lanes_of(bench, "one") == {"amp"}
    (note,) = bench.ledger.notes
    assert note == (
        "the fp32 lane was searched no further than its opening: after its opening it was 2.00x slower than "
        "another (precision='fp32' searches it)"
    )


@pytest.mark.parametrize(("took", "searched"), [(2.0, set[str]()), (1.2, {"amp"}), (0.5, {"amp"})])
def test_a_lane_alone_that_is_far_behind_its_rival_is_not_searched_further(
    took: float, searched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    after = {"amp": took, "rival": 1.0}
    bench, _ = found(monkeypatch, PLANTED, after_openings=after, rival=lambda: None)
    assert lanes_of(bench, "one") == searched
    assert len(bench.ledger.notes) == 1 - len(searched)


@pytest.mark.parametrize(("behind", "searched"), [(2.0, {"fp32", "amp"}), (2.5, {"amp"})])
def test_a_lane_whose_engine_was_hurried_may_be_farther_behind(
    behind: float, searched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried = property(lambda engines: engines.state.lane.name == "fp32")
    monkeypatch.setattr("ampopt.search.lane_engines.LaneEngines.is_hurried", hurried)
    bench, _ = found(monkeypatch, PLANTED, after_openings={"fp32": behind, "amp": 1.0})
    assert lanes_of(bench, "one") == searched


def test_a_lane_that_there_was_no_time_to_launch_is_searched_however_slow_it_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LaneSearch, "is_launched", property(lambda search: search.name == "fp32"))
    bench, _ = found(monkeypatch, PLANTED, after_openings={"fp32": 1.0, "amp": 10.0})
    assert lanes_of(bench, "one") == {"fp32", "amp"}


@pytest.mark.parametrize(
    ("bound", "verdict"), [(0.005, Verdict.REVERTED), (0.02, Verdict.KEPT), (None, Verdict.KEPT)]
)
def test_what_takes_a_lane_over_the_error_with_which_it_may_be_chosen_is_reverted(
    bound: float | None, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Pipeline((Planted("rounds", factor=1.006),))
    after = {"fp32": 1.0, "amp": 1.0}
    bench, _ = found(
        monkeypatch, rounds, after_openings=after, bound=bound, cost=lambda names: 0.5 ** len(names)
    )
    (row,) = [entry for entry in bench.ledger.entries if entry.name == "rounds" and entry.lane == "amp"]
    assert row.verdict is verdict
    assert ("over the tolerance 0.005" in row.reason) == (bound == 0.005)


def test_lanes_that_are_close_are_all_searched_the_faster_first(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = found(monkeypatch, PLANTED, after_openings={"fp32": 1.2, "amp": 1.0})
    assert [entry.lane for entry in bench.ledger.entries if entry.name == "one"] == ["amp", "fp32"]
    assert bench.ledger.notes == []


def test_a_lane_of_lower_precision_that_is_behind_gets_no_advice_that_does_not_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, _ = found(monkeypatch, PLANTED, after_openings={"fp32": 1.0, "amp": 2.0})
    assert lanes_of(bench, "one") == {"fp32"}
    assert bench.ledger.notes == [
        "the amp lane was searched no further than its opening: after its opening it was 2.00x slower "
        "than another"
    ]


def test_a_lane_that_is_too_inexact_is_not_searched_further_however_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, _ = found(monkeypatch, PLANTED, after_openings={"fp32": 2.0, "amp": 1.0}, bound=1e-9)
    assert lanes_of(bench, "one") == {"fp32"}
    assert "eager's own error in it is" in bench.ledger.notes[0]


def test_a_lane_that_begins_within_the_bound_is_searched_though_eager_s_own_jump_is_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ampopt.measure.verify.Verifier.own_error", lambda self, lane: 0.21)
    bench, search = found(monkeypatch, PLANTED, after_openings={"fp32": 2.0, "amp": 1.0}, bound=0.2)
    assert lanes_of(bench, "one") == {"amp"}
    (amp,) = [state for state in search.states if state.lane is BF16]
    assert 0 < amp.least_error <= amp.bound == 0.2


@pytest.mark.parametrize(
    ("called", "passes", "first"),
    [
        (0.15, (KeepFp32(), Planted("one")), "amp"),
        (0.19, (KeepFp32(), Planted("one")), "fp32"),
        (0.15, (Planted("one"),), "fp32"),
        (None, (KeepFp32(), Planted("one")), "fp32"),
    ],
)
def test_a_lane_that_tf32_may_make_right_is_opened_first(
    called: float | None, passes: tuple[Pass, ...], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verifier, "own_error", lambda self, lane: 0.21)
    monkeypatch.setattr(Verifier, "called_error", called)
    bench = Bench(monkeypatch, nn.Linear(4, 4).eval(), X, cost=lambda names: 1.0)
    monkeypatch.setattr(
        bench.manager, "sandbox", SimpleNamespace(works_beside=True, begin=print, give_up=print)
    )
    pipeline = Pipeline(passes)
    search = Search(bench.manager, bench.verifier, bench.ledger, pipeline, Budget(0.0, 1e6), 0.2)

    class BegunError(Exception):
        """Tells of the first lane."""

    def begin(manager: PassManager, state: LaneState, *_: object) -> bool:
        raise BegunError(state.lane.name)

    monkeypatch.setattr("ampopt.search.search_plan.rescued", begin)
    with pytest.raises(BegunError, match=first):
        search.run({FP32: 1e-3, BF16: 1e-3}, {})


def test_a_lane_that_a_pass_brings_within_the_bound_is_searched_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FCOS in float16: eager, and the lane's first program, are just over 0.2, and folded it is 0.19."""
    errors = iter([0.21])
    check, opened = Verifier.check_errors, LaneSearch.open

    def over_at_first(verifier: Verifier, run: Run, lane: Lane, *, everywhere: bool = False) -> Check:
        found = check(verifier, run, lane, everywhere=everywhere)
        return dataclasses.replace(found, error=next(errors, found.error)) if lane is BF16 else found

    def opens(search: LaneSearch, deadline: float, *, with_engine: bool = True) -> None:
        search.rewrite(deadline)
        opened(search, deadline, with_engine=with_engine)

    monkeypatch.setattr(Verifier, "own_error", lambda self, lane: 0.21)
    monkeypatch.setattr(Verifier, "check_errors", over_at_first)
    monkeypatch.setattr(LaneSearch, "open", opens)
    bench, _ = found(monkeypatch, PLANTED, after_openings={"fp32": 2.0, "amp": 1.0}, bound=0.2)
    (note,) = bench.ledger.notes
    assert note.startswith("the fp32 lane was searched no further than its opening")


def test_a_single_lane_is_searched_whatever_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, nn.Linear(4, 4).eval(), X, cost=lambda names: 1.0)
    budget = Budget(time.perf_counter(), 1e6)
    search = Search(bench.manager, bench.verifier, bench.ledger, PLANTED, budget, 1e-9)
    search.run({BF16: 1e-3}, {})
    assert lanes_of(bench, "one") == {"amp"}


def test_what_was_cut_off_is_told_with_the_budget_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline((Planted("long", seconds=500.0), Planted("longer", seconds=900.0), Planted("short")))
    bench, search = found(monkeypatch, pipeline, after_openings={"fp32": 2.0, "amp": 1.0}, seconds_left=100.0)
    assert not search.note_what_was_cut_off()
    assert bench.ledger.notes[-1].startswith(
        "2 passes were not tried for want of time: budget_s=1700 would do"
    )


def test_the_budget_that_is_told_is_larger_than_the_one_that_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lane's share of the time may be over long before all of it is."""
    pipeline = Pipeline((Planted("long", seconds=70.0),))
    bench, search = found(monkeypatch, pipeline, after_openings={"fp32": 1.2, "amp": 1.0}, seconds_left=100.0)
    assert not search.note_what_was_cut_off()
    assert "long was not tried for want of time: budget_s=180 would do" in bench.ledger.notes[-1]


@pytest.mark.parametrize(("bound", "engines"), [(None, ["amp", "fp32"]), (1e-9, ["fp32"])])
def test_a_lane_that_may_not_be_chosen_gets_no_engine(
    monkeypatch: pytest.MonkeyPatch, bound: float | None, engines: list[str]
) -> None:
    monkeypatch.setattr("ampopt.search.lane_search.opening_of", lambda *_: Opening(("one",), "compiler"))
    pipeline = Pipeline((Planted("one"),), (Compiler(),))
    bench, _ = found(monkeypatch, pipeline, after_openings={"fp32": 1.0, "amp": 1.0}, bound=bound)
    assert sorted(entry.lane for entry in bench.ledger.entries if entry.name == "compiler") == engines


def test_where_no_lane_may_be_chosen_all_get_their_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.search.lane_search.opening_of", lambda *_: Opening(("one",), "compiler"))
    bench = Bench(monkeypatch, nn.Linear(4, 4).eval(), X, cost=lambda names: 0.9 ** len(names))
    pipeline, budget = Pipeline((Planted("one"),), (Compiler(),)), Budget(time.perf_counter(), 1e6)
    search = Search(bench.manager, bench.verifier, bench.ledger, pipeline, budget, 1e-9)
    search.run({BF16: 1e-3}, {})
    assert lanes_of(bench, "compiler") == {"amp"}


def test_where_nothing_was_cut_off_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, search = found(monkeypatch, PLANTED, after_openings={"fp32": 1.0, "amp": 1.0})
    assert search.note_what_was_cut_off()
    assert bench.ledger.notes == []


def test_a_search_goes_on_from_where_an_earlier_one_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: dict[str, tuple[Pass, ...]] = {"fp32": (Planted("one"),)}
    pipeline = Pipeline((Planted("one"), Planted("two")))
    bench, search = found(monkeypatch, pipeline, after_openings={"fp32": 1.0, "amp": 9.0}, begun=begun)
    assert [(e.lane, e.name) for e in bench.ledger.entries] == [
        ("fp32", "tuned before"),
        ("fp32", "two"),
        ("fp32", "two (again)"),
    ]
    assert [step.name for step in search.states[0].best.program.recipe] == ["one"]


def test_the_states_are_there_while_the_search_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Stops(Planted):
        def apply(self, program: Any) -> Any:
            raise KeyboardInterrupt

    bench = Bench(monkeypatch, nn.Linear(4, 4).eval(), X, cost=lambda names: 1.0)
    budget = Budget(time.perf_counter(), 1e6)
    search = Search(bench.manager, bench.verifier, bench.ledger, Pipeline((Stops("x"),)), budget, None)
    seen = search.states
    with pytest.raises(KeyboardInterrupt):
        search.run({FP32: 1e-3}, {})
    assert [state.lane for state in seen] == [FP32]


def test_the_best_so_far_is_against_the_searchs_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = found(
        monkeypatch,
        PLANTED,
        after_openings={"fp32": 1.0, "amp": 1.0},
        cost=lambda names: 0.5 if "one" in names else 1.0,
    )
    steps = bench.ledger.steps_to_best()
    assert [(step.lane, step.name, step.latency_s) for step in steps] == [("fp32", "one", 0.5)]
    assert 0 < steps[0].at_s < 600
    (row,) = bench.ledger.to_dict()["best_so_far"]
    assert (row["lane"], row["pass"], row["ms"]) == ("fp32", "one", 500.0)


def test_a_lane_that_has_fallen_far_behind_is_not_searched_after_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Search, "_behind", lambda search, state: 3.0)
    bench, _ = found(monkeypatch, PLANTED, after_openings={"fp32": 1.2, "amp": 1.0})
    assert lanes_of(bench, "one") == {"amp"}
    assert "it was 3.00x slower than what was found until then" in bench.ledger.notes[0]


def test_how_far_a_lane_is_behind_is_known_from_its_own_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    _, search = found(monkeypatch, PLANTED, after_openings={"fp32": 1.0, "amp": 1.0})
    slow, fast = search.states
    slow.best_s, fast.best_s = 0.9, 0.3
    assert search._behind(slow) == pytest.approx(3.0)
    assert search._behind(fast) == 1.0


def too_inexact(
    monkeypatch: pytest.MonkeyPatch, cost: Callable[[frozenset[str]], float], launches: tuple[Pass, ...] = ()
) -> tuple[Bench, Search, float]:
    """A search in which eager itself is within the bound, and casts and another pass together are not."""
    layers = [nn.Linear(32, 32) for _ in range(8)]
    model = Model(lambda m, x: m.net(x).float(), net=nn.Sequential(*layers)).eval()
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    bench = Bench(monkeypatch, model, x, cost=cost, seconds_left=1e6)
    own = bench.verifier.own_error(BF16)
    rounds = Planted("fold-constants", factor=1 + 0.36 * own)
    pipeline = Pipeline((rounds, BakeAutocast(), KeepFp32()), (), launches)
    budget, bound = Budget(time.perf_counter(), 1e6), 1.0001 * own
    search = Search(bench.manager, bench.verifier, bench.ledger, pipeline, budget, bound)
    search.run({BF16: 1e-3}, {})
    return bench, search, bound


def test_a_lane_to_which_the_opening_is_too_inexact_starts_anew_with_operators_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, search, bound = too_inexact(monkeypatch, lambda names: 0.9 ** len(names))
    (state,) = search.states
    names = [step.name for step in state.best.program.recipe]
    assert names[0] == "keep-fp32"
    assert "fold-constants" in names
    check = bench.verifier.check(state.best.run, BF16)
    assert check.passed
    assert check.error <= bound
    (note,) = bench.ledger.notes
    assert "the amp lane is right with" in note


def test_where_that_is_slower_the_lane_goes_on_with_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(names: frozenset[str]) -> float:
        return (9.0 if "keep-fp32" in names else 1.0) * (0.5 if "launch" in names else 1.0)

    bench, search, _ = too_inexact(monkeypatch, cost, (Launch(),))
    (state,) = search.states
    assert [step.name for step in state.best.program.recipe] == ["launch"]
    assert bench.ledger.notes == []


def test_the_second_opening_ends_with_the_time_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[float]()
    own_open = LaneSearch.open

    def spy(search: LaneSearch, deadline: float, *, with_engine: bool = True) -> None:
        seen.append(deadline)
        own_open(search, deadline, with_engine=with_engine)

    monkeypatch.setattr(LaneSearch, "open", spy)
    bench, _, _ = too_inexact(monkeypatch, lambda names: 0.9 ** len(names))
    assert len(seen) == 2
    assert max(seen) <= bench.manager.deadline
