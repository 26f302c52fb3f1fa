"""A pass of another package cannot spoil what programs share with the original that verifies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ampopt.errors import PassError
from ampopt.ir.graph import aten, calls, copy_of, finish
from ampopt.ir.judged import Judge, Judged, OwnJudge
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Family, Numerics, Pass, Rehearsed, Result, replay
from ampopt.measure.entry import Verdict
from ampopt.passes import BakeAutocast, FoldConvBn
from tests.helpers import FP16, program_of, with_statistics
from tests.support.planted import Doing, keep_the_patched, optimize


def _scale(program: Program) -> Result:
    module = copy_of(program.graph)
    for weight in module.buffers():
        weight.mul_(3)
    return Result(program.with_graph(finish(module)), 1)


def _forget(program: Program) -> Result:
    for weight in program.graph.buffers():
        weight.data.zero_()
    return Result(program, 0)


def _fail(program: Program) -> Result:
    next(program.graph.buffers()).fill_(torch.nan)
    raise ValueError("half-way")


def _shift_the_example(program: Program) -> Result:
    program.examples[0].add_(1)
    return Result(program, 0)


def _scale_what_is_not_rounded(program: Program) -> Result:
    for node in program.graph.graph.nodes:
        if "exact" in node.meta:
            node.meta["exact"].mul_(2)
    return Result(program, 0)


def _round(program: Program) -> Result:
    weight = next(program.graph.buffers())
    weight.data = weight.data.bfloat16()
    return Result(program, 0)


def _turn(program: Program) -> Result:
    weight = next(program.graph.buffers())
    weight.data = weight.data.to(memory_format=torch.channels_last)
    return Result(program, 0)


def _cut(program: Program) -> Result:
    weight = next(program.graph.buffers())
    weight.data = weight.data[:1]
    return Result(program, 0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (_scale, "the weight"),
        (_forget, "the weight"),
        (_fail, "the weight"),
        (_round, "the weight"),
        (_cut, "the weight"),
        (_turn, "the weight"),
        (_shift_the_example, "example 0"),
        (_scale_what_is_not_rounded, "the weight"),
    ],
)
def test_what_a_pass_writes_to_is_put_back_and_told(write: Callable[[Program], Result], what: str) -> None:
    program = program_of(net(), torch.randn(1, 3, 8, 8), on_top_of=[BakeAutocast()], lane=FP16)
    before = program.run(*program.examples)
    exact = [node.meta["exact"].clone() for node in program.graph.graph.nodes if "exact" in node.meta]
    assert exact
    for call in (lambda: Doing(write).apply(program), lambda: replay((Doing(write),), program)):
        with pytest.raises(PassError, match=f"it has written to {what}"):
            call()
    assert all(map(torch.equal, program.run(*program.examples), before))
    now = [node.meta["exact"] for node in program.graph.graph.nodes if "exact" in node.meta]
    assert all(map(torch.equal, now, exact))


UNUSUAL = {
    "expanded": torch.arange(3.0).reshape(1, 3).expand(4, 3),
    "with gaps": torch.arange(24.0).reshape(4, 6)[:, ::2],
    "conjugate": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
    "negative, with gaps": torch.complex(torch.arange(3.0), torch.ones(3)).conj().imag,
    "nothing": torch.empty(0, 3),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_tensors_of_any_strides_are_put_back_and_only_where_they_were_written_to(name: str) -> None:
    program, tensor = program_of(net(), torch.randn(1, 3, 8, 8)), UNUSUAL[name]
    before = tensor.clone()

    def write(given: Program) -> Result:
        written = given.examples[1]
        if written.layout is torch.strided:
            written.data[(0,) * tensor.dim()] = 7
        else:
            written._values()[0] = 7
        return Result(given, 0)

    program = program.replace(examples=(*program.examples, tensor))
    Doing(lambda given: Result(given, 0)).apply(program)
    if tensor.numel():
        with pytest.raises(PassError, match="it has written to example 1"):
            Doing(write).apply(program)
    assert torch.equal(tensor.to_dense(), before.to_dense())


class _Scaling:
    def apply(self, program: Program) -> Result:
        return _scale(program)


@dataclasses.dataclass(frozen=True)
class Mixed(_Scaling, Pass):
    """What writes comes from a class that is no pass."""

    numerics = Numerics.REASSOCIATED
    family = Family.REWRITE
    portable = True


def test_what_a_mixin_writes_to_is_put_back() -> None:
    program = program_of(net(), torch.randn(1, 3, 8, 8))
    before = program.run(*program.examples)
    with pytest.raises(PassError, match="it has written to the weight"):
        Mixed().apply(program)
    assert all(map(torch.equal, program.run(*program.examples), before))


@dataclasses.dataclass(frozen=True)
class Searching(Judged):
    """A pass that searches and writes to weights."""

    numerics = Numerics.REASSOCIATED
    family = Family.REWRITE
    portable = True

    def apply_judged(self, program: Program, judge: Judge) -> Result:
        """Write."""
        return _forget(program)


@dataclasses.dataclass(frozen=True)
class Compiling(Engine):
    """An engine that writes to weights during its rehearsal."""

    def apply(self, program: Program) -> Result:
        """Select the graph."""
        return Result(program.replace(engine=program.graph), 1)

    def apply_beside(self, program: Program, rehearsed: Callable[[], Rehearsed]) -> Result:
        """Write, and wait."""
        _forget(program)
        rehearsed()
        return self.apply(program)


WAYS: dict[str, Callable[[Program], Result]] = {
    "apply_judged": lambda program: Searching().apply_judged(program, OwnJudge(program)),
    "apply": lambda program: Searching().apply(program),
    "apply_beside": lambda program: Compiling().apply_beside(program, Rehearsed),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_apply_a_pass_is_guarded(way: str) -> None:
    program = program_of(net(), torch.randn(1, 3, 8, 8))
    before = program.run(*program.examples)
    with pytest.raises(PassError, match="has written to the weight"):
        WAYS[way](program)
    assert all(map(torch.equal, program.run(*program.examples), before))


def test_an_interruption_of_a_pass_is_one() -> None:
    def interrupt(program: Program) -> Result:
        next(program.graph.buffers()).zero_()
        raise KeyboardInterrupt

    program = program_of(net(), torch.randn(1, 3, 8, 8))
    before = program.run(*program.examples)
    with pytest.raises(KeyboardInterrupt):
        Doing(interrupt).apply(program)
    assert all(map(torch.equal, program.run(*program.examples), before))


def _without_relus(program: Program, rewrites: int) -> Result:
    for relu in calls(program.graph, [aten.relu.default]):
        relu.replace_all_uses_with(relu.all_input_nodes[0])
    program.graph.recompile()
    return Result(program, rewrites)


SPOILING: dict[str, tuple[Callable[[Program], Result], str]] = {
    "weights": (_scale, "written to the weight"),
    "the graph": (lambda program: _without_relus(program, 0), "changed the graph that it was given"),
    "the graph, as a rewrite": (lambda program: _without_relus(program, 1), "changed the graph that it was"),
    "the example": (_shift_the_example, "written to example 0"),
}


@pytest.mark.parametrize("what", SPOILING)
def test_a_pass_that_spoils_its_program_fails_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_patched(monkeypatch)
    spoil, reason = SPOILING[what]
    model, x = net(), torch.randn(1, 3, 8, 8)
    fast = optimize(model, x, precision="fp32", passes=[Doing(spoil), FoldConvBn()], cache=False)
    assert torch.allclose(fast(x), model(x), atol=1e-5)
    rows = {entry.name: entry for entry in fast.report.entries}
    assert rows["doing"].verdict is Verdict.FAILED
    assert reason in rows["doing"].reason
    assert rows["fold-conv-bn"].verdict is Verdict.KEPT, "what is tried after it had another program"
