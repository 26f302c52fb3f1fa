"""The engines of one lane: the forms that they get, in which order, and what was begun ahead."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import pytest
from torch import nn

from ampopt.ir.pipeline import Pipeline
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Pass, Result
from ampopt.measure.entry import Verdict
from ampopt.search.openings import UNLIKELY, Opening
from tests.search.test_lane_search import KEPT, NOT_TRIED, REVERTED, Fast, Launch, X, net, rows, search
from tests.support.planted import Bench, Planted, PlantedKernel

__all__ = ["net"]


class Ahead:
    """A sandbox that is rehearsing programs, of which some have ended, in this order."""

    def __init__(self, *begun: Program, ended: Sequence[Program] = ()) -> None:
        self.programs, self.ended = [*begun], [program.recipe for program in ended]

    def begun(self, _step: Pass, _program: Program) -> list[Program]:
        return [*self.programs]

    def has_made(self, _step: Pass, program: Program) -> bool:
        return program.recipe in self.ended

    def ahead_s(self, step: Pass, program: Program) -> float:
        return 0.0

    def expected_s(self, step: Pass, program: Program) -> float:
        return step.expected_seconds(program)

    def apply(self, step: Pass, program: Program, *, seconds: float) -> tuple[Result, str | None]:
        if isinstance(step, Engine):  # it is taken up
            self.programs = [each for each in self.programs if each.recipe != program.recipe]
        return step.apply(program), None


@dataclasses.dataclass(frozen=True)
class Compiler(Engine):
    """A slow engine that reads kernels."""

    slow_to_apply = True

    def apply(self, program: Program) -> Result:
        return Result(program.replace(engine=program.graph), 1)


@pytest.mark.parametrize(
    ("cost", "begun", "forms"),
    [
        (0.5, True, ["compiler (unfused)", "compiler"]),
        (0.5, False, ["compiler", "compiler (unfused)"]),
        (0.97, True, ["compiler (unfused)", "compiler"]),
        (0.97, False, ["compiler (unfused)", "compiler"]),
    ],
)
def test_the_form_that_was_begun_comes_first_then_the_likely_one(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, cost: float, begun: bool, forms: list[str]
) -> None:
    """With kernels that gained much an engine is likely to be faster with them, and else without."""
    bench = Bench(monkeypatch, net, X, cost={"kernel": cost})
    lane = search(monkeypatch, bench, Pipeline((PlantedKernel("kernel"),), (Compiler(),)), Opening(()))
    lane.rewrite(bench.deadline)
    if begun:
        bench.manager.sandbox = Ahead(lane.engines.unfused())  # type: ignore[assignment]
    lane.engines.run(bench.deadline)
    assert [name for name, _ in rows(bench) if name.startswith("compiler")] == forms


@pytest.mark.parametrize(
    ("cost", "begun", "tried"),
    [
        (0.5, True, ["compiler"]),
        (0.5, False, ["compiler"]),
        (0.9, True, ["compiler (unfused)", "compiler"]),
        (0.9, False, ["compiler"]),
        (0.97, True, ["compiler (unfused)"]),
        (0.97, False, ["compiler (unfused)"]),
    ],
)
def test_late_in_the_search_an_unlikely_form_is_tried_only_if_it_was_begun(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, cost: float, begun: bool, tried: list[str]
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"kernel": cost})
    pipeline = Pipeline((PlantedKernel("kernel"),), (Compiler(),))
    lane = search(monkeypatch, bench, pipeline, Opening(()), patience=0.0)
    lane.rewrite(bench.deadline)
    if begun:
        bench.manager.sandbox = Ahead(lane.engines.unfused())  # type: ignore[assignment]
    lane.engines.run(bench.deadline)
    entries = [entry for entry in bench.ledger.entries if entry.name.startswith("compiler")]
    assert [e.name for e in entries if e.verdict is not Verdict.NOT_TRIED] == tried
    left_out = {"compiler", "compiler (unfused)"} - {*tried}
    assert {(e.name, e.reason) for e in entries if e.verdict is Verdict.NOT_TRIED} == {
        (name, UNLIKELY) for name in left_out
    }


@pytest.mark.parametrize(
    ("ended", "forms"),
    [
        ((), ["compiler (unfused)", "compiler"]),
        (("kernel",), ["compiler", "compiler (unfused)"]),
        (("", "kernel"), ["compiler", "compiler (unfused)"]),
        (("",), ["compiler (unfused)", "compiler"]),
    ],
)
def test_what_has_ended_comes_first_and_of_that_the_likely_form(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, ended: tuple[str, ...], forms: list[str]
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"kernel": 0.5})
    lane = search(monkeypatch, bench, Pipeline((PlantedKernel("kernel"),), (Compiler(),)), Opening(()))
    lane.rewrite(bench.deadline)
    programs = {"": lane.engines.unfused(), "kernel": lane.state.graph.program}
    ahead = Ahead(*programs.values(), ended=[programs[name] for name in ended])
    bench.manager.sandbox = ahead  # type: ignore[assignment]
    lane.engines.run(bench.deadline)
    assert [name for name, _ in rows(bench) if name.startswith("compiler")] == forms


@pytest.mark.parametrize(
    ("compiles_s", "tried"), [(6e3, ["compiler (unfused)", "compiler"]), (4e3, ["compiler"])]
)
def test_an_unlikely_form_that_is_made_is_tried_where_the_likely_one_may_come_too_late(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, compiles_s: float, tried: list[str]
) -> None:
    """XCiT's code without kernels was ready, and its code with kernels was cut off by the budget."""
    bench = Bench(monkeypatch, net, X, cost={"kernel": 0.5})
    pipeline = Pipeline((PlantedKernel("kernel"),), (Compiler(),))
    lane = search(monkeypatch, bench, pipeline, Opening(()), patience=0.0)
    lane.rewrite(bench.deadline)
    lane.engines.kernels_gain = 2.0
    unfused = lane.engines.unfused()
    ahead = Ahead(unfused, lane.state.graph.program, ended=[unfused])
    bench.manager.sandbox = ahead  # type: ignore[assignment]
    monkeypatch.setattr(Compiler, "expected_seconds", lambda *_: compiles_s)
    lane.engines.run(time.perf_counter() + 1e4)
    assert [
        e.name
        for e in bench.ledger.entries
        if e.name.startswith("compiler") and e.verdict is not Verdict.NOT_TRIED
    ] == tried


@pytest.mark.parametrize(("patience", "tried"), [(0.0, 1), (float("inf"), 2)])
def test_what_a_compiler_has_begun_on_is_tried_also_where_the_graph_has_changed_since(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, patience: float, tried: int
) -> None:
    """A small gain of a rewrite is not worth the time of another compilation."""
    bench = Bench(monkeypatch, net, X, cost={"layout": 0.98, "compiler": 0.3})
    pipeline = Pipeline((Planted("layout"),), (Compiler(),))
    lane = search(monkeypatch, bench, pipeline, Opening(()), patience=patience)
    bench.manager.sandbox = Ahead(lane.state.graph.program)  # type: ignore[assignment]
    lane.rewrite(bench.deadline)
    lane.engines.run(bench.deadline)
    assert bench.kept == (["compiler"] if tried == 1 else ["layout", "compiler"])
    names = ["compiler (begun ahead)", "compiler"]
    assert [(e.name, e.verdict is NOT_TRIED) for e in bench.ledger.entries if e.name in names] == [
        (name, place >= tried) for place, name in enumerate(names)
    ]


@dataclasses.dataclass(frozen=True)
class Crashing(Compiler):
    """It fails on the graph before its last changes."""

    def apply(self, program: Program) -> Result:
        if not program.recipe:
            raise RuntimeError("no such kernel")
        return super().apply(program)

    @property
    def name(self) -> str:
        return "compiler"


def test_the_present_graph_gets_its_compiler_where_that_failed_on_the_one_before(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"layout": 0.98, "compiler": 0.3})
    pipeline = Pipeline((Planted("layout"),), (Crashing(),))
    lane = search(monkeypatch, bench, pipeline, Opening(()), patience=0.0)
    bench.manager.sandbox = Ahead(lane.state.graph.program)  # type: ignore[assignment]
    lane.rewrite(bench.deadline)
    lane.engines.run(bench.deadline)
    assert bench.kept == ["layout", "compiler"]


@pytest.mark.parametrize("founded", [0, 1])
def test_what_lacks_what_makes_the_lane_right_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, founded: int
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"rescue": 0.98, "compiler": 0.3})
    pipeline = Pipeline((Planted("rescue"),), (Compiler(),))
    lane = search(monkeypatch, bench, pipeline, Opening(()))
    base = lane.state.graph.program
    lane.rewrite(bench.deadline)
    lane.state.founded = founded
    bench.manager.sandbox = Ahead(base, ended=[base])  # type: ignore[assignment]
    lane.engines.run(bench.deadline)
    forms = ["compiler"] if founded else ["compiler (begun ahead)", "compiler"]
    assert [name for name, _ in rows(bench)] == ["rescue", *forms]


def test_what_a_compiler_has_made_is_tried_before_the_next_rewrite_and_only_once(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"good": 0.9, "bad": 1.1, "compiler": 0.3})
    pipeline = Pipeline((Planted("good"), Planted("bad")), (Compiler(),))
    lane = search(monkeypatch, bench, pipeline, Opening(()))
    base = lane.state.graph.program
    bench.manager.sandbox = Ahead(base, ended=[base])  # type: ignore[assignment]
    lane.rewrite(bench.deadline)
    assert rows(bench) == [("compiler", KEPT), ("good", KEPT), ("bad", REVERTED)]
    assert bench.kept == ["compiler"]
    lane.engines.run(bench.deadline)
    assert rows(bench)[3:] == [("compiler", KEPT)]  # on the graph that has become faster
    assert bench.kept == ["good", "compiler"]


@dataclasses.dataclass(frozen=True)
class SlowCompiler(Compiler):
    """One that takes a million seconds."""

    @property
    def name(self) -> str:
        """As the other one."""
        return "compiler"

    def expected_seconds(self, program: Program) -> float:
        return 1e6


def test_the_openings_engine_is_tried_later_where_the_opening_had_no_time_for_it(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"compiler": 0.5})
    engine = SlowCompiler()
    lane = search(monkeypatch, bench, Pipeline((), (engine,)), Opening((), engine.name))
    for _ in range(2):
        lane.engines.run_first(time.perf_counter() + 1.0)
        assert rows(bench) == [(engine.name, NOT_TRIED)]  # told once
    lane.engines.run(time.perf_counter() + 1e7)
    lane.engines.run(time.perf_counter() + 1e7)
    assert rows(bench) == [(engine.name, KEPT)]


def test_what_the_opening_had_no_time_for_can_be_tried_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"compiler": 0.5})
    first, other = SlowCompiler(), Fast()
    lane = search(monkeypatch, bench, Pipeline((), (other, first)), Opening((), first.name))
    lane.engines.run_put_off(time.perf_counter() + 1e7)
    assert rows(bench) == []  # it was not its turn yet
    lane.engines.run_first(time.perf_counter() + 1.0)
    lane.engines.run_put_off(time.perf_counter() + 1e7)
    assert rows(bench) == [(first.name, KEPT)]


@pytest.mark.parametrize(("ended", "verdict"), [(True, KEPT), (False, NOT_TRIED)])
def test_what_is_made_takes_little_more_time(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, ended: bool, verdict: Verdict
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"compiler": 0.3}, seconds_left=2e5)
    lane = search(monkeypatch, bench, Pipeline((), (SlowCompiler(),)), Opening(()))
    base = lane.state.graph.program
    bench.manager.sandbox = Ahead(base, ended=[base] if ended else [])  # type: ignore[assignment]
    lane.engines.run(bench.deadline)
    assert rows(bench) == [("compiler", verdict)]


def test_what_there_was_no_time_for_is_told_once_and_waits_for_the_turn_of_its_engine(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"good": 0.9, "bad": 1.1, "compiler": 0.3}, seconds_left=1e5)
    pipeline = Pipeline((Planted("good"), Planted("bad")), (SlowCompiler(),))
    lane = search(monkeypatch, bench, pipeline, Opening(()))
    base = lane.state.graph.program
    bench.manager.sandbox = Ahead(base, ended=[base])  # type: ignore[assignment]
    lane.rewrite(bench.deadline)
    assert rows(bench) == [("compiler", NOT_TRIED), ("good", KEPT), ("bad", REVERTED)]


def test_what_a_compiler_has_not_made_yet_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"good": 0.9, "compiler": 0.3})
    lane = search(monkeypatch, bench, Pipeline((Planted("good"),), (Compiler(),)), Opening(()))
    bench.manager.sandbox = Ahead(lane.state.graph.program)  # type: ignore[assignment]
    lane.engines.take_made()
    lane.rewrite(bench.deadline)
    assert rows(bench) == [("good", KEPT)]


@pytest.mark.parametrize(("looks", "expected"), [(3, [("compiler", KEPT)]), (10**9, [])])
def test_the_likeliest_form_is_waited_for_until_a_time(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, looks: int, expected: list[tuple[str, Verdict]]
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"compiler": 0.3})
    lane = search(monkeypatch, bench, Pipeline((), (Compiler(),)), Opening(()))
    program = lane.state.graph.program
    sandbox, counted = Ahead(program), iter(range(looks))

    def is_working(_step: Pass, _program: Program) -> bool:
        if next(counted, None) is None:
            sandbox.ended = [program.recipe]
        return program.recipe not in sandbox.ended

    monkeypatch.setattr(sandbox, "is_working", is_working, raising=False)
    bench.manager.sandbox = sandbox  # type: ignore[assignment]
    lane.engines.await_made(time.perf_counter() + (60.0 if expected else 0.05))
    assert rows(bench) == expected


def test_how_far_an_engine_is_ahead_of_a_graph_that_was_not_launched_is_not_known(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"compiler": 0.3})
    for launches, lead in (((), pytest.approx(1 / 0.3)), ((Launch(),), 1.0)):
        lane = search(monkeypatch, bench, Pipeline((), (Compiler(),), launches), Opening(()))
        lane.engines.run(bench.deadline)
        lane.state.call_s = 1.0
        assert lane.engines.lead == lead


@dataclasses.dataclass(frozen=True)
class Missing(Fast):
    """An engine that is not installed."""

    def why_not(self, program: Program) -> str | None:
        return "it is not installed"


@pytest.mark.parametrize(("engine", "verdict"), [(Fast(), NOT_TRIED), (Missing(), KEPT)])
@pytest.mark.parametrize("with_engine", [True, False])
def test_an_engine_that_another_outdoes_is_late_only_where_that_one_can_be_tried(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, engine: Engine, verdict: Verdict, with_engine: bool
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"one": 0.9, engine.name: 0.8, "compiler": 0.5})
    opening = Opening(("one",), engine.name, (), ("compiler",))
    lane = search(
        monkeypatch, bench, Pipeline((Planted("one"),), (Compiler(), engine)), opening, patience=0.0
    )
    lane.open(bench.deadline, with_engine=with_engine)
    assert (engine.name in dict(rows(bench))) == with_engine
    lane.rewrite(bench.deadline)
    lane.engines.run(bench.deadline)
    assert [name for name, _ in rows(bench) if name != "one"] == [engine.name, "compiler"]
    assert dict(rows(bench))["compiler"] is verdict


@dataclasses.dataclass(frozen=True)
class Taking(Compiler):
    """One that takes so many seconds."""

    seconds: float = 0.0

    def expected_seconds(self, program: Program) -> float:
        return self.seconds


@pytest.mark.parametrize(("seconds", "verdict"), [(10.0, KEPT), (1000.0, NOT_TRIED)])
def test_an_unlikely_engine_is_begun_only_if_it_ends_in_the_time_for_such(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, seconds: float, verdict: Verdict
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"taking": 0.5})
    opening = Opening((), None, ("taking",))
    pipeline = Pipeline((), (Taking(seconds=seconds),))
    lane = search(monkeypatch, bench, pipeline, opening, patience=time.perf_counter() + 100.0)
    lane.engines.run(bench.deadline)
    assert rows(bench) == [("taking", verdict)]


def test_each_form_of_the_program_is_made_once(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    bench = Bench(monkeypatch, net, X, cost={"kernel": 0.9})
    lane = search(monkeypatch, bench, Pipeline((PlantedKernel("kernel"),)), Opening(()))
    lane.rewrite(bench.deadline)
    assert lane.engines.unfused() is lane.engines.unfused()
    assert lane.engines.unfused() is not bench.state.graph.program
    forms = lane.engines.forms(Compiler())
    assert [form.suffix for form in forms] == ["", " (unfused)"]
    assert (forms[0].program, forms[1].program) == (bench.state.graph.program, lane.engines.unfused())
