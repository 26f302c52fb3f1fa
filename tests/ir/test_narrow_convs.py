"""Convolutions that PyTorch computes wrongly below FP32 on a CPU stay in FP32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.engines.executable import executable
from ampopt.ir.casting import POLICIES
from ampopt.ir.emulated_half import EmulatedHalf
from ampopt.ir.graph import CONVOLUTIONS, calls, dtype_of
from ampopt.ir.lanes import mixed
from ampopt.ir.narrow_convs import why_it_may_crash
from ampopt.ir.numerics import relative_error
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.passes import BakeAutocast
from tests.helpers import Model, program_of

LOW = (torch.bfloat16, torch.float16)


def conv_of(geometry: dict[str, Any], *sizes: int, batched: bool = True) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(sizes) - 1]
    return kind(8, 8, **geometry).eval(), torch.randn(*((1,) if batched else ()), 8, *sizes)


def baked(model: nn.Module, x: Tensor, dtype: torch.dtype, policy: str = "amp") -> Program:
    return BakeAutocast(policy).apply(program_of(model, x, lane=mixed("amp", dtype))).program


def dtype_of_conv(program: Program) -> torch.dtype:
    (conv,) = calls(program.graph, CONVOLUTIONS)
    weight: Tensor = getattr(program.graph, str(conv.args[1]))
    return weight.dtype


NARROW: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "the last stage of a ResNet on 32x32": ({"kernel_size": 3, "stride": 2, "padding": 1}, (2, 2)),
    "a kernel as wide as the input": ({"kernel_size": (2, 3), "stride": 2}, (20, 3)),
    "a remainder": ({"kernel_size": 2, "stride": (1, 2)}, (20, 3)),
    "a signal": ({"kernel_size": 3, "stride": 3}, (4,)),
    "a volume": ({"kernel_size": (1, 1, 3), "stride": (1, 1, 2)}, (4, 4, 3)),
    "padding alone": ({"kernel_size": 1, "stride": 2, "padding": 1}, (5, 1)),
    "padding alone in rows": ({"kernel_size": (2, 1), "padding": (1, 0), "dilation": (2, 1)}, (1, 5)),
}
WIDE: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "an ordinary one": ({"kernel_size": 3, "stride": 2, "padding": 1}, (8, 8)),
    "1x1 on what was pooled": ({"kernel_size": 1}, (1, 1)),
    "one high, two wide": ({"kernel_size": 3, "stride": 2, "padding": 1}, (2, 4)),
    "no stride": ({"kernel_size": 3}, (3, 3)),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("geometry", "sizes"), NARROW.values(), ids=NARROW.keys())
def test_a_convolution_that_reads_what_nobody_wrote_stays_in_fp32(
    geometry: dict[str, Any], sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    model, x = conv_of(geometry, *sizes)
    program = baked(model, x, dtype)
    assert dtype_of_conv(program) is torch.float32
    for size in (1 << exponent for exponent in range(5, 18)):
        torch.full((size,), float("nan"))  # what free memory holds now
    assert relative_error(executable(program)(x)[0], model(x)) < torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("geometry", "sizes"), WIDE.values(), ids=WIDE.keys())
def test_every_other_convolution_is_lowered(
    geometry: dict[str, Any], sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert dtype_of_conv(baked(*conv_of(geometry, *sizes), dtype)) is dtype


@pytest.mark.parametrize(("name", "case"), [*NARROW.items(), *WIDE.items()], ids=[*NARROW, *WIDE])
def test_only_what_reads_padding_alone_may_crash(name: str, case: Any) -> None:
    model, x = conv_of(case[0], *case[1])
    reason = why_it_may_crash(program_of(model, x))
    assert (reason is not None) is name.startswith("padding alone")
    assert reason is None or "padding alone, where PyTorch has crashed" in reason


def test_a_lane_in_which_pytorch_may_crash_is_not_tried() -> None:
    geometry, sizes = NARROW["padding alone"]
    model, x = conv_of(geometry, *sizes)
    fast = ampopt.optimize(model, x, cache=False, budget_s=5)
    assert list(fast.report.lanes) == ["fp32"]
    (note,) = [note for note in fast.report.notes if "lane was not tried" in note]
    assert "padding alone, where PyTorch has crashed" in note
    assert relative_error(fast(x), model(x)) < 1e-5


def test_a_shape_at_which_it_may_crash_is_answered_by_the_original(all_kept: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(8, 8, 2, padding=1, dilation=2)).eval()
    options: dict[str, Any] = {"precision": "amp", "passes": "bake-autocast", "cache": False}
    with all_kept:
        fast = ampopt.optimize(model, torch.randn(1, 8, 16), progress=False, **options)
    assert fast.report.chosen == "amp"
    short = torch.randn(1, 8, 1)
    assert relative_error(fast(short), model(short)) < 1e-6
    assert fast.health.served_by_original == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_it_stays_so_under_every_policy_and_without_a_batch(policy: str) -> None:
    geometry, sizes = NARROW["a remainder"]
    model, x = conv_of(geometry, *sizes, batched=False)
    assert dtype_of_conv(baked(model, x, torch.bfloat16, policy)) is torch.float32


@pytest.mark.parametrize("dtype", LOW)
def test_all_that_reads_it_gets_what_autocast_gives(dtype: torch.dtype) -> None:
    """`lerp` takes one dtype alone, and autocast does not cast for it."""
    geometry, sizes = NARROW["a kernel as wide as the input"]
    narrow, x = conv_of(geometry, *sizes)
    model = Model(
        lambda m, x: torch.lerp(m.narrow(x), m.beside(x), 0.3), narrow=narrow, beside=conv_to(sizes)
    )
    program = baked(model, x, dtype)
    (lerp,) = calls(program.graph, [torch.ops.aten.lerp.Scalar])
    known = {node.name: node for node in record_shapes(program).graph.nodes}
    assert dtype_of(known[lerp.name]) is dtype
    assert relative_error(executable(program)(x)[0], model(x)) < 0.05


def conv_to(sizes: tuple[int, ...]) -> nn.Module:
    """A convolution that autocast lowers, with as many outputs as the narrow one has."""
    return nn.Sequential(nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(((sizes[0] - 2) // 2 + 1, 1)))


def test_a_model_that_stores_its_weights_below_fp32_keeps_them_so() -> None:
    geometry, sizes = NARROW["the last stage of a ResNet on 32x32"]
    conv, x = conv_of(geometry, *sizes)
    model = nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU()).eval().bfloat16()
    program = baked(model, x.bfloat16(), torch.bfloat16)
    assert dtype_of_conv(program) is torch.bfloat16
    assert executable(program)(x.bfloat16())[0].dtype is torch.bfloat16


def test_where_a_gpus_arithmetic_is_emulated_nothing_is_kept_back() -> None:
    geometry, sizes = NARROW["a remainder"]
    with EmulatedHalf():
        assert dtype_of_conv(baked(*conv_of(geometry, *sizes), torch.float16)) is torch.float16
    assert not EmulatedHalf.is_active()


@pytest.mark.gpu
def test_on_a_gpu_every_convolution_is_lowered() -> None:
    geometry, sizes = NARROW["a remainder"]
    model, x = conv_of(geometry, *sizes)
    assert dtype_of_conv(baked(model.cuda(), x.cuda(), torch.float16)) is torch.float16
