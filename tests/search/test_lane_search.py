"""The order of trials in one lane: the opening, rewrites in their places, variations, ways to run."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from torch import nn

from ampopt.ir.pipeline import Pipeline
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Family, Numerics, Pass, Result
from ampopt.measure.entry import Verdict
from ampopt.search.lane_search import OPENING, PLAIN_OPENING, LaneSearch
from ampopt.search.openings import UNLIKELY, Opening
from tests.support.planted import Bench, Planted, PlantedFoundation, PlantedKernel

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
KEPT, REVERTED, DECLINED, NOT_TRIED = Verdict.KEPT, Verdict.REVERTED, Verdict.DECLINED, Verdict.NOT_TRIED
Rows = list[tuple[str, Verdict]]


@pytest.fixture
def net() -> nn.Module:
    return nn.Linear(4, 4).eval()


@dataclasses.dataclass(frozen=True)
class Launch(Pass):
    """A launch that can be told apart by its mark on the settings."""

    numerics = Numerics.REASSOCIATED
    family = Family.LAUNCH
    portable = False

    def apply(self, program: Program) -> Result:
        return Result(program.replace(settings=dataclasses.replace(program.settings, tf32=True)), 1)


@dataclasses.dataclass(frozen=True)
class Fast(Engine):
    """An engine that cannot see into kernels."""

    def why_not(self, program: Program) -> str | None:
        kernels = any(step.family is Family.KERNEL for step in program.recipe)
        return "it cannot see into kernels" if kernels else None

    def apply(self, program: Program) -> Result:
        return Result(program.replace(engine=program.graph), 1)


@dataclasses.dataclass(frozen=True)
class Idle(Planted):
    """Finds nothing to rewrite."""

    def apply(self, program: Program) -> Result:
        return Result(program, 0)


@dataclasses.dataclass(frozen=True)
class PlantedLayout(Planted):
    """A placement, which may be left out again."""

    family = Family.PLACEMENT


def search(
    monkeypatch: pytest.MonkeyPatch,
    bench: Bench,
    pipeline: Pipeline,
    opening: Opening,
    patience: float = float("inf"),
) -> LaneSearch:
    monkeypatch.setattr("ampopt.search.lane_search.opening_of", lambda *_: opening)
    return LaneSearch(bench.manager, bench.state, pipeline, patience)


def rows(bench: Bench) -> Rows:
    return [(entry.name, entry.verdict) for entry in bench.ledger.entries]


def test_an_opening_is_one_trial_and_a_row_for_each_of_its_passes(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"one": 0.8, "two": 0.8})
    passes = (Planted("one"), Idle("idle"), Planted("two"), Planted("other"))
    lane = search(monkeypatch, bench, Pipeline(passes), Opening(("one", "idle", "two")))
    lane.open(bench.deadline)
    assert rows(bench) == [(OPENING, KEPT), ("one", KEPT), ("idle", DECLINED), ("two", KEPT)]
    assert bench.kept == ["one", "two"]
    whole, one = bench.ledger.entries[:2]
    assert whole.gain is not None
    assert whole.gain.ratio == pytest.approx(1 / 0.64)
    assert one.reason == f"part of {OPENING}, which is timed as a whole"
    lane.rewrite(bench.deadline)
    assert [name for name, _ in rows(bench)[4:]] == ["other"]


@pytest.mark.parametrize("bad", [Planted("bad", factor=2.0), Planted("bad", error=ValueError("no"))])
def test_where_an_opening_is_wrong_each_of_its_passes_is_tried_by_itself(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, bad: Planted
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"one": 0.8, "bad": 0.1})
    lane = search(monkeypatch, bench, Pipeline((Planted("one"), bad)), Opening(("one", "bad")))
    lane.open(bench.deadline)
    assert bench.kept == []
    lane.rewrite(bench.deadline)
    assert bench.kept == ["one"]
    assert [name for name, _ in rows(bench)] == [OPENING, PLAIN_OPENING, "one", "bad"]
    assert bench.ledger.entries[0].verdict is not KEPT


def test_where_an_opening_is_slower_it_is_tried_without_layouts_and_kernels(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"one": 0.9, "two": 0.9, "layout": 9.0, "kernel": 0.5})
    passes = (Planted("one"), PlantedLayout("layout"), Planted("two"), PlantedKernel("kernel"))
    lane = search(monkeypatch, bench, Pipeline(passes), Opening(("one", "layout", "two", "kernel")))
    lane.open(bench.deadline)
    assert rows(bench)[:2] == [(OPENING, REVERTED), (PLAIN_OPENING, KEPT)]
    assert bench.kept == ["one", "two"]
    lane.rewrite(bench.deadline)
    assert bench.kept == ["one", "two", "kernel"]


@pytest.mark.parametrize(
    ("other", "verdict", "kept"),
    [
        (PlantedFoundation("two"), KEPT, ["one", "two"]),
        (Planted("two"), REVERTED, []),
        (PlantedFoundation("far too slow"), REVERTED, []),
    ],
)
def test_exact_passes_that_others_build_on_are_kept_together_where_they_gain_nothing(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, other: Planted, verdict: Verdict, kept: list[str]
) -> None:
    """As each of them is by itself: an engine may need constants folded."""
    bench = Bench(monkeypatch, net, X, cost={"layout": 9.0, "far too slow": 2.0})
    passes = (PlantedFoundation("one"), PlantedLayout("layout"), other)
    lane = search(monkeypatch, bench, Pipeline(passes), Opening(("one", "layout", other.name)))
    lane.open(bench.deadline)
    assert rows(bench)[:2] == [(OPENING, REVERTED), (PLAIN_OPENING, verdict)]
    assert bench.kept == kept


def test_an_opening_that_there_was_no_time_for_is_not_tried_without_layouts_either(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"one": 0.9, "two": 0.9})
    passes = (Planted("one"), Planted("two"))
    lane = search(monkeypatch, bench, Pipeline(passes), Opening(("one", "two")))
    lane.open(-1.0)
    assert rows(bench) == [(OPENING, NOT_TRIED)]


HELPED = f"{OPENING} with helper"
PLAIN = [(OPENING, REVERTED), (PLAIN_OPENING, KEPT), ("one", KEPT), ("two", KEPT)]


@pytest.mark.parametrize(
    ("factor", "cost", "expected"),
    [
        (1.0, 0.1, [*PLAIN, (HELPED, KEPT), ("layout", KEPT), ("helper", KEPT)]),
        (1.0, 0.5, [*PLAIN, (HELPED, REVERTED)]),
        (2.0, 0.1, [*PLAIN]),
        (float("inf"), 0.1, [*PLAIN, (HELPED, REVERTED)]),
    ],
    ids=["faster with it", "slower all the same", "inexact", "wrong by infinities"],
)
def test_where_an_opening_is_exact_enough_and_loses_it_is_tried_with_its_helper(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, factor: float, cost: float, expected: Rows
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"one": 0.9, "two": 0.9, "layout": 5.0, "helper": cost})
    passes = (Planted("one"), PlantedLayout("layout", factor=factor), PlantedLayout("helper"), Planted("two"))
    opening = Opening(("one", "layout", "two"), helpers=("helper",))
    lane = search(monkeypatch, bench, Pipeline(passes), opening)
    lane.open(bench.deadline)
    assert rows(bench) == expected


def test_helpers_are_tried_one_after_another_until_one_helps(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    """The second may spoil what the first would have made a gain, and the first is cheap."""
    bench = Bench(monkeypatch, net, X, cost={"one": 0.9, "layout": 5.0, "cheap": 0.9, "dear": 0.1})
    passes = (Planted("one"), PlantedLayout("layout"), *map(PlantedLayout, ("cheap", "dear", "unused")))
    opening = Opening(("one", "layout"), helpers=("absent", "cheap", "dear", "unused"))
    lane = search(monkeypatch, bench, Pipeline(passes), opening)
    lane.open(bench.deadline)
    tried = [(name, verdict) for name, verdict in rows(bench) if name.startswith(OPENING)]
    assert (f"{OPENING} with cheap", REVERTED) in tried
    assert tried[-1] == (f"{OPENING} with dear", KEPT)


def test_a_helper_that_takes_too_long_for_an_opening_waits_for_its_turn(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(
        monkeypatch, net, X, cost={"one": 0.9, "two": 0.9, "layout": 5.0, "helper": 0.1}, seconds_left=1000.0
    )
    helper = PlantedLayout("helper", seconds=100.0)
    passes = (Planted("one"), PlantedLayout("layout"), helper, Planted("two"))
    opening = Opening(("one", "layout", "two"), helpers=("helper",))
    lane = search(monkeypatch, bench, Pipeline(passes), opening)
    lane.open(time.perf_counter() + 50.0)
    assert rows(bench) == PLAIN
    lane.rewrite(bench.deadline)
    assert bench.kept == ["one", "helper", "two"]


def test_a_launch_that_there_was_no_time_for_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"launch": 0.5})
    lane = search(monkeypatch, bench, Pipeline((), (), (Launch(),)), Opening(()))
    lane.launch(time.perf_counter() - 1.0)
    assert (rows(bench), lane.is_launched) == ([("launch", NOT_TRIED)], False)
    for _ in range(2):
        lane.launch(bench.deadline)
    assert (rows(bench), lane.is_launched) == ([("launch", KEPT)], True)  # in one row


def test_a_launch_is_tried_after_the_time_for_openings_is_over(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"launch": 0.5})
    lane = search(monkeypatch, bench, Pipeline((Planted("one"),), (), (Launch(),)), Opening(("one",)))
    lane.open(time.perf_counter() - 1.0)
    assert rows(bench) == [("launch", KEPT)]


def test_a_rewrite_is_applied_in_its_own_place(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    bench = Bench(monkeypatch, net, X, cost={"first": 0.9, "middle": 0.9, "last": 0.9})
    passes = (Planted("first"), Planted("middle"), Planted("last"))
    lane = search(monkeypatch, bench, Pipeline(passes), Opening(("first", "last")))
    lane.open(bench.deadline)
    lane.rewrite(bench.deadline)
    assert bench.kept == ["first", "middle", "last"]


def test_a_pass_of_the_opening_that_does_not_help_in_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"good": 0.5, "layout": 1.2})
    passes = (PlantedLayout("layout"), Planted("good"))
    lane = search(monkeypatch, bench, Pipeline(passes), Opening(("layout", "good")))
    lane.open(bench.deadline)
    assert bench.kept == ["layout", "good"]
    lane.vary(bench.deadline)
    assert rows(bench)[-1] == ("without layout", KEPT)
    assert bench.kept == ["good"]


def test_the_unlikely_is_left_out_with_the_reason_once_the_patience_for_it_is_over(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={})
    pipeline = Pipeline((Planted("late"), Planted("usual")), (Fast(),))
    opening = Opening((), None, ("late", "fast"))
    lane = search(monkeypatch, bench, pipeline, opening, patience=time.perf_counter() - 1)
    lane.rewrite(bench.deadline)
    lane.engines.run(bench.deadline)
    assert rows(bench) == [("usual", REVERTED), ("late", NOT_TRIED), ("fast", NOT_TRIED)]
    left = [entry for entry in bench.ledger.entries if entry.verdict is NOT_TRIED]
    assert {(entry.reason, entry.needs_s) for entry in left} == {(UNLIKELY, None)}


def test_nothing_unlikely_is_begun_when_something_likelier_is_ready(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"slow": 1.1})
    lane = search(
        monkeypatch, bench, Pipeline((Planted("slow"), Planted("late"))), Opening((), None, ("late",))
    )
    lane.rewrite(bench.deadline, until=lambda _: True)
    lane.vary(bench.deadline, until=lambda _: True)
    assert rows(bench) == [("slow", REVERTED), ("late", NOT_TRIED)]


def test_the_graph_is_launched_again_only_where_it_has_changed(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"good": 0.5, "launch": 0.9})
    lane = search(monkeypatch, bench, Pipeline((Planted("good"),), (), (Launch(),)), Opening(()))
    lane.open(bench.deadline)
    lane.launch(bench.deadline)
    assert rows(bench) == [("launch", KEPT)]
    lane.rewrite(bench.deadline)
    assert bench.kept == ["launch"]  # what would be served now
    lane.launch(bench.deadline)
    assert rows(bench) == [("launch", KEPT), ("good", KEPT), ("launch", KEPT)]
    assert bench.kept == ["good", "launch"]


def test_a_graph_that_has_become_faster_than_an_engine_is_served(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"fast": 0.8, "kernel": 0.5})
    pipeline = Pipeline((PlantedKernel("kernel"),), (Fast(),))
    lane = search(monkeypatch, bench, pipeline, Opening((), "fast"))
    lane.open(bench.deadline)
    assert bench.kept == ["fast"]
    bench.state.call_s = 1.0
    assert lane.engines.lead == pytest.approx(1.25)
    lane.rewrite(bench.deadline)
    lane.launch(bench.deadline)
    assert bench.kept == ["kernel"]
    assert rows(bench)[-1] == ("the rewritten graph", KEPT)


def test_a_search_that_was_cut_off_goes_on_from_its_recipe(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"one": 0.5, "two": 0.5})
    pipeline = Pipeline((Planted("one"), Planted("two")), (), (Launch(),))
    lane = search(monkeypatch, bench, pipeline, Opening(()))
    assert lane.resume((Planted("one"), Launch()))
    assert bench.kept == ["one", "launch"]
    assert [step.name for step in bench.state.graph.program.recipe] == ["one"]
    lane.rewrite(bench.deadline)
    assert rows(bench) == [("tuned before", KEPT), ("two", KEPT)]


def test_a_recipe_that_is_not_right_any_more_is_not_gone_on_from(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={})
    lane = search(monkeypatch, bench, Pipeline((Planted("wrong"),)), Opening(()))
    assert not lane.resume((Planted("wrong", factor=2.0),))
    assert bench.kept == []


def test_rewrites_that_are_left_out_say_why(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    bench = Bench(monkeypatch, net, X, cost={})
    lane = search(monkeypatch, bench, Pipeline((Planted("one"), Planted("two"))), Opening(()))
    lane.leave_rewrites("the engine is far ahead")
    lane.rewrite(bench.deadline)
    assert [(e.name, e.reason) for e in bench.ledger.entries] == [
        ("one", "the engine is far ahead"),
        ("two", "the engine is far ahead"),
    ]


@pytest.mark.parametrize(("passes", "fused"), [(("kernel",), True), (("base", "kernel"), False)])
def test_kernels_are_fused_at_once_only_where_nothing_that_they_may_build_on_is_left(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, passes: tuple[str, ...], fused: bool
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"kernel": 0.5, "base": 0.9})
    made = [PlantedKernel(name) if name == "kernel" else Planted(name) for name in passes]
    lane = search(monkeypatch, bench, Pipeline(tuple(made)), Opening(()))
    lane.open(bench.deadline)
    lane.fuse(bench.deadline)
    assert ("kernel" in bench.kept) == fused
    lane.rewrite(bench.deadline)
    assert bench.kept == [*passes]


def test_without_time_kernels_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    bench = Bench(monkeypatch, net, X, cost={"kernel": 0.5})
    lane = search(monkeypatch, bench, Pipeline((PlantedKernel("kernel"),)), Opening(()))
    lane.fuse(time.perf_counter() - 1)
    assert rows(bench) == []
    lane.rewrite(bench.deadline)
    assert bench.kept == ["kernel"]


def test_measured_kernels_of_an_opening_have_gained_and_are_not_left_out_again(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    """Neither is their layout; another kernel of the opening is."""
    costs = {"layout": 0.9, "measured": 0.5, "other": 0.9}
    bench = Bench(monkeypatch, net, X, cost=costs)
    passes = (PlantedLayout("layout"), PlantedKernel("measured"), PlantedKernel("other"))
    opening = Opening(tuple(costs), inseparable=("layout", "measured"))
    lane = search(monkeypatch, bench, Pipeline(passes), opening)
    lane.open(bench.deadline)
    assert bench.kept == [*costs]
    assert lane.engines.kernels_gain == pytest.approx(1 / 0.405)
    lane.vary(bench.deadline)
    assert [name for name, _ in rows(bench)[4:]] == ["without other"]


@pytest.mark.parametrize(("opening", "gain"), [(Opening(("one", "kernel")), 1.0), (Opening(("one",)), 1.0)])
def test_kernels_that_an_opening_does_not_measure_are_not_known_to_gain(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, opening: Opening, gain: float
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"one": 0.5, "kernel": 0.9})
    lane = search(monkeypatch, bench, Pipeline((Planted("one"), PlantedKernel("kernel"))), opening)
    lane.open(bench.deadline)
    assert lane.engines.kernels_gain == gain
