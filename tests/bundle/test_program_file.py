"""Programs go to JSON and safetensors and come back the same, bit for bit."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.bundle.program_file import read_program, write_program
from ampopt.bundle.stored_graph import read_graph
from ampopt.bundle.stored_weights import read_weights
from ampopt.errors import BundleError, ExportError
from ampopt.ir.graph import aten, calls, copy_of, finish, insert_call
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.own_autocast import FULL_PRECISION
from ampopt.ir.program import Program
from ampopt.ir.settings import Settings
from ampopt.ir.transform import Pass, replay
from ampopt.passes import BakeAutocast, ChannelsLast, FoldConvBn, FuseConvOnednn, Script
from benchmarks.networks import CropUNet, EncDecMil18
from tests.helpers import BF16, Model, check_graph, program_of, with_statistics

CPU = torch.device("cpu")


def stored_and_read(program: Program) -> Program:
    """The program after a way through the bytes of both files."""
    data, tensors = write_program(program)
    text = json.dumps(data, allow_nan=False)
    loaded = safetensors.torch.load(safetensors.torch.save(tensors))
    return read_program(json.loads(text), loaded, program.examples, device=program.device)


def check_round_trip(program: Program) -> Program:
    """Assert that everything a file holds comes back: text, weights with their strides, outputs, border."""
    read = stored_and_read(program)
    expected = copy_of(program.graph)
    for node in expected.graph.find_nodes(op="placeholder"):
        node.target = node.name  # inputs come by position: what the parameter was called is not in the file
    assert str(read.graph.graph) == str(expected.graph)
    assert read.graph.code == expected.graph.python_code("self").src
    check_graph(read)
    weights, again = dict(program.graph.named_buffers()), dict(read.graph.named_buffers())
    assert again.keys() == weights.keys()
    for name, weight in weights.items():
        assert (again[name].dtype, again[name].stride()) == (weight.dtype, weight.stride()), name
        assert torch.equal(torch.nan_to_num(again[name]), torch.nan_to_num(weight)), name
    border = (
        program.entry,
        program.exit,
        program.settings,
        program.lane,
        program.under_autocast,
        program.device,
    )
    assert (read.entry, read.exit, read.settings, read.lane, read.under_autocast, read.device) == border
    for a, b in zip(program.run(*program.examples), read.run(*read.examples), strict=True):
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    return read


def _many_arguments(m: Any, x: Tensor) -> Any:
    y = F.pad(x, (1, 1), value=-math.inf).masked_fill(F.pad(x, (1, 1)) > 1e9, math.nan)
    parts = torch.split(y, [3, y.shape[-1] - 3], dim=-1)
    z = F.gelu(x, approximate="tanh") + torch.einsum("bchw, bchw -> bchw", x, m.scale * x)
    ramp = torch.arange(0, 1, 0.25, device=x.device, dtype=torch.float64)
    values, indices = torch.topk(z.flatten(1), 2)
    return (
        parts,
        z.to(memory_format=torch.channels_last),
        ramp,
        values,
        indices,
        (z > 0) & (x > 0) | (x < -1),
        x.half(),
        x[:, -1:],
    )


SMALL: dict[str, Callable[[], tuple[nn.Module, Sequence[Tensor]]]] = {
    "every kind of argument": lambda: (
        Model(_many_arguments, scale=torch.tensor(0.5)),
        [torch.randn(2, 3, 4, 4)],
    ),
    "every dtype of weight": lambda: (
        Model(
            lambda m, x: [
                (x * m.f16 + m.bf16, x * m.f64),
                x.long() + m.i64,
                m.u8 + m.truth,
                m.nan * x,
            ],
            f16=torch.randn(3).half(),
            bf16=torch.randn(3).bfloat16(),
            f64=torch.randn((), dtype=torch.float64),
            i64=torch.tensor(7),
            u8=torch.tensor([[250]], dtype=torch.uint8),
            truth=torch.tensor([True, False]),
            nan=torch.tensor([math.nan, math.inf, -0.0]),
        ),
        [torch.randn(2, 3)],
    ),
    "a weight without elements": lambda: (
        Model(lambda m, x: torch.cat([x, m.none]), none=torch.empty(0, 3)),
        [torch.randn(2, 3)],
    ),
    "several inputs": lambda: (
        Model(lambda m, a, b: {"sum": a + b, "first": a}),
        [torch.randn(2), torch.randint(5, (2,))],
    ),
    "attention": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        [torch.randn(2, 5, 8)],
    ),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("lane", [FP32, BF16], ids=["fp32", "amp"])
def test_a_small_network_comes_back(name: str, lane: Lane) -> None:
    model, inputs = SMALL[name]()
    check_round_trip(program_of(model, *inputs, lane=lane))


@pytest.mark.parametrize(("lane", "passes"), [(FP32, ()), (BF16, (BakeAutocast(),))], ids=["fp32", "amp"])
def test_a_recurrent_network_comes_back(lane: Lane, passes: tuple[Pass, ...]) -> None:
    model = nn.LSTM(4, 6, num_layers=2, batch_first=True)
    check_round_trip(program_of(model, torch.randn(2, 5, 4), lane=lane, on_top_of=passes))


def _with_own_autocast(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.conv(x)
    with torch.autocast("cpu", enabled=False):
        z = y.float() @ y.float().mT
    return z + y.to(z.dtype)


def test_what_the_model_takes_out_of_autocast_is_marked_in_the_file() -> None:
    model = Model(_with_own_autocast, conv=nn.Conv2d(3, 4, 1)).eval()
    program = program_of(model, torch.randn(1, 3, 6, 6))
    marks = [FULL_PRECISION in node.meta for node in calls(program.graph)]
    assert any(marks)
    assert not all(marks)
    read = check_round_trip(program)
    assert [FULL_PRECISION in node.meta for node in calls(read.graph)] == marks


def test_a_program_without_weights_or_calls_comes_back() -> None:
    check_round_trip(program_of(Model(lambda m, x: x), torch.randn(2)))


PASSES: dict[str, tuple[Lane, tuple[Pass, ...]]] = {
    "fp32 as captured": (FP32, ()),
    "fp32 after passes": (FP32, (FoldConvBn(), ChannelsLast())),
    "amp after passes": (BF16, (BakeAutocast(), FoldConvBn())),
}


@functools.cache
def _captured(make: Callable[[], nn.Module]) -> Program:
    return program_of(with_statistics(make()), torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("steps", PASSES)
@pytest.mark.parametrize("make", [EncDecMil18, CropUNet])
def test_our_workloads_come_back(make: Callable[[], nn.Module], steps: str) -> None:
    lane, passes = PASSES[steps]
    check_round_trip(replay(passes, lane.start(_captured(make))))


def _torchvision(name: str) -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    if name == "vit":
        vit: nn.Module = models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5)
        return vit
    if name == "swin":
        swin: nn.Module = models.SwinTransformer([4, 4], 24, [2, 1], [2, 4], [4, 4], num_classes=5)
        return swin
    if name == "swin v2":
        block = models.swin_transformer.SwinTransformerBlockV2
        merging = models.swin_transformer.PatchMergingV2
        sizes = [4, 4], 24, [2, 1], [2, 4], [4, 4]
        second: nn.Module = models.SwinTransformer(*sizes, block=block, downsample_layer=merging)
        return second
    if name == "shufflenet":
        shuffle: nn.Module = models.ShuffleNetV2([2, 2, 2], [24, 48, 96, 192, 256])
        return shuffle
    if name == "densenet":
        dense: nn.Module = models.DenseNet(block_config=(2, 3, 2))
        return dense
    options = {"weights_backbone": None} if name.startswith("deeplab") else {}
    return models.get_model(name, weights=None, **options)  # type: ignore[no-any-return]


LARGER = ("deeplabv3_mobilenet_v3_large",)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in LARGER]


@pytest.mark.parametrize("name", ["resnet18", "vit", "swin", "swin v2", "densenet", "shufflenet", *SLOW])
def test_torchvision_networks_come_back_with_folded_norms_and_baked_casts(name: str) -> None:
    side = 64 if name in LARGER else 32
    model, x = with_statistics(_torchvision(name)), torch.randn(1, 3, side, side)
    check_round_trip(program_of(model, x, lane=BF16, on_top_of=(BakeAutocast(), FoldConvBn())))


def test_writing_again_what_was_read_gives_the_same_file() -> None:
    program = program_of(with_statistics(CropUNet()), torch.randn(1, 3, 16, 16))
    first, tensors = write_program(program)
    again, same = write_program(stored_and_read(program))
    assert again == first
    assert same.keys() == tensors.keys()


def test_passes_apply_to_a_program_that_was_read() -> None:
    program = program_of(with_statistics(CropUNet()), torch.randn(1, 3, 16, 16))
    here, there = FoldConvBn().apply(program), FoldConvBn().apply(stored_and_read(program))
    assert there.rewrites == here.rewrites > 0
    a, b = here.program.run(*program.examples)[0], there.program.run(*program.examples)[0]
    assert torch.equal(a, b)


def test_one_tensor_under_two_names_is_stored_once_and_read_as_one() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    program = program_of(Model(lambda m, x: x @ m.weight, weight=weight), torch.randn(2, 3))
    module = copy_of(program.graph)
    (name,) = dict(module.named_buffers())
    module.register_buffer("twin", getattr(module, name))
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        twin = module.graph.get_attr("twin")
    (result,) = output.all_input_nodes
    output.replace_input_with(result, insert_call(module, output, aten.matmul.default, result, twin))
    program = program.with_graph(finish(module))
    _, tensors = write_program(program)
    assert tensors.keys() == {name}
    read = stored_and_read(program)
    assert read.graph.twin is getattr(read.graph, name)
    assert torch.equal(read.run(*program.examples)[0], program.run(*program.examples)[0])


def test_a_slice_of_a_large_tensor_stores_its_own_elements_only() -> None:
    program = program_of(Model(lambda m, x: x + m.w, w=torch.randn(3)), torch.randn(3))
    module = copy_of(program.graph)
    (name,) = dict(module.named_buffers())
    setattr(module, name, torch.arange(300.0).view(3, 100)[:, 0])
    program = program.with_graph(finish(module))
    data, tensors = write_program(program)
    assert tensors[name].untyped_storage().nbytes() == 12
    assert data["weights"][name]["strides"] == [1]
    read = stored_and_read(program)
    assert torch.equal(read.run(*program.examples)[0], program.run(*program.examples)[0])


def test_a_transposed_weight_keeps_its_order_in_memory() -> None:
    program = program_of(Model(lambda m, x: x @ m.w, w=torch.randn(5, 3).t()), torch.randn(2, 3))
    (weight,) = dict(check_round_trip(program).graph.named_buffers()).values()
    assert weight.stride() == (1, 3)


def test_settings_come_back() -> None:
    program = program_of(nn.Conv2d(1, 1, 3), torch.randn(1, 1, 4, 4))
    settings = Settings(tf32=True, search_algorithms=True)
    check_round_trip(program.replace(settings=settings, lane=BF16, under_autocast=True))


def test_what_depends_on_the_device_is_made_for_the_readers_device() -> None:
    program = program_of(
        Model(lambda m, x: x + torch.arange(3.0, device=x.device) * m.w, w=torch.ones(3)), torch.randn(3)
    )
    data, tensors = write_program(program)
    (arange,) = [n for n in data["nodes"] if n.get("operator", "").startswith("aten.arange")]
    assert arange["kwargs"]["device"] == {"device": "own"}
    elsewhere = torch.device("meta")
    weights = read_weights(data["weights"], tensors, elsewhere, "file")
    assert {weight.load().device for weight in weights.values()} == {elsewhere}
    graph = read_graph(data["nodes"], [data["outputs"][0]["node"]], weights.keys(), elsewhere, "file")
    assert [n.kwargs["device"] for n in graph.nodes if "device" in n.kwargs] == [elsewhere]


def test_operators_of_one_machine_are_refused_by_name() -> None:
    program = program_of(nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8), on_top_of=(FuseConvOnednn(),))
    with pytest.raises(ExportError, match=r"node '_?convolution_pointwise.*' ?.*mkldnn.*no operator of ATen"):
        write_program(program)


def test_cudnn_operators_are_refused_although_aten_lists_them() -> None:
    program = program_of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(1, 3, 8, 8))
    module = copy_of(program.graph)
    relu = next(n for n in module.graph.nodes if n.target is aten.relu.default)
    (conv,) = relu.all_input_nodes
    call = (*conv.args, [1, 1], [0, 0], [1, 1], 1)
    relu.replace_all_uses_with(insert_call(module, relu, aten.cudnn_convolution_relu.default, *call))
    with pytest.raises(ExportError, match=r"node 'cudnn_convolution_relu.*one machine"):
        write_program(program.with_graph(finish(module)))


def test_functions_that_are_no_operators_are_refused() -> None:
    program = program_of(Model(lambda m, x: x.relu()), torch.randn(3))
    module = copy_of(program.graph)
    output = module.graph.output_node()
    (relu,) = output.all_input_nodes
    output.replace_input_with(relu, insert_call(module, output, torch.sin, relu))
    with pytest.raises(ExportError, match=r"node 'sin'.*no operator of ATen"):
        write_program(program.with_graph(finish(module)))


def test_an_engine_is_refused() -> None:
    program = program_of(nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8))
    with pytest.raises(ExportError, match="engine"):
        write_program(Script().apply(program).program)


def test_sparse_and_complex_weights_are_refused() -> None:
    for weight in (torch.eye(3).to_sparse(), torch.eye(3, dtype=torch.complex64)):
        program = program_of(Model(lambda m, x: x @ m.w, w=torch.eye(3)), torch.randn(3))
        module = copy_of(program.graph)
        (name,) = dict(module.named_buffers())
        setattr(module, name, weight)
        with pytest.raises(ExportError, match=f"weight '{name}'"):
            write_program(program.with_graph(module))


def test_examples_of_another_kind_than_the_inputs_are_refused() -> None:
    program = program_of(nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8))
    data, tensors = write_program(program)
    for examples in ([], [torch.randn(1, 3, 8, 9)], [torch.randn(1, 3, 8, 8).double()]):
        with pytest.raises(BundleError, match=r"program\.json, input"):
            read_program(data, tensors, examples, device=CPU)
