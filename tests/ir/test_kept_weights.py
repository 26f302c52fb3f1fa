"""A pass of another package cannot spoil what programs share with the original that verifies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ampopt.errors import PassError
from ampopt.ir.graph import copy_of, finish
from ampopt.ir.program import Program
from ampopt.ir.transform import Family, Numerics, Pass, Result, replay
from ampopt.passes import BakeAutocast, FoldConvBn
from tests.helpers import FP16, program_of, with_statistics
from tests.support.planted import keep_the_patched, optimize


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


def _cut(program: Program) -> Result:
    weight = next(program.graph.buffers())
    weight.data = weight.data[:1]
    return Result(program, 0)


@dataclasses.dataclass(frozen=True)
class Writing(Pass):
    """Calls a function that writes to what it is given."""

    numerics = Numerics.REASSOCIATED
    family = Family.REWRITE
    portable = True

    write: Callable[[Program], Result]

    def apply(self, program: Program) -> Result:
        """Write."""
        return self.write(program)


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
        (_shift_the_example, "example 0"),
        (_scale_what_is_not_rounded, "the weight"),
    ],
)
def test_what_a_pass_writes_to_is_put_back_and_told(write: Callable[[Program], Result], what: str) -> None:
    program = program_of(net(), torch.randn(1, 3, 8, 8), on_top_of=[BakeAutocast()], lane=FP16)
    before = program.run(*program.examples)
    exact = [node.meta["exact"].clone() for node in program.graph.graph.nodes if "exact" in node.meta]
    assert exact
    for call in (lambda: Writing(write).apply(program), lambda: replay((Writing(write),), program)):
        with pytest.raises(PassError, match=f"writing has written to {what}"):
            call()
    assert all(map(torch.equal, program.run(*program.examples), before))
    now = [node.meta["exact"] for node in program.graph.graph.nodes if "exact" in node.meta]
    assert all(map(torch.equal, now, exact))


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
    with pytest.raises(PassError, match="mixed has written to the weight"):
        Mixed().apply(program)
    assert all(map(torch.equal, program.run(*program.examples), before))


def test_an_interruption_of_a_pass_is_one() -> None:
    def interrupt(program: Program) -> Result:
        next(program.graph.buffers()).zero_()
        raise KeyboardInterrupt

    program = program_of(net(), torch.randn(1, 3, 8, 8))
    before = program.run(*program.examples)
    with pytest.raises(KeyboardInterrupt):
        Writing(interrupt).apply(program)
    assert all(map(torch.equal, program.run(*program.examples), before))


def test_a_pass_that_writes_to_weights_spoils_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_patched(monkeypatch)
    model, x = net(), torch.randn(1, 3, 8, 8)
    fast = optimize(model, x, precision="fp32", passes=[Writing(_scale), FoldConvBn()], cache=False)
    assert torch.allclose(fast(x), model(x), atol=1e-5)
    (entry,) = [entry for entry in fast.report.entries if entry.name == "writing"]
    assert "written to the weight" in entry.reason
