"""openvino: OpenVINO runs the program."""

from __future__ import annotations

import copy
import importlib.util
import json
import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.deploy.recipe_file import read_recipe, write_recipe
from ampopt.engines.executable import executable
from ampopt.engines.onnx_program import plain_model
from ampopt.errors import AmpoptError
from ampopt.ir.graph import copy_of
from ampopt.ir.lanes import FP32
from ampopt.ir.program import Program
from ampopt.ir.transform import Result, replay
from ampopt.ort import openvino_session
from ampopt.ort.openvino_division import keep_divisions
from ampopt.passes import BakeAutocast, ChannelsLast, FoldConvBn, Openvino, openvino
from tests.helpers import (
    BF16,
    FP16,
    Model,
    Unpooling,
    apply_to_untouched,
    check_keeps_nan,
    check_outputs,
    program_of,
    several_kinds,
    with_statistics,
)

pytest.importorskip("openvino")
pytest.importorskip("onnxscript")


@pytest.fixture(autouse=True)
def quick(exports_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sweep of the options finds does not matter here."""
    monkeypatch.setattr(openvino, "TUNING_S", 0.02)


def activations(x: Tensor) -> tuple[Tensor, ...]:
    return x.relu(), x.clamp(0, 6), x.clamp(min=0.5), x.sigmoid(), torch.nn.functional.hardsigmoid(x)


def outputs(m: Any, x: Tensor) -> tuple[Any, ...]:
    """One twice, an input, one without dimensions, integers and booleans."""
    y = m.a(x)
    return y, y, x, y.sum(), {"max": x.max(1), "mask": x > 0}


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one output": (several_kinds, (2, 3, 10, 10)),
    "several outputs": (lambda: Model(outputs, a=nn.Linear(4, 4)), (3, 4)),
    "an input that nothing reads": (lambda: Model(lambda m, x: torch.ones(3)), (3, 4)),
    "activations": (lambda: Model(lambda m, x: activations(m.a(x)), a=nn.Conv2d(3, 4, 1)), (1, 3, 5, 5)),
    "attention": (lambda: Model(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2)), (3, 2, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_computes_what_the_model_does(name: str) -> None:
    build, shape = MODELS[name]
    model, x = build().eval(), torch.randn(shape)
    program = program_of(model, x)
    result = apply_to_untouched(Openvino(), program)
    assert result.rewrites == 1
    assert result.program.graph is program.graph
    assert result.program.engine is not None
    check_outputs(Openvino.numerics, program, result.program, model, [x], FP32)
    check_keeps_nan(result.program, model, [x], FP32)


def test_it_runs_rewritten_programs() -> None:
    model, x = several_kinds(), torch.randn(2, 3, 10, 10)
    program = program_of(model, x, on_top_of=(FoldConvBn(), ChannelsLast()))
    check_outputs(Openvino.numerics, program, Openvino().apply(program).program, model, [x], FP32)


def _regnet() -> nn.Module:
    """A RegNetY-400MF with 6 of its 16 blocks: each width, and one block after another of the same."""
    regnet = pytest.importorskip("torchvision.models.regnet")
    blocks = regnet.BlockParams([1, 1, 2, 2], [48, 104, 208, 440], [8] * 4, [1.0] * 4, [2] * 4, 0.25)
    found: nn.Module = regnet.RegNet(blocks, num_classes=10)
    return found


def _mobilenet() -> nn.Module:
    found: nn.Module = pytest.importorskip("torchvision.models").mobilenet_v3_small(num_classes=10)
    return found


@pytest.mark.parametrize("make", [_mobilenet, _regnet])
def test_networks_of_torchvision_are_right_and_keep_nan(make: Callable[[], nn.Module]) -> None:
    model, x = with_statistics(make()), torch.randn(1, 3, 64, 64)
    program = program_of(model, x, on_top_of=(FoldConvBn(),))
    done = Openvino().hurried().apply(program).program
    check_outputs(Openvino.numerics, program, done, model, [x], FP32)
    check_keeps_nan(done, model, [x], FP32)


def test_float32_stays_float32_and_denormal_numbers_stay() -> None:
    model, tiny = Model(lambda m, x: (x * 0.5, m.a(x)), a=nn.Linear(16, 4)).eval(), torch.full((2, 16), 1e-39)
    done = Openvino().apply(program_of(model, tiny)).program
    assert torch.equal(done.run(tiny)[0], tiny * 0.5)
    assert (tiny * 0.5 > 0).all()  # nor does this thread flush them now
    x = 1 + torch.rand(2, 16) * 2**-10  # all the same in bfloat16, and nearly so in float16
    assert torch.allclose(done.run(x)[1], model(x)[1], rtol=1e-5, atol=1e-5)


TINY = torch.tensor([0.0, 1e-45, 1e-40, 1e-39, 9e-39, 1.2e-38, 1e-37, 1e-30, 0.5, 1.0, 1e20, 1e38, 3e38])

QUOTIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hypot": torch.hypot,
    "atan2": torch.atan2,
    "angle": lambda a, b: torch.complex(a, b).angle(),
    "a quotient of what is not zero": lambda a, b: a / torch.where(b == 0, 1.0, b),
    "a quotient by a denormal number": lambda a, b: (a - b) / 1e-39,
    "a quotient by a huge number": lambda a, b: (a - b) / 3e38,
    "sinc": lambda a, b: torch.sinc(a - b),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b.abs() + 1e-39),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_what_divides_denormal_numbers_is_as_in_eager(name: str) -> None:
    numbers = torch.cat([TINY, -TINY[1:]])
    a, b = (each.reshape(1, -1) for each in torch.meshgrid(numbers, numbers, indexing="ij"))
    model = Model(lambda m, a, b: QUOTIENTS[name](a, b))
    got = Openvino(options=()).apply(program_of(model, a, b)).program.run(a, b)[0]
    eager, least = model(a, b), torch.finfo(torch.float32).tiny
    is_right = torch.isclose(got, eager, rtol=1e-5, atol=0, equal_nan=True)
    assert (is_right | ((got.abs() <= least) & (eager.abs() <= least))).all()


def test_a_quotient_by_an_ordinary_constant_stays_a_product() -> None:
    model, x = Model(lambda m, x, y: (x / 255.0) / y), torch.rand(2, 3)
    read = openvino_session.openvino().Core().read_model(plain_model(program_of(model, x, x).graph, (x, x)))
    assert keep_divisions(read) == 1


def needs_bf16() -> None:
    if openvino_session.why_not_precision("bf16") is not None:
        pytest.skip("this processor does not compute in bfloat16")


def test_an_amp_lane_is_computed_in_its_dtype() -> None:
    needs_bf16()
    model, x = several_kinds(), torch.randn(2, 3, 10, 10)
    program = program_of(model, x, lane=BF16, on_top_of=[BakeAutocast(), FoldConvBn()])
    result = apply_to_untouched(Openvino(), program)
    check_outputs(BakeAutocast.numerics, program, result.program, model, [x], BF16)
    check_keeps_nan(result.program, model, [x], BF16)
    assert isinstance(result.replay, Openvino)
    assert dict(result.replay.options or ())["precision"] == '"bf16"'
    assert [t.dtype for t in result.program.run(x)] == [t.dtype for t in program.run(x)]


def test_its_replay_has_the_options_and_is_right_for_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, elsewhere = several_kinds(), torch.randn(2, 3, 10, 10), torch.randn(1, 3, 12, 8)
    step = Openvino().apply(program_of(model, x)).replay
    assert isinstance(step, Openvino)
    assert dict(step.options or ())["precision"] == '"f32"'

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a replay measures nothing")

    monkeypatch.setattr(openvino, "tune_openvino", refuse)
    there = program_of(model, elsewhere)
    replayed = replay(read_recipe(json.loads(json.dumps(write_recipe((step,))))), there)
    assert replayed.recipe == (step,)
    check_outputs(Openvino.numerics, there, replayed, model, [elsewhere], FP32)


def test_what_does_not_fit_into_the_time_that_is_left_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openvino, "tune_openvino", lambda *_, **__: pytest.fail("measured"))
    model, x = several_kinds(), torch.randn(2, 3, 10, 10)
    program = program_of(model, x)
    result = Openvino().within(openvino.TUNING_S).apply(program)
    check_outputs(Openvino.numerics, program, result.program, model, [x], FP32)
    assert any("default options" in hint for hint in result.hints)
    assert isinstance(result.replay, Openvino)
    assert result.replay == Openvino(result.replay.options)
    assert result.replay.within(1.0) is result.replay


def test_hurried_it_runs_with_default_options_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino, "tune_openvino", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr(openvino, "TUNING_S", 3.0)
    model, x = several_kinds(), torch.randn(2, 3, 10, 10)
    program, step = program_of(model, x), Openvino().hurried()
    assert step.expected_seconds(program) < Openvino().expected_seconds(program) - 2
    result = step.apply(program)
    check_outputs(Openvino.numerics, program, result.program, model, [x], FP32)
    assert any("default options" in hint for hint in result.hints)
    (again,) = read_recipe(write_recipe((result.replay or step,)))
    assert isinstance(again, Openvino)
    assert again == result.replay
    assert again.hurried() == again


def test_a_second_apply_does_nothing() -> None:
    once = Openvino().apply(program_of(several_kinds(), torch.randn(2, 3, 10, 10))).program
    assert apply_to_untouched(Openvino(), once).rewrites == 0


def test_what_it_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, step = torch.randn(2, 3, 10, 10), Openvino()
    low = program_of(several_kinds(), x, lane=BF16)
    assert step.why_not(low) == "it still runs under autocast"
    baked = BakeAutocast().apply(low).program
    monkeypatch.setattr(openvino, "why_not_precision", lambda precision: f"not in {precision}")
    assert step.why_not(baked) == "not in bf16"
    half = program_of(several_kinds(), x, lane=FP16, on_top_of=[BakeAutocast()])
    assert step.why_not(half) == "not in f16"
    program = program_of(several_kinds(), x)
    module = copy_of(program.graph)
    next(
        iter(module.graph.find_nodes(op="call_function", target=torch.ops.aten.conv2d.default))
    ).target = torch.ops.mkldnn._convolution_pointwise.default
    assert "ONNX does not know mkldnn" in str(step.why_not(program.with_graph(module)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openvino" else object())
    assert step.why_not(program) == "openvino is not installed: run  pip install 'ampopt[openvino]'"


@pytest.mark.parametrize(
    ("model", "x", "node", "reason"),
    [
        (Model(lambda m, x: x.double() * 2), torch.randn(3, 4), "to", "float64 in float32"),
        (Model(lambda m, x: x + 1), torch.tensor([[1, 2]]), "inputs_0", "int64 in int32"),
        (Model(lambda m, x: (x * 1e12).long()), torch.randn(3, 4), "to", "int64 in int32"),
    ],
)
def test_numbers_of_more_than_32_bits_are_declined(
    model: nn.Module, x: Tensor, node: str, reason: str
) -> None:
    result = apply_to_untouched(Openvino(), program_of(model.eval(), x))
    assert result.rewrites == 0
    (declined,) = result.declined
    assert declined.node == node
    assert reason in declined.reason


INT32 = torch.tensor([[2**24 + 1, -(2**30) + 1, 2**24]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("function", "node"),
    [
        (lambda x: x // 3, "floor_divide"),
        (lambda x: x >> 3, "rshift"),
        (lambda x: x * 3, "mul"),
        (lambda x: x.amax(1), "amax"),
        (lambda x: x.argmax(1), "argmax"),
        (lambda x: x.max(1)[0], "getitem"),
        (lambda x: (x.float() * 1e9).int(), "to"),
    ],
)
def test_arithmetic_of_int32_which_openvino_does_in_float32_is_declined(
    function: Callable[[Tensor], Tensor], node: str
) -> None:
    result = apply_to_untouched(Openvino(), program_of(Model(lambda m, x: function(x)), INT32))
    assert result.rewrites == 0
    (declined,) = result.declined
    assert node in declined.node
    assert declined.reason == "OpenVINO computes int32 in float32"


def test_places_that_may_be_out_of_range_are_declined_and_others_taken() -> None:
    """OpenVINO gives zeros for a place out of range, or memory beside the tensor, or ends the process."""
    model = Model(lambda m, i: m.e(i.reshape(-1)[1:]), e=nn.Embedding(8, 4)).eval()
    ids = torch.tensor([[1, 7, 0]], dtype=torch.int32)
    result = apply_to_untouched(Openvino(options=()), program_of(model, ids))
    (declined,) = result.declined
    assert declined.node == "embedding"
    assert declined.reason == "OpenVINO answers where a place is out of range, and PyTorch raises an error"
    model, x = Model(lambda m, x: x[:, m.ids] * 2, ids=ids[0].clone()).eval(), torch.randn(2, 8)
    program = Openvino(options=()).apply(program_of(model, x)).program
    torch.testing.assert_close(executable(program)(x)[0], model(x))


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (Model(lambda m, x: torch.linalg.eigvals(m.a(x)).abs(), a=nn.Linear(4, 4)), (4, 4), "eig"),
    ],
)
def test_what_cannot_be_expressed_fails_with_its_name(
    model: nn.Module, shape: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(AmpoptError, match=reason):
        Openvino().apply(program_of(model.eval(), torch.randn(shape)))


@pytest.mark.parametrize(
    ("model", "shape", "node", "reason"),
    [
        (Model(lambda m, x: m.a(x).topk(2)[0], a=nn.Linear(4, 4)), (4, 4), "output_0", "TopK loses NaN"),
        (Unpooling(), (1, 3, 8, 8), "max_pool2d", "MaxPool gives other places than NaN's"),
        (Model(lambda m, x: m.a(x)[:0], a=nn.Linear(4, 4)), (4, 4), "slice", "it is empty"),
        (
            Model(lambda m, x: F.grid_sample(x[None, None], x.view(1, 2, 4, 2), "nearest")),
            (4, 4),
            "grid_sampler",
            "the other of two nearest pixels",
        ),
        (
            Model(lambda m, x: x / torch.tensor([[1e-39], [1.0], [1.0], [1.0]])),
            (4, 4),
            "output_0",
            "by the reciprocals of weights",
        ),
        (Model(lambda m, x: x % 0.1), (4, 4), "remainder", "from a rounded quotient"),
        (Model(lambda m, x: x.fmod(0.1)), (4, 4), "fmod", "from a rounded quotient"),
        (Model(lambda m, x: x // 0.1), (4, 4), "floor_divide", "from a rounded quotient"),
        (Model(lambda m, x: x.div(0.1, rounding_mode="floor")), (4, 4), "div", "from a rounded quotient"),
        (Model(lambda m, x: m.a(x.half().float()), a=nn.Linear(4, 4)), (4, 4), "to", "roundings to 16 bits"),
        (
            Model(lambda m, x: F.interpolate(x, (3, 5), mode="bilinear", antialias=True)),
            (1, 2, 8, 8),
            "upsample_bilinear2d_aa",
            "_upsample_bilinear2d_aa otherwise",
        ),
        (
            Model(lambda m, x: F.interpolate(x, (3, 5), mode="bicubic", antialias=True)),
            (1, 2, 8, 8),
            "upsample_bicubic2d_aa",
            "_upsample_bicubic2d_aa otherwise",
        ),
        (Model(lambda m, x: torch.fft.fft2(x).real), (4, 4), "fft_fft2", "fft_fft2 otherwise"),
    ],
)
def test_operators_that_openvino_computes_otherwise_are_declined(
    model: nn.Module, shape: tuple[int, ...], node: str, reason: str
) -> None:
    result = apply_to_untouched(Openvino(), program_of(model.eval(), torch.randn(shape)))
    assert result.rewrites == 0
    (declined,) = result.declined
    assert node in declined.node
    assert reason in declined.reason


@pytest.mark.parametrize(
    "function",
    [
        lambda i: i.bool(),
        lambda i: i.any(1, keepdim=True),
        lambda i: i.all(1, keepdim=True),
        torch.logical_not,
    ],
    ids=["bool", "any", "all", "not"],
)
def test_the_truth_of_int32_of_which_the_smallest_is_false_is_declined(
    function: Callable[[Tensor], Tensor],
) -> None:
    x, numbers = torch.randn(3, 4), torch.ones(3, 4, dtype=torch.int32)
    program = program_of(Model(lambda m, x, i: function(i) * x), x, numbers)
    (declined,) = Openvino(options=()).apply(program).declined
    assert declined.reason == "OpenVINO takes the smallest int32 for false"
    of_floats = program_of(Model(lambda m, x, i: (x * function(x)) + i), x, x)
    assert Openvino(options=()).apply(of_floats).rewrites == 1


class _OtherWeights(Openvino):
    """An engine made from weights that are a little off."""

    def apply(self, program: Program) -> Result:
        module = copy.deepcopy(program.graph)
        for weight in module.buffers():
            weight.mul_(1 + 1e-4)
        result = super().apply(program.with_graph(module))
        return Result(program.replace(engine=result.program.engine), result.rewrites)


def test_the_check_catches_an_engine_with_other_weights() -> None:
    model, x = several_kinds(), torch.randn(2, 3, 10, 10)
    program = program_of(model, x)
    with pytest.raises(AssertionError, match="the error is"):
        check_outputs(Openvino.numerics, program, _OtherWeights().apply(program).program, model, [x], FP32)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors' maxima keep NaN")
def test_the_check_catches_a_model_that_loses_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_session, "keep_nan", lambda model: 0)
    model, x = MODELS["activations"][0]().eval(), torch.randn(1, 3, 5, 5)
    done = Openvino().apply(program_of(model, x)).program
    with pytest.raises(AssertionError):
        check_keeps_nan(done, model, [x], FP32)
