"""channels-last: another layout in memory, the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.engines.executable import executable
from ampopt.ir.aliases import joined
from ampopt.ir.graph import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, aten, calls, constant, copy_of
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.program import Program
from ampopt.ir.transform import Result
from ampopt.passes import BakeAutocast, ChannelsLast, FoldConvBn
from tests.helpers import (
    BF16,
    Model,
    check_pass,
    error_of,
    program_of,
    spoilt,
    targets_of,
    text_of,
    with_statistics,
)

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _check_weights_are_packed(program: Program) -> None:
    convolutions = list(calls(program.graph, CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS))
    assert convolutions
    for node in convolutions:
        weight = constant(program.graph, node.args[1])
        assert weight is not None
        assert weight.is_contiguous(memory_format=FORMATS[weight.dim()])


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv2d(4, 8, 3), (7, 8)),
        (nn.Conv2d(4, 8, 3, groups=2, padding=2, dilation=2), (7, 8)),
        (nn.ConvTranspose2d(4, 8, 3, stride=2, output_padding=1), (5, 6)),
        (nn.ConvTranspose2d(4, 8, 3, groups=2, bias=False), (5, 6)),
        (nn.Conv3d(4, 8, 3, stride=2), (5, 6, 7)),
        (nn.ConvTranspose3d(4, 8, 3, groups=2), (3, 4, 5)),
    ],
    ids=lambda value: str(value) if isinstance(value, nn.Module) else "",
)
def test_weight_and_input_are_laid_out_anew(layer: nn.Module, size: tuple[int, ...]) -> None:
    x, elsewhere = torch.randn(2, 4, *size), [torch.randn(1, 4, *[s + 1 for s in size])]
    result = check_pass(ChannelsLast(), nn.Sequential(layer, nn.ReLU()), x, rewrites=1, elsewhere=elsewhere)
    _check_weights_are_packed(result.program)
    assert [border.memory_format for border in result.program.entry] == [FORMATS[x.dim()]]
    (output,) = result.program.run(x)
    assert output.is_contiguous() or output.is_contiguous(memory_format=FORMATS[x.dim()])


def test_no_operator_is_added() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.Flatten())
    x = torch.randn(2, 3, 8, 8)
    result = check_pass(ChannelsLast(), model, x, rewrites=2)
    assert targets_of(result.program) == targets_of(program_of(model, x))


def test_feature_maps_stay_in_the_format_between_the_layers() -> None:
    model = with_statistics(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))
    )
    x = torch.randn(2, 3, 12, 12)
    program = check_pass(ChannelsLast(), model, x, rewrites=2).program
    module = copy_of(program.graph)
    results = [node for node in calls(module) if node.target is not aten.batch_norm.default]
    module.graph.output_node().args = (tuple(results),)
    module.recompile()
    for result in module(*[border.convert(x) for border in program.entry]):
        assert result.is_contiguous(memory_format=torch.channels_last)


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda y: y.view(y.shape[0], -1),
    "reshape": lambda y: y.reshape(y.shape[0], 2, 4, -1),
    "flatten": lambda y: y.flatten(1),
    "flatten in the middle": lambda y: y.flatten(1, 2),
    "unflatten": lambda y: y.unflatten(1, (2, 4)).flatten(2),
    "view after permute": lambda y: y.permute(0, 2, 3, 1).reshape(y.shape[0], -1, 8),
    "view_as": lambda y: y.view_as(torch.zeros(y.shape[0], y[0].numel())),
    "view of another dtype": lambda y: y.view(torch.int32),
    "pixel shuffle": lambda y: F.pixel_shuffle(y, 2),
    "channel shuffle": lambda y: F.channel_shuffle(y, 2),
    "matrix product": lambda y: y @ y.mT,
    "maximum with indices": lambda y: F.max_pool2d(y, 2, return_indices=True)[1],
    "arg max over everything": lambda y: y.argmax(),
    "boolean mask": lambda y: y * (y > 0),
    "cat of channels": lambda y: torch.cat([y, y[:, :1]], 1),
    "chunks": lambda y: torch.stack(y.chunk(2, 1)),
    "softmax": lambda y: y.softmax(1),
    "unfold": lambda y: F.unfold(y, 2),
    "roll": lambda y: y.roll(1, 3),
    "sum over the batch": lambda y: y.sum(0),
    "first image": lambda y: y[0],
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_what_follows_the_convolution_sees_the_same_tensor(head: Callable[[Tensor], Tensor]) -> None:
    model = Model(lambda m, x: head(m.conv(x)), conv=nn.Conv2d(3, 8, 3))
    check_pass(ChannelsLast(), model, torch.randn(2, 3, 8, 8), rewrites=1)


@pytest.mark.parametrize(
    "name", ["view after permute", "sum over the batch", "first image", "one row", "flatten"]
)
def test_an_output_that_is_no_feature_map_comes_contiguous(name: str) -> None:
    heads = HEADS | {"one row": lambda y: y[:, :, 0]}
    model, x = Model(lambda m, x: heads[name](m.conv(x)), conv=nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 8, 8)
    (output,) = ChannelsLast().apply(program_of(model, x)).program.run(x)
    assert output.dim() < 4
    assert output.is_contiguous()


def _joined(results: Sequence[Tensor]) -> int:
    """How many results have the memory of another one."""
    return len(results) - len({result.untyped_storage().data_ptr() for result in results})


def test_results_that_are_copies_in_the_usual_format_are_no_views_of_one_memory() -> None:
    def heads(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = m.conv(x).permute(0, 2, 3, 1)
        return y.reshape(2, -1, 8), y.reshape(2, 4, -1), y.reshape(-1, 8).relu()

    model, x = Model(heads, conv=nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 6, 6)
    result = check_pass(ChannelsLast(), model, x, rewrites=1)
    assert targets_of(result.program).count(aten.clone.default) == 1
    assert (_joined(model(x)), _joined(executable(result.program)(x))) == (0, 0)


@pytest.mark.parametrize("also", [lambda x: x + 1, lambda x: x.flatten().nonzero()])
def test_views_of_what_is_apart_from_another_result_stay_views(also: Callable[[Tensor], Tensor]) -> None:
    """The copy is of the result that has no other in its memory, and shapes may depend on values."""

    def heads(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = m.conv(x).permute(0, 2, 3, 1)
        return y.reshape(2, -1, 8), (z := y.reshape(2, 4, -1)), z.view(2, -1), also(x)

    model, x = Model(heads, conv=nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 6, 6)
    result = check_pass(ChannelsLast(), model, x, rewrites=1)
    assert targets_of(result.program).count(aten.clone.default) == 1
    assert joined(result.program.run(x)) == joined(model(x)) == {(1, 2)}


def test_results_that_are_one_memory_stay_so() -> None:
    model = Model(
        lambda m, x: ((y := m.conv(x).flatten(1).relu()), y.view(2, 8, -1)), conv=nn.Conv2d(3, 8, 3)
    )
    result = check_pass(ChannelsLast(), model, x := torch.randn(2, 3, 6, 6), rewrites=1)
    assert aten.clone.default not in targets_of(result.program)
    assert (_joined(model(x)), _joined(executable(result.program)(x))) == (1, 1)


def test_views_stay_right_where_capture_had_to_functionalize_the_graph() -> None:
    def add_to_a_view(m: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = m.conv(x)  # type: ignore[operator]
        y[:, 0] += 1
        return (y @ y.mT).view(y.shape[0], -1)

    model = Model(add_to_a_view, conv=nn.Conv2d(3, 8, 3))
    check_pass(ChannelsLast(), model, torch.randn(2, 3, 8, 8), rewrites=1)


def test_inputs_that_no_convolution_can_be_fed_from_keep_their_format() -> None:
    model = Model(
        lambda m, image, volume, vector: (m.conv(image) + vector.sum(), volume + 1), conv=nn.Conv2d(3, 4, 3)
    )
    inputs = torch.randn(1, 3, 6, 6), torch.randn(1, 2, 3, 4, 5), torch.randn(7)
    result = check_pass(ChannelsLast(), model, *inputs, rewrites=1)
    formats = [border.memory_format for border in result.program.entry]
    assert formats == [torch.channels_last, torch.contiguous_format, torch.contiguous_format]


def test_a_batch_that_is_laid_out_otherwise_by_its_caller_gives_the_same() -> None:
    model, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    program = check_pass(ChannelsLast(), model, x, rewrites=1).program
    expected = program.run(x)[0]
    for layout in (
        x.to(memory_format=torch.channels_last),
        x.mT.contiguous().mT,
        x[:, :, :, ::1].flip(3).flip(3),
    ):
        assert torch.equal(program.run(layout)[0], expected)


def test_it_works_on_baked_and_folded_programs() -> None:
    model = with_statistics(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    )
    x, before = torch.randn(2, 3, 10, 10), [BakeAutocast(), FoldConvBn()]
    result = check_pass(ChannelsLast(), model, x, rewrites=2, lane=BF16, on_top_of=before)
    assert {weight.dtype for weight in result.program.graph.buffers()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 1)], ids=["depthwise", "1x1"]
)
def test_a_weight_that_lies_either_way_still_gets_its_input_laid_out_once(layer: nn.Module) -> None:
    x = torch.randn(1, 4, 6, 6)
    program = ChannelsLast().apply(program_of(layer, x)).program
    assert [border.memory_format for border in program.entry] == [torch.channels_last]
    assert error_of(program, layer, [x]) < 2e-6
    assert ChannelsLast().apply(program).rewrites == 0


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv1d(3, 4, 3), (2, 3, 8)),
        (nn.Linear(4, 4), (2, 3, 5, 4)),
        (nn.MaxPool2d(2), (2, 3, 6, 6)),
    ],
    ids=["conv1d", "linear", "pooling"],
)
def test_a_program_without_2d_or_3d_convolutions_is_left_alone(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    assert check_pass(ChannelsLast(), model, torch.randn(shape), rewrites=0).declined == ()


def test_a_computed_weight_is_declined() -> None:
    model = Model(
        lambda m, x: F.conv2d(m.conv(x), m.w.sigmoid()), conv=nn.Conv2d(3, 3, 3), w=torch.randn(4, 3, 1, 1)
    )
    x = torch.randn(2, 3, 6, 6)
    result = check_pass(ChannelsLast(), model, x, rewrites=1)
    assert [(d.node, d.reason) for d in result.declined] == [("conv2d_1", "its weight is computed")]
    only = Model(lambda m, x: F.conv2d(x, m.w.sigmoid()), w=torch.randn(4, 3, 1, 1))
    result = check_pass(ChannelsLast(), only, x, rewrites=0)
    assert [(d.node, d.reason) for d in result.declined] == [("conv2d", "its weight is computed")]


@pytest.mark.parametrize(
    ("head", "node"),
    [
        pytest.param(lambda y: y.as_strided((2, 3), (3, 1)), "as_strided", id="as_strided"),
        pytest.param(
            lambda y: torch.view_as_complex(y.reshape(-1, 2)).abs(), "view_as_complex", id="view_as_complex"
        ),
        pytest.param(lambda y: torch.view_as_real(y * (1 + 1j)), "view_as_real", id="view_as_real"),
    ],
)
def test_a_program_that_reads_memory_by_strides_is_refused(
    head: Callable[[Tensor], Tensor], node: str
) -> None:
    model = Model(lambda m, x: head(m.conv(x)), conv=nn.Conv2d(3, 4, 3))
    program = program_of(model, torch.randn(2, 3, 6, 6))
    reason = str(ChannelsLast().why_not(program))
    assert reason.startswith(f"{node} (helpers.py:")
    assert reason.endswith("reads memory by its strides")


class _SwapsHeightAndWidth(ChannelsLast):
    def apply(self, program: Program) -> Result:
        result = super().apply(program)
        if not result.modified:
            return result
        (name, weight), *_ = list(result.program.graph.named_buffers())
        assert name in text_of(result.program)
        return spoilt(result, lambda module: setattr(module, name, weight.mT))


def test_the_check_catches_a_kernel_whose_height_and_width_are_swapped() -> None:
    with pytest.raises(AssertionError, match="the error is"):
        check_pass(
            _SwapsHeightAndWidth(), nn.Conv2d(3, 4, 3, bias=False), torch.randn(1, 3, 6, 6), rewrites=1
        )


@pytest.mark.parametrize(("groups", "dtype"), [(4, torch.bfloat16), (4, torch.float32), (1, torch.bfloat16)])
def test_a_convolution_that_pytorch_computes_wrongly_in_the_format_keeps_it(
    groups: int, dtype: torch.dtype
) -> None:
    model = nn.Conv3d(4, 8, 3, padding=1, groups=groups).to(dtype)
    program = program_of(model, torch.randn(1, 4, 2, 4, 3).to(dtype))
    reason = ChannelsLast().why_not(program)
    assert (reason is not None) is (groups > 1 and dtype is torch.bfloat16)


class _Computed(nn.Module):
    """Two convolutions of volumes of one channel; the weight of the second is computed."""

    def __init__(self, padding: str | int) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 1, 3, padding=padding, bias=False)
        self.w = nn.Parameter(torch.randn(2, 1, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        """What both give."""
        y = self.first(x)
        return F.conv3d(y, self.w * y.mean(), padding=1)


@pytest.mark.parametrize("padding", [1, "same"])
@pytest.mark.parametrize("lane", [FP32, BF16])
def test_volumes_of_one_channel_keep_the_format_where_pytorch_reads_what_nothing_has_written(
    padding: str | int, lane: Lane
) -> None:
    x = torch.randn(1, 1, 1, 4, 4)
    program = program_of(_Computed(padding), x, lane=lane)
    reason = ChannelsLast().why_not(program)
    assert (reason is not None) is (lane is BF16)
    assert reason is None or "wrongly in this format" in reason
    assert (
        ChannelsLast().why_not(program_of(nn.Conv3d(2, 4, 3), torch.randn(1, 2, 3, 4, 4), lane=lane)) is None
    )
