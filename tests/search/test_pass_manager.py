"""The pass manager against planted passes: each gets the verdict that it deserves, and the reason."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from ampopt.errors import AmpoptError, PassError
from ampopt.ir.graph import aten
from ampopt.ir.lanes import FP32
from ampopt.ir.pipeline import Pipeline
from ampopt.ir.program import Program
from ampopt.ir.transform import Declined, Result, replay
from ampopt.measure.entry import Verdict
from ampopt.search.lane_search import LaneSearch
from ampopt.search.pass_manager import PassManager
from ampopt.search.subject import Subject
from ampopt.search.trials import differing_bits
from tests.helpers import FP16, Model, program_of
from tests.support.planted import Bench, Planted, PlantedBitwise, PlantedFoundation, PlantedKernel
from tests.support.rewritten import rewritten

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
GOOD = Planted("good")
FASTER = {"good": 0.5, "better": 0.5}


@pytest.fixture
def net() -> nn.Module:
    return nn.Linear(4, 4).eval()


def test_a_pass_that_helps_is_kept_with_its_gain(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    bench = Bench(monkeypatch, net, X, cost=FASTER)
    (entry,) = bench.rewrite(GOOD)
    assert (entry.verdict, entry.reason) == (Verdict.KEPT, "faster: 2.000x (2.000 to 2.000)")
    assert entry.before is not None
    assert entry.after is not None
    assert (entry.before.latency.median, entry.after.latency.median) == (1.0, 0.5)
    assert bench.kept == ["good"]


def test_each_pass_is_compared_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    bench = Bench(monkeypatch, net, X, cost=FASTER)
    second = bench.rewrite(GOOD, Planted("better"))[1]
    assert second.before is not None
    assert second.before.latency.median == 0.5
    assert bench.kept == ["good", "better"]


@pytest.mark.parametrize(
    ("good", "rounds", "verdict"),
    [
        ([0.5] * 6 + [1.5] + [0.5] * 99, 2, Verdict.KEPT),  # one disturbance, then none
        ([0.5, 1.5] * 99, 4, Verdict.REVERTED),  # nothing but noise
        ([0.95] * 6 + [1.5] + [0.95] * 99, 1, Verdict.REVERTED),  # a small gain is not worth more time
        ([0.5] * 99, 1, Verdict.KEPT),
    ],
)
def test_a_large_gain_in_the_noise_is_looked_at_longer(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, good: list[float], rounds: int, verdict: Verdict
) -> None:
    samples = iter(good)
    bench = Bench(monkeypatch, net, X, cost=lambda names: 0.1 * next(samples) if names else 0.1)
    (entry, *_) = bench.rewrite(GOOD)
    assert entry.verdict is verdict
    assert entry.after is not None
    assert len(entry.after.latency.samples) == 6 * rounds


def test_a_pass_that_raises_is_a_failed_row_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost=FASTER)
    broken = Planted("broken", error=ZeroDivisionError("no luck\nsecond line"))
    first, second = bench.rewrite(broken, GOOD)
    assert (first.verdict, first.reason) == (Verdict.FAILED, "ZeroDivisionError: no luck")
    assert second.verdict is Verdict.KEPT


def test_where_a_pass_leaves_the_device_unusable_the_error_names_passes_to_exclude(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    fail = Mock(side_effect=RuntimeError("CUDA error: device-side assert triggered"))
    bench = Bench(monkeypatch, net, X, cost=FASTER)
    monkeypatch.setattr("ampopt.search.trials.synchronize", fail)
    monkeypatch.setattr(bench.manager, "judge", fail)
    with pytest.raises(AmpoptError, match=r"the opening has broken .*assert triggered.*'good'.*'better'"):
        bench.manager.try_together(bench.state, "the opening", [GOOD, Planted("better")], bench.deadline)


@dataclasses.dataclass(frozen=True)
class _Giving(Planted):
    """One whose `apply` gives what a function makes of the program."""

    give: Callable[[Program], Any] = lambda program: None

    def apply(self, program: Program) -> Result:
        given: Result = self.give(program)
        return given


@dataclasses.dataclass(frozen=True)
class _Leaving(Planted):
    """One that ends Python when it is asked whether it can be applied."""

    def why_not(self, program: Program) -> str | None:
        raise SystemExit(3)


WITHOUT_A_RESULT: dict[str, tuple[Planted, str]] = {
    "nothing": (_Giving("bad"), "the pass returned None: let it return Result(program, rewrites)"),
    "a number": (_Giving("bad", give=lambda program: 3), "the pass returned 3: let it return Result("),
    "no program": (
        _Giving("bad", give=lambda program: Result(program.graph, 1)),  # type: ignore[arg-type]
        "the pass returned a Result whose program is GraphModule(): let it return Result(",
    ),
    "uncounted": (
        _Giving("bad", give=lambda program: Result(program.replace(), 0)),
        "the pass returned another program, and counts no rewrites: let it count what it changed",
    ),
    "an exit": (Planted("bad", error=SystemExit(2)), "the pass ends Python (SystemExit: 2): let it raise"),
    "an exit beforehand": (_Leaving("bad"), "the pass ends Python (SystemExit: 3): let it raise"),
}


@pytest.mark.parametrize("case", WITHOUT_A_RESULT)
def test_a_pass_that_gives_no_result_is_a_failed_row_that_says_what_it_gave(
    case: str, monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bad, reason = WITHOUT_A_RESULT[case]
    first, second = Bench(monkeypatch, net, X, cost=FASTER).rewrite(bad, GOOD)
    assert first.verdict is Verdict.FAILED
    assert first.reason.startswith(f"PassError: {reason}")
    assert second.verdict is Verdict.KEPT
    program = program_of(net, X)
    with pytest.raises(PassError, match=re.escape(reason)):
        replay((bad,), program)


@dataclasses.dataclass(frozen=True)
class _Unrunnable(Planted):
    def apply(self, program: Program) -> Result:
        return Result(rewritten(program, aten.view.default, [7, 7]), 1)


@dataclasses.dataclass(frozen=True)
class _OtherShape(Planted):
    def apply(self, program: Program) -> Result:
        return Result(rewritten(program, aten.unsqueeze.default, 0), 1)


def test_a_program_that_fails_when_it_is_called_is_a_failed_row(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    first, second = Bench(monkeypatch, net, X, cost=FASTER).rewrite(_Unrunnable("view"), GOOD)
    assert first.verdict is Verdict.FAILED
    assert "view" in first.reason or "shape" in first.reason
    assert second.verdict is Verdict.KEPT


@pytest.mark.parametrize(
    "wrong",
    [
        Planted("wrong", factor=1.01),
        Planted("wrong", plus=1e-3),
        Planted("wrong", factor=float("nan")),
        Planted("wrong", factor=float("inf")),
        _OtherShape("wrong"),
    ],
    ids=["scaled", "shifted", "nan", "inf", "shape"],
)
def test_a_wrong_output_is_reverted_however_fast(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, wrong: Planted
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"wrong": 0.01})
    (entry,) = bench.rewrite(wrong)
    assert entry.verdict is Verdict.REVERTED
    assert "output 0: error" in entry.reason
    assert entry.error is not None
    assert entry.limit is not None
    assert entry.error > entry.limit
    assert bench.kept == []


def test_nan_is_refused_where_eager_itself_overflows_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda m, x: m.linear(x) * 1e38 * 1e3, linear=nn.Linear(4, 4))
    bench = Bench(monkeypatch, model, X, cost={"wrong": 0.01})
    (entry,) = bench.rewrite(Planted("wrong", factor=float("nan")))
    assert entry.verdict is Verdict.REVERTED, "eager's own infinite error lets everything pass"


def test_a_wrong_amp_program_is_refused_where_eager_amp_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda m, x: m.linear(m.linear(x) * 1e5), linear=nn.Linear(4, 4))
    bench = Bench(monkeypatch, model, X, cost={"wrong": 0.01}, lane=FP16)
    (entry,) = bench.rewrite(Planted("wrong", factor=-3.0))
    assert entry.verdict is Verdict.REVERTED, "eager's own infinite error lets everything pass"


def test_a_claim_to_keep_every_bit_is_checked(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    bench = Bench(monkeypatch, net, X, cost={"same": 0.5, "one-bit": 0.5})
    same, changed = bench.rewrite(PlantedBitwise("same"), PlantedBitwise("one-bit", factor=1.0 + 2.0**-23))
    assert same.verdict is Verdict.KEPT
    assert (changed.verdict, changed.reason) == (
        Verdict.REVERTED,
        "it claims to keep every bit and does not",
    )
    assert Bench(monkeypatch, net, X, cost={"x": 0.5}).rewrite(Planted("x", factor=1.0 + 2.0**-23))[
        0
    ].verdict is (Verdict.KEPT)


def test_slower_and_equal_passes_are_reverted(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    bench = Bench(monkeypatch, net, X, cost={"slow": 1.25, "equal": 1.0})
    slow, equal = bench.rewrite(Planted("slow"), Planted("equal"))[:2]
    assert slow.verdict is equal.verdict is Verdict.REVERTED
    assert slow.reason.startswith("slower: 0.800x")
    assert equal.reason.startswith("no gain outside the noise")
    assert bench.kept == []


@pytest.mark.parametrize(("cost", "kept"), [(1.0, True), (1.004, True), (1.25, False)])
def test_what_others_build_on_is_kept_unless_it_costs(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, cost: float, kept: bool
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"base": cost})
    assert (bench.rewrite(PlantedFoundation("base"))[0].verdict is Verdict.KEPT) == kept


@pytest.mark.parametrize(
    ("cost", "reason"),
    [(0.8, "faster: 1.250x"), (1.0, "later passes build on it: 1.000x"), (1.25, "slower: 0.800x")],
)
def test_what_others_build_on_is_told_to_be_faster_where_it_is(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, cost: float, reason: str
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"base": cost})
    assert bench.rewrite(PlantedFoundation("base"))[0].reason.startswith(reason)


def test_what_others_build_on_may_cost_a_little_until_they_come(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    def cost(names: frozenset[str]) -> float:
        return {frozenset({"base"}): 1.03, frozenset({"base", "roof"}): 0.5}.get(names, 1.0)

    bench = Bench(monkeypatch, net, X, cost=cost)
    rows = bench.rewrite(PlantedFoundation("base"), Planted("roof"))
    assert bench.kept == ["base", "roof"]
    assert [(e.name, e.verdict) for e in rows][-1] == ("without base", Verdict.REVERTED)


def test_what_others_build_on_goes_where_nothing_came_of_it(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"base": 1.03})
    rows = bench.rewrite(PlantedFoundation("base"))
    assert [(e.name, e.verdict) for e in rows] == [("base", Verdict.KEPT), ("without base", Verdict.KEPT)]
    assert bench.kept == []


def test_nothing_to_do_is_declined_with_node_and_reason(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    found = (Declined("conv_3", "its weight is computed"), Declined("conv_4", "another"))
    bench = Bench(monkeypatch, net, X, cost={})
    entry, bare = bench.rewrite(Planted("shy", declined=found), _Nothing("idle"))
    assert entry.verdict is bare.verdict is Verdict.DECLINED
    assert entry.reason == "conv_3: its weight is computed (and 1 more)"
    assert entry.declined == found
    assert bare.reason == "there is nothing to rewrite"


def test_what_is_declined_is_named_with_its_place_in_the_model(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, nn.Sequential(nn.ReLU(), net), X, cost={})
    (entry,) = bench.rewrite(Planted("shy", declined=(Declined("relu", "it is small"),)))
    assert entry.reason == "relu (0): it is small"
    assert entry.to_dict()["declined"] == [{"node": "relu (0)", "reason": "it is small"}]


@dataclasses.dataclass(frozen=True)
class _Nothing(Planted):
    def apply(self, program: Program) -> Result:
        return Result(program, 0)


@dataclasses.dataclass(frozen=True)
class _Refuses(Planted):
    def why_not(self, program: Program) -> str | None:
        return "not on a Sunday"

    def apply(self, program: Program) -> Result:
        raise AssertionError("it must not be applied")


def test_a_refusal_is_declined_and_not_applied(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    (entry,) = Bench(monkeypatch, net, X, cost={}).rewrite(_Refuses("shy"))
    assert (entry.verdict, entry.reason) == (Verdict.DECLINED, "not on a Sunday")


def test_an_interrupted_pass_is_written_down_and_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost=FASTER)
    with pytest.raises(KeyboardInterrupt):
        bench.rewrite(GOOD, Planted("long", error=KeyboardInterrupt()), Planted("better"))
    assert [(e.name, e.verdict, e.reason) for e in bench.ledger.entries[1:]] == [
        ("long", Verdict.NOT_TRIED, "interrupted")
    ]
    assert bench.kept == ["good"]


def _layout_wants_its_kernel(names: frozenset[str]) -> float:
    if "layout" not in names:
        return 0.9 if "kernel" in names else 1.0
    return 0.5 if "kernel" in names else 1.5


def test_a_pass_that_loses_alone_gets_a_second_chance(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost=_layout_wants_its_kernel)
    rows = [(e.name, e.verdict) for e in bench.rewrite(Planted("layout"), PlantedKernel("kernel"))]
    assert rows == [
        ("layout", Verdict.REVERTED),
        ("kernel", Verdict.KEPT),
        ("layout (again)", Verdict.KEPT),
    ]
    assert bench.kept == ["layout", "kernel"], "it takes its own place in the order"


def test_a_kernel_that_was_slower_without_a_layout_comes_along_on_the_second_chance(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    def cost(names: frozenset[str]) -> float:
        return {frozenset[str](): 1.0, frozenset({"layout", "kernel"}): 0.5}.get(names, 1.5)

    bench = Bench(monkeypatch, net, X, cost=cost)
    bench.rewrite(Planted("layout"), PlantedKernel("kernel"))
    assert bench.kept == ["layout", "kernel"]


def test_a_second_chance_that_fails_again_is_written_down(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module
) -> None:
    bench = Bench(monkeypatch, net, X, cost={"layout": 1.5, "kernel": 0.9})
    last = bench.rewrite(Planted("layout"), PlantedKernel("kernel"))[-1]
    assert (last.name, last.verdict) == ("layout (again)", Verdict.REVERTED)
    assert bench.kept == ["kernel"]


def test_a_wrong_pass_gets_no_second_chance(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    entries = Bench(monkeypatch, net, X, cost=FASTER).rewrite(Planted("wrong", factor=2.0), GOOD)
    assert [e.name for e in entries] == ["wrong", "good"]


def test_progress_is_told_about_every_pass(monkeypatch: pytest.MonkeyPatch, net: nn.Module) -> None:
    bench, told = Bench(monkeypatch, net, X, cost=FASTER), list[tuple[str, str]]()
    program = bench.state.base
    manager = PassManager(
        program, bench.verifier, bench.ledger, deadline=1e12, progress=lambda *what: told.append(what)
    )
    LaneSearch(manager, manager.open(FP32), Pipeline((GOOD, Planted("better")))).rewrite(1e12)
    assert told == [("fp32", "good"), ("fp32", "better")]


@pytest.mark.timing
def test_a_heavy_useless_computation_is_measured_as_slower(net: nn.Module) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bench = Bench(patch, net, X, cost={})
    (entry,) = bench.rewrite(_Heavy("heavy"))[:1]
    assert entry.verdict is Verdict.REVERTED
    assert entry.reason.startswith("slower")


@dataclasses.dataclass(frozen=True)
class _Heavy(Planted):
    def apply(self, program: Program) -> Result:
        for _ in range(40):
            program = rewritten(rewritten(program, aten.mul.Tensor, 2.0), aten.mul.Tensor, 0.5)
        return Result(program, 80)


@pytest.mark.parametrize("value", [0.0, 1.0, float("inf")])
def test_bits_that_differ_are_told_from_nan(value: float) -> None:
    """NaN in both at the same places is the same; NaN for a number is not, whatever the number."""
    x = torch.tensor([[1.0, float("nan"), -2.0]])
    same = program_of(Model(lambda m, x: x * 1), x)
    other = program_of(Model(lambda m, x: torch.nan_to_num(x, nan=value)), x)
    assert differing_bits(same, Subject(program_of(Model(lambda m, x: x + 0), x))) is None
    assert differing_bits(same, Subject(other)) is not None
