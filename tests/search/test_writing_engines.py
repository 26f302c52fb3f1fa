"""An engine that writes to what others read is reverted, says so, and spoils no later trial."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.graph import aten, copy_of, insert_call
from ampopt.ir.program import Program
from ampopt.ir.transform import Family, Numerics, Pass, Result
from ampopt.measure.entry import Verdict
from ampopt.measure.sampling import Gain
from ampopt.passes import FoldConvBn
from ampopt.search.trial_timer import TrialTimer
from tests.helpers import Model, with_statistics
from tests.support.planted import keep_the_patched, optimize


class Timing:
    """Whether a trial's programs are timed at the moment."""

    goes_on = False


@dataclasses.dataclass(frozen=True)
class Writing(Pass):
    """Runs the graph, and then writes: from its call number `first` on, or in timed calls alone.

    It is tried as a rewrite is, before those that come after it.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.REWRITE
    portable = False

    write: Callable[[Program, Sequence[Tensor]], object]
    first: int = 1
    while_timed: bool = False

    def apply(self, program: Program) -> Result:
        """Select it."""
        calls = 0

        def engine(*tensors: Tensor) -> Sequence[Tensor]:
            nonlocal calls
            calls += 1
            outputs = program.graph(*tensors)
            if calls >= self.first and (Timing.goes_on or not self.while_timed):
                self.write(program, tensors)
            return outputs  # type: ignore[no-any-return]

        return Result(program.replace(engine=engine), 1)


@dataclasses.dataclass(frozen=True)
class WritingRewrite(Pass):
    """Lets the graph itself write to a weight."""

    numerics = Numerics.REASSOCIATED
    family = Family.REWRITE
    portable = True

    def apply(self, program: Program) -> Result:
        """Double a weight after its use."""
        module = copy_of(program.graph)
        weight = next(iter(module.graph.find_nodes(op="get_attr")))
        output = module.graph.output_node()
        insert_call(module, output, aten.mul_.Tensor, weight, 2.0)
        module.recompile()
        return Result(program.with_graph(module), 1)


def _fail_after_writing(program: Program, tensors: Sequence[Tensor]) -> None:
    tensors[0].zero_()
    raise ValueError("half-way")


def _both(program: Program, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.data.add_(1)


def _weight(program: Program, tensors: Sequence[Tensor]) -> None:
    next(program.graph.buffers()).data.add_(1)


def _told(time: Callable[..., Gain]) -> Callable[..., Gain]:
    def told(*args: Any) -> Gain:
        Timing.goes_on = True
        try:
            return time(*args)
        finally:
            Timing.goes_on = False

    return told


STEPS: dict[str, tuple[Pass, Verdict, str]] = {
    "an input": (Writing(lambda p, t: t[0].zero_()), Verdict.REVERTED, "it writes to input 0"),
    "the second input": (Writing(lambda p, t: t[1].zero_()), Verdict.REVERTED, "it writes to input 1"),
    "both inputs": (Writing(_both), Verdict.REVERTED, "it writes to input 0"),
    "the third call": (Writing(_both, first=3), Verdict.REVERTED, "it writes to input 0"),
    "while timed": (Writing(_both, while_timed=True), Verdict.REVERTED, "it writes to input 0"),
    "an error": (Writing(_fail_after_writing), Verdict.FAILED, "half-way"),
    "the example": (Writing(lambda p, t: p.examples[0].zero_()), Verdict.REVERTED, "it writes to input 0"),
    "a weight": (Writing(_weight), Verdict.REVERTED, "it has written to the weight"),
    "a weight, while timed": (
        Writing(_weight, while_timed=True),
        Verdict.REVERTED,
        "it has written to the weight",
    ),
    "a graph that writes": (WritingRewrite(), Verdict.REVERTED, "it has written to the weight"),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_writes_to_what_others_read_is_alone_in_failing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_the_patched(monkeypatch)
    monkeypatch.setattr(TrialTimer, "time", _told(TrialTimer.time))
    step, verdict, reason = STEPS[name]
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model = Model(lambda m, x, y: m.body(x) + y, body=with_statistics(layers))
    x, y = torch.randn(1, 3, 8, 8), torch.randn(1, 4, 6, 6)
    given = x.clone(), y.clone()
    fast = optimize(model, (x, y), precision="fp32", passes=[step, FoldConvBn()], cache=False)
    rows = {entry.name: entry for entry in fast.report.entries}
    assert rows[step.name].verdict is verdict
    assert reason in rows[step.name].reason
    assert rows["fold-conv-bn"].verdict is Verdict.KEPT, rows["fold-conv-bn"].reason
    assert torch.equal(x, given[0])
    assert torch.equal(y, given[1])
    assert torch.allclose(fast(x, y), model(x, y), atol=1e-5)
