"""Lowering: what a model writes in place, to views and to aliases, comes out right and functional."""

from __future__ import annotations

from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.errors import CaptureError
from ampopt.ir.graph import calls
from ampopt.ir.lowering import _is_plain
from ampopt.ir.own_autocast import FULL_PRECISION
from ampopt.ir.signature import flatten_outputs
from ampopt.passes import ChannelsLast
from tests.helpers import BF16, Model, check_graph, program_of, with_statistics
from tests.support.planted import captured_of

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def conv() -> nn.Conv2d:
    return nn.Conv2d(3, 3, 3, padding=1)


def _view_write(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y[:, 0] += 1
    y[:, 1].mul_(2)
    y.select(1, 2).zero_()
    out: Tensor = y.relu()
    return out


def _alias_then_write(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    alias = F.dropout(y, 0.5, m.training)
    alias.add_(1)
    out: Tensor = y * 2
    return out


def _write_to_what_a_dropout_returned(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    alias = F.alpha_dropout(F.dropout2d(y, 0.5, m.training), 0.5, m.training)
    alias.add_(1)
    return y * 2, alias


def _residual_then_silu(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    z = y + x
    kept = z.view(-1)
    F.silu(z, inplace=True)
    out: Tensor = kept.view_as(z) + y
    return out


def _write_after_read(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    before = y * 3
    y.relu_()
    out: Tensor = before + y
    return out


def _write_to_a_broadcast(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    total = torch.zeros_like(y)
    for _ in range(3):
        total += y
        y = y.transpose(2, 3)
    return total


def _fill_a_canvas(m: Any, x: Tensor) -> Tensor:
    canvas = x.new_zeros(2, 3, 12, 12)
    canvas[:, :, 2:10, 2:10] = m.conv(x)
    canvas[:, :, 0].fill_(7)
    return canvas


def _write_through_two_names(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    a, b = y.chunk(2, dim=2)
    a.add_(b)
    b.sub_(a)
    out: Tensor = y.clamp_(min=-1)
    return out


def _write_to_windows(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y.unfold(3, 2, 2).add_(1)  # of eight columns
    out: Tensor = y * 2
    return out


def _narrower_than_what_is_added(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x).to(torch.bfloat16).clone()
    y += m.conv(x)  # stays bfloat16; `add` would give float32
    out: Tensor = y * 3
    return out


def _bits_wrap_around(m: Any, x: Tensor) -> Tensor:
    y = (x.clamp(0, 1) * 255).to(torch.uint8).clone()
    y += torch.full((8,), 200)  # stays uint8 and wraps; `add` would give int64
    out: Tensor = m.conv(y.float())
    return out


def _comparisons_are_numbers(m: Any, x: Tensor) -> Tensor:
    y, z = m.conv(x), m.conv(x)
    out: Tensor = y.gt_(0) + z.lt_(1)  # 0, 1 or 2; `gt` and `lt` would give booleans, whose sum is one
    return out


def _negations_are_numbers(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x).relu()
    out: Tensor = -y.logical_not_()  # `neg` refuses booleans
    return out


@pytest.mark.parametrize(
    "function",
    [
        _view_write,
        _alias_then_write,
        _write_to_what_a_dropout_returned,
        _residual_then_silu,
        _write_after_read,
        _write_to_a_broadcast,
        _fill_a_canvas,
        _write_through_two_names,
        _write_to_windows,
        _narrower_than_what_is_added,
        _bits_wrap_around,
        _comparisons_are_numbers,
        _negations_are_numbers,
    ],
)
def test_writing_in_place_stays_right(function: Any) -> None:
    model = Model(function, conv=conv()).eval()
    with torch.no_grad():
        expected = model(X)
    kept = X.clone()
    program = captured_of(model, X)[1].program
    check_graph(program)
    for found, wanted in zip(program.run(X), flatten_outputs(expected)[0], strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(kept, X)


def test_an_inplace_activation_is_renamed_and_no_more_is_decomposed() -> None:
    model = with_statistics(nn.Sequential(conv(), nn.BatchNorm2d(3), nn.ReLU(inplace=True)))
    _, captured = captured_of(model, X)
    code = captured.program.graph.code
    assert "aten.relu.default" in code
    assert "aten.batch_norm.default" in code
    assert "aten.relu_" not in code


def _with_own_autocast(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    with torch.autocast("cpu", enabled=False):
        low, high = y.float().aminmax(dim=1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = high - low
    out: Tensor = z + y.mean(1)
    return out


def _with_gradients_on(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        y = m.conv(x)
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            z = y.exp()
    return y.detach() + 1, z.detach().mul(2)


def test_a_block_in_which_gradients_are_on_or_off_is_written_out_in_its_place() -> None:
    original, captured = captured_of(Model(_with_gradients_on, conv=conv()), X)
    graph = captured.program.graph.graph
    assert not any("wrap_with" in str(node.target) for node in graph.nodes)
    marked = {str(node.target) for node in graph.nodes if FULL_PRECISION in node.meta}
    assert "aten.exp.default" in marked
    assert "aten.conv2d.default" not in marked
    for found, expected in zip(captured.program.run(X), original(X), strict=True):
        assert torch.equal(found, expected)


def test_a_block_under_the_models_own_autocast_is_written_out_in_its_place() -> None:
    original, captured = captured_of(Model(_with_own_autocast, conv=conv()), X)
    nodes = list(calls(captured.program.graph))
    assert all(isinstance(node.target, torch._ops.OpOverload) or node.target is getitem for node in nodes)
    marked = [str(node.target) for node in nodes if FULL_PRECISION in node.meta]
    assert "aten.aminmax.default" in marked
    assert "aten.sub.Tensor" not in marked  # the innermost autocast decides
    assert "aten.conv2d.default" not in marked
    with torch.no_grad():
        (found,) = captured.program.run(X)
        assert torch.equal(found, original(X))


def _zero_copies(m: Any, x: Tensor) -> Any:
    y = m.conv(x).unsqueeze(1).expand(-1, 2, -1, -1, -1)
    y[..., :1].zero_()
    return y


def _zero_one_copy(m: Any, x: Tensor) -> Any:
    y = m.conv(x).unsqueeze(1).expand(-1, 2, -1, -1, -1)
    y[:, 0].zero_()
    return y


def _zero_windows(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    y.unfold(3, 4, 2)[..., 1:].zero_()
    return y * 2


def _zero_a_part(m: Any, x: Tensor) -> Any:
    y = m.conv(x).expand(2, -1, -1, -1)  # which repeats nothing
    y.unfold(3, 2, 2)[..., 1:].zero_()
    y.transpose(1, 3)[:, ::2].add_(1)
    return y * 2


@pytest.mark.parametrize("function", [_zero_copies, _zero_one_copy, _zero_windows])
def test_a_write_to_elements_that_share_memory_is_refused(function: Any) -> None:
    with pytest.raises(CaptureError, match="elements share memory"):
        captured_of(Model(function, conv=conv()), X)


def test_a_write_to_parts_that_do_not_overlap_stays_right() -> None:
    original, captured = captured_of(Model(_zero_a_part, conv=conv()), X)
    with torch.no_grad():
        assert torch.equal(captured.program.run(X)[0], original(X))


@pytest.mark.parametrize(("size", "step"), [(3, 3), (2, 3)])
def test_a_write_to_windows_with_gaps_is_refused(size: int, step: int) -> None:
    """PyTorch's functional form makes what is in no window 0."""

    def writes(m: Any, x: Tensor) -> Any:
        y = m.conv(x)
        y.unfold(3, size, step)[0].add_(1)
        return y

    with pytest.raises(CaptureError, match="part of a tensor by unfold"):
        captured_of(Model(writes, conv=conv()), X)


def _cast_to_own_dtype(m: Any, x: Tensor) -> Any:
    y = m.conv(x).float()
    z = y + 1
    z[:, 0] = 2
    return torch.complex(y, z).abs()


def _cast_behind_a_block(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        y = m.conv(x)
    z = y.to(torch.float32).clone()
    z[..., :1] += z[..., -1:]
    return F.interpolate(z, scale_factor=2.0, mode="bilinear", antialias=True)


def _cast_to_a_device(m: Any, x: Tensor) -> Any:
    y = m.conv(x).to("cpu", torch.float32)
    z = x * 2
    z[0] -= 1
    return torch.complex(y, z).abs()


@pytest.mark.parametrize("function", [_cast_to_own_dtype, _cast_behind_a_block, _cast_to_a_device])
def test_a_cast_that_has_work_to_do_under_autocast_alone_stays(function: Any) -> None:
    original, captured = captured_of(Model(function, conv=conv()), X)
    with torch.no_grad():
        assert torch.equal(captured.program.run(X)[0], original(X))
        (low,) = BF16.start(captured.program).run(X)  # of a dtype that these operators do not take
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.allclose(low, original(X), atol=0.05)


def test_a_copy_that_the_caller_gets_is_one_in_a_graph_made_functional() -> None:
    def copied(m: Any, x: Tensor) -> Any:
        y = m.conv(x)
        y[0] = 1
        z = y.to(torch.float32, copy=True)
        return y, z, z.to(torch.float32, copy=True).view(-1)

    outputs = captured_of(Model(copied, conv=conv()), X)[1].program.run(X)
    assert len({output.data_ptr() for output in outputs}) == 3


def _cast_then_write(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    y.float()[:, 0] = 2  # the same tensor, so a write to it
    return y + 1


def test_a_cast_whose_result_is_written_to_stays_one_tensor() -> None:
    original, captured = captured_of(Model(_cast_then_write, conv=conv()), X)
    with torch.no_grad():
        assert torch.equal(captured.program.run(X)[0], original(X))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [{"size": (5, 1)}, {"scale_factor": (0.5, 0.125)}])
def test_antialiasing_to_one_column_is_right_with_the_channel_innermost(mode: str, size: Any) -> None:
    model = Model(lambda m, x: F.interpolate(m.conv(x), mode=mode, antialias=True, **size), conv=conv())
    original, captured = captured_of(model, X)
    program = ChannelsLast().apply(captured.program).program
    with torch.no_grad():
        assert torch.allclose(program.run(X)[0], original(X), atol=1e-5)


@torch.library.custom_op("test_lowering::half_of", mutates_args=())
def half_of(x: Tensor) -> Tensor:
    """The first half of the columns, of which its shape function knows nothing."""
    return x[..., : x.shape[-1] // 2].clone()


half_of.register_fake(torch.empty_like)


def test_a_shape_that_the_export_gets_wrong_is_refused() -> None:
    wrong = r"shape \[2, 3, 8, 4\], where PyTorch's export expects \[2, 3, 8, 8\]"
    with pytest.raises(CaptureError, match=wrong):
        captured_of(Model(lambda m, x: half_of(x) + 1), X)
    right = Model(lambda m, x: (half_of(x).sum(), x[x > 0]))  # a size that depends on values is no wrong one
    assert len(captured_of(right, X)[1].program.run(X)) == 2


def test_what_is_written_to_a_cast_that_does_nothing_is_written_to_its_source() -> None:
    def writes(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        y.type_as(y).add_(1)
        y.to(y.dtype).mul_(2)
        out: Tensor = y
        return out

    model, x = Model(writes, conv=nn.Conv2d(3, 4, 1)).eval(), torch.randn(1, 3, 4, 4)
    with torch.no_grad():
        assert torch.allclose(program_of(model, x).run(x)[0], model(x))


@pytest.mark.parametrize(
    ("weight", "is_plain"),
    [
        (torch.randn(4, 3, 2, 2), True),
        (torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last), True),
        (torch.randn(4, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d), True),
        (torch.randn(()), True),
        (torch.randn(1).expand(8), False),
        (torch.randn(16)[8:], False),
        (torch.randn(16)[::2], False),
        (torch.randn(8, 8).T, False),
        (torch.randn(4, 8, 3, 3)[:, :4], False),
    ],
)
def test_only_a_tensor_that_is_all_of_its_memory_is_plain(weight: Tensor, is_plain: bool) -> None:
    assert _is_plain(weight) is is_plain
