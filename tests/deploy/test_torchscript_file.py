"""The file for C++: the program's outputs, its border and its self-test, all readable without Python."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy.torchscript_file import ATTRIBUTES, write_torchscript
from ampopt.errors import ExportError
from ampopt.ir.program import Border, Program
from ampopt.ir.settings import Settings
from ampopt.passes import BakeAutocast, ChannelsLast, FoldConvBn, FuseConvOnednn, Script
from benchmarks.networks import EncDecMil18
from tests.helpers import BF16, Model, program_of, with_statistics

PASSES = (FoldConvBn(), ChannelsLast())


def _network() -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))


def _image(seed: int = 0) -> Tensor:
    return torch.rand(2, 3, 8, 10, generator=torch.Generator().manual_seed(seed))


def _written(program: Program, *inputs: Tensor, tolerance: float = 1e-6) -> Any:
    return torch.jit.load(io.BytesIO(write_torchscript(program, inputs, program.run(*inputs), tolerance)))


def _assert_same(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected, strict=True):
        assert (output.dtype, output.stride()) == (wanted.dtype, wanted.stride())
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("passes", [(), PASSES])
def test_a_file_computes_what_the_program_computes(passes: tuple[Any, ...]) -> None:
    program = program_of(_network(), _image(), on_top_of=passes)
    module = _written(program, _image())
    _assert_same(module([_image(1)]), program.run(_image(1)))


@pytest.mark.slow
def test_encdecmil18_can_be_written_at_a_reduced_size() -> None:
    image = torch.rand(1, 3, 32, 48)
    program = program_of(with_statistics(EncDecMil18()), image, on_top_of=PASSES)
    other = torch.rand(1, 3, 32, 48)
    _assert_same(_written(program, image)([other]), program.run(other))


def test_several_inputs_and_outputs_keep_their_order_and_dtypes() -> None:
    model = Model(lambda m, x, i: (m.conv(x)[:, i], i + 1, x > 0.5), conv=nn.Conv2d(3, 4, 1))
    inputs = (_image(), torch.tensor([2, 0]))
    program = program_of(model, *inputs)
    module, others = _written(program, *inputs), (_image(1), torch.tensor([3, 1]))
    _assert_same(module(list(others)), program.run(*others))


def test_conversions_at_the_border_are_in_the_file() -> None:
    program = program_of(_network().half(), _image().half())
    program = program.replace(
        entry=(Border(torch.float16, torch.channels_last),),
        exit=(Border(torch.float32, torch.channels_last),),
    )
    module = _written(program, _image())
    outputs = module([_image(1)])
    assert outputs[0].dtype is torch.float32
    assert outputs[0].is_contiguous(memory_format=torch.channels_last)
    _assert_same(outputs, program.run(_image(1)))


def test_the_casts_of_mixed_precision_are_in_the_file() -> None:
    program = program_of(_network(), _image(), lane=BF16, on_top_of=(FoldConvBn(), BakeAutocast()))
    _assert_same(_written(program, _image())([_image(1)]), program.run(_image(1)))


def test_the_self_test_and_the_settings_survive_freezing() -> None:
    program = program_of(_network(), _image()).replace(settings=Settings(tf32=True, search_algorithms=True))
    outputs = [program.run(_image())[0] * 1.001]
    module = torch.jit.load(io.BytesIO(write_torchscript(program, [_image()], outputs, 0.125)))
    assert all(hasattr(module, name) for name in ATTRIBUTES)
    _assert_same(module.self_test_inputs, [_image()])
    _assert_same(module.self_test_outputs, outputs)
    assert (module.tolerance, module.device) == (0.125, "cpu")
    assert module.tf32
    assert module.search_algorithms
    assert not list(module.buffers()), "not frozen: weights are still beside the graph"


def test_an_engine_stays_behind_and_the_graph_is_written() -> None:
    def engine(*tensors: Tensor) -> Sequence[Tensor]:
        raise AssertionError("the engine ran")

    program = program_of(_network(), _image())
    expected = program.run(_image())
    data = write_torchscript(program.replace(engine=engine), [_image()], expected, 1e-6)
    _assert_same(torch.jit.load(io.BytesIO(data))([_image()]), expected)
    scripted = program_of(_network(), _image(), on_top_of=(Script(),))
    assert scripted.engine is not None
    write_torchscript(scripted, [_image()], expected, 1e-5)


def test_an_output_that_is_an_input_does_not_share_its_memory() -> None:
    program = program_of(Model(lambda m, x: (x, m.conv(x)), conv=nn.Conv2d(3, 4, 1)), _image())
    image = _image()
    outputs = _written(program, image)([image])
    outputs[0].zero_()
    assert torch.equal(image, _image())


def test_writing_leaves_the_program_and_the_self_tests_tensors_alone() -> None:
    program, image = program_of(_network(), _image()), _image()
    code, weights = program.graph.code, {n: t.clone() for n, t in program.graph.named_buffers()}
    _written(program, image)
    assert program.graph.code == code
    assert all(torch.equal(t, weights[n]) for n, t in program.graph.named_buffers())
    assert torch.equal(image, _image())


def test_a_program_under_autocast_is_refused() -> None:
    program = program_of(_network(), _image(), lane=BF16)
    with pytest.raises(ExportError, match="autocast"):
        write_torchscript(program, [_image()], program.run(_image()), 0.1)


def test_weights_packed_for_onednn_are_refused() -> None:
    if (FuseConvOnednn().why_not(program := program_of(_network(), _image()))) is not None:
        pytest.skip("this torch has no oneDNN")
    packed = FuseConvOnednn().apply(program).program
    with pytest.raises(ExportError, match="portable"):
        write_torchscript(packed, [_image()], program.run(_image()), 0.1)


def test_an_operator_that_libtorch_does_not_have_is_refused_by_name() -> None:
    with torch.library._scoped_library("ampopt_test_file", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
        program = program_of(Model(lambda m, x: torch.ops.ampopt_test_file.twice(x) + 1), _image())
        with pytest.raises(ExportError, match=r"ampopt_test_file\.twice.*twice \(helpers\.py:\d+"):
            write_torchscript(program, [_image()], [_image() * 2 + 1], 0.1)


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ((), 1, "0 input tensors, and the program 1"),
        ((_image(), _image()), 1, "2 input tensors"),
        ((_image(),), 2, "2 output tensors, and the program 1"),
        ((_image()[:1],), 1, r"float32\[1, 3, 8, 10\]"),
    ],
)
def test_a_self_test_of_another_form_is_refused(
    inputs: tuple[Tensor, ...], outputs: int, reason: str
) -> None:
    program = program_of(_network(), _image())
    with pytest.raises(ExportError, match=reason):
        write_torchscript(program, inputs, program.run(_image()) * outputs, 0.1)


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_file_that_fails_its_own_self_test_is_not_written(factor: float) -> None:
    program = program_of(_network(), _image())
    with pytest.raises(ExportError, match="self-test"):
        write_torchscript(program, [_image()], [program.run(_image())[0] * factor], 1e-3)


def test_a_program_without_tensors_at_its_border_is_refused() -> None:
    program = program_of(Model(lambda m: m.weight + 1, weight=torch.ones(3)))
    with pytest.raises(ExportError, match="no tensor as an input"):
        write_torchscript(program, [], program.run(), 0.1)
