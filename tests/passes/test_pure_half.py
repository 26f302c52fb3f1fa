"""pure-half: no FP32 is left inside a 16-bit program, and what has to stay in FP32 keeps it from running."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import TensorMetadata

from ampopt.graph import aten, calls, dtype_of, record_shapes
from ampopt.lanes import Lane
from ampopt.passes import BakeAutocast, FoldConvBn, PureHalf
from ampopt.program import Program
from ampopt.transform import Result
from tests.helpers import (
    BF16,
    FP16,
    FP32,
    Model,
    apply_to_untouched,
    check_pass,
    program_of,
    spoilt,
    text_of,
    with_statistics,
)

BAKED = [BakeAutocast()]


def _encoder(m: Any, x: Tensor) -> Tensor:
    """Attention written out, with a residual that autocast keeps in FP32."""
    q, k, v = m.qkv(m.norm(x)).chunk(3, -1)
    x = x + m.out((q @ k.mT / 4).softmax(-1) @ v)
    return x + m.scale * m.down(F.gelu(m.up(m.norm(x))))  # type: ignore[no-any-return]


CASES: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any], Tensor]] = {
    "encoder": (
        _encoder,
        {
            "norm": nn.LayerNorm(16),
            "qkv": nn.Linear(16, 48),
            "out": nn.Linear(16, 16),
            "up": nn.Linear(16, 32),
            "down": nn.Linear(32, 16),
            "scale": torch.full((16,), 0.5),
        },
        torch.randn(2, 5, 16),
    ),
    "groups": (
        lambda m, x: m.norm(m.conv(x)).relu() + x.mean((2, 3), keepdim=True).exp(),
        {"conv": nn.Conv2d(4, 4, 3, padding=1), "norm": nn.GroupNorm(2, 4)},
        torch.randn(2, 4, 8, 8),
    ),
    "several outputs": (lambda m, x: (m.l(x), x.sum(-1), x > 0), {"l": nn.Linear(8, 8)}, torch.randn(2, 8)),
}


def _model(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    function, members, x = CASES[name]
    return Model(function, **copy.deepcopy(members)), x


def _in_fp32(program: Program) -> list[str]:
    """The nodes inside a program whose result is in FP32."""
    found = [n for n in record_shapes(program).graph.nodes if n.op != "output" and "tensor_meta" in n.meta]
    single = [n for n in found if isinstance(n.meta["tensor_meta"], TensorMetadata)]
    return [n.name for n in single if dtype_of(n) is torch.float32]


@pytest.mark.parametrize(("lane", "limit"), [(FP16, 6e-3), (BF16, 4e-2)])
@pytest.mark.parametrize(
    ("name", "rewrites"),
    [("encoder", 7), ("groups", 3), ("several outputs", 1)],
)
def test_nothing_is_left_in_fp32(name: str, rewrites: int, lane: Lane, limit: float) -> None:
    model, x = _model(name)
    before = program_of(model, x, lane=lane, on_top_of=BAKED)
    assert _in_fp32(before)
    result = check_pass(PureHalf(), model, x, rewrites=rewrites, lane=lane, on_top_of=BAKED, limit=limit)
    assert _in_fp32(result.program) == []
    assert [border.dtype for border in result.program.exit] == [border.dtype for border in before.exit]


def test_what_is_left_reads_as_written() -> None:
    model = Model(lambda m, x: x + m.l(m.n(x)), n=nn.LayerNorm(8), l=nn.Linear(8, 8))
    program = program_of(model, torch.randn(2, 8), lane=FP16, on_top_of=BAKED)
    assert "_to_copy" in text_of(program)
    result = apply_to_untouched(PureHalf(), program)
    targets = [node.target for node in calls(result.program.graph)]
    assert targets == [aten.layer_norm.default, aten.linear.default, aten.add.Tensor]
    assert result.program.entry[0].dtype is torch.float16


def test_other_passes_still_find_the_unrounded_weights() -> None:
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8))).eval()
    x = torch.randn(2, 3, 8, 8)
    late = program_of(model, x, lane=FP16, on_top_of=[*BAKED, PureHalf(), FoldConvBn()])
    early = program_of(model, x, lane=FP16, on_top_of=[*BAKED, FoldConvBn(), PureHalf()])
    assert [step.name for step in late.recipe] == ["bake-autocast", "pure-half", "fold-conv-bn"]
    (a,), (b,) = late.run(x), early.run(x)
    assert torch.allclose(a, b, rtol=1e-2, atol=1e-2)


def test_a_program_without_islands_is_left_alone() -> None:
    program = program_of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(1, 3, 8, 8), lane=FP16)
    baked = BakeAutocast().apply(program).program
    assert apply_to_untouched(PureHalf(), baked).rewrites == 0


@pytest.mark.parametrize(
    ("lane", "passes", "reason"),
    [
        (FP32, [], "the lane does not compute in mixed precision"),
        (FP16, [], "it still runs under autocast"),
    ],
)
def test_it_refuses_other_programs(lane: Lane, passes: list[Any], reason: str) -> None:
    program = program_of(nn.Linear(4, 4), torch.randn(2, 4), lane=lane, on_top_of=passes)
    assert PureHalf().why_not(program) == reason


class _KeepsItsNorm(nn.Module):
    """A model that takes one block out of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.norm(x.float())  # type: ignore[no-any-return]


def test_what_a_model_takes_out_of_autocast_stays_in_fp32() -> None:
    program = program_of(_KeepsItsNorm(), torch.randn(2, 8), lane=FP16, on_top_of=BAKED)
    assert str(PureHalf().why_not(program)).endswith("has to stay in FP32")


def test_so_does_what_it_casts_to_fp32_itself() -> None:
    model = Model(lambda m, x: m.l(m.l(x).float().softmax(-1)), l=nn.Linear(8, 8))
    program = program_of(model, torch.randn(2, 8), lane=FP16, on_top_of=BAKED)
    assert PureHalf().why_not(program) == "to has to stay in FP32"


class _Negates(PureHalf):
    """Spoils what comes out of norms."""

    def apply(self, program: Program) -> Result:
        result = super().apply(program)
        return spoilt(result, _negate_norms) if result.modified else result


def _negate_norms(module: fx.GraphModule) -> None:
    for node in calls(module, [aten.layer_norm.default]):
        with module.graph.inserting_after(node):
            negative = module.graph.call_function(aten.neg.default, (node,))
        node.replace_all_uses_with(negative)
        negative.replace_input_with(negative, node)


def test_the_check_catches_another_function() -> None:
    model, x = _model("encoder")
    with pytest.raises(AssertionError, match="the error is"):
        check_pass(_Negates(), model, x, rewrites=7, lane=FP16, on_top_of=BAKED, limit=6e-3)
