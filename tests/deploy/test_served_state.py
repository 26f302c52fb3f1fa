"""A served model with a state answers as the original does, call after call, whichever program answers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.errors import CaptureError, InputError
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.model_copy import private_copy
from ampopt.ir.transform import Recipe
from ampopt.measure.ledger import Ledger
from ampopt.search.partly_optimized import PartlyOptimizedModule
from tests.helpers import BF16, Model
from tests.support.planted import captured_of, optimize

SHAPE = (1, 3, 8, 8)


def frames(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*(shape or SHAPE), generator=generator) for _ in range(count)]


def smooth(m: Any, x: Tensor) -> Tensor:
    m.h = m.conv(x).mean((2, 3), keepdim=True) + 0.5 * m.h
    out: Tensor = m.conv(x) + m.h
    return out


def _in_place(m: Any, x: Tensor) -> Tensor:
    m.h.mul_(0.9).add_(m.conv(x).mean((2, 3), keepdim=True))
    m.count += 1
    out: Tensor = m.conv(x) * m.h / m.count
    return out


def _returned(m: Any, x: Tensor) -> dict[str, Tensor]:
    m.h = m.h + m.conv(x).mean((2, 3), keepdim=True)
    return {"state": m.h, "x": m.conv(x)}


def _window(m: Any, x: Tensor) -> Tensor:
    m.buffer[:-1] = m.buffer[1:].clone()
    m.buffer[-1] = m.conv(x).mean()
    out: Tensor = m.conv(x) * m.buffer.mean()
    return out


def keeping(function: Any) -> nn.Module:
    torch.manual_seed(0)
    buffers = {
        "h": torch.ones(1, 3, 1, 1),
        "count": torch.zeros((), dtype=torch.long),
        "buffer": torch.zeros(4),
    }
    return Model(function, conv=nn.Conv2d(3, 3, 3, padding=1), **buffers).eval()


def served(model: nn.Module, lane: Lane = FP32) -> ampopt.OptimizedModule:
    """The model captured and served, with no pass that is timed."""
    original, captured = captured_of(model, frames(1)[0])
    program, recipe = lane.start(captured.program), Recipe(lane, (), 0.05)
    return ampopt.OptimizedModule(original, captured, program, recipe, Ledger("model", {}, ()))


FUNCTIONS = [smooth, _in_place, _returned, _window]


def same(a: Any, b: Any, limit: float = 1e-5) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], limit) for key in a)
    return bool((a - b).norm() <= limit * b.norm())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_call_is_the_originals_from_the_first_on(function: Any) -> None:
    model = keeping(function)
    with torch.no_grad():
        model(frames(1)[0])  # the state that is taken over is not the initial one
        fast, twin = served(model), private_copy(model)
        for x in frames(5):
            assert same(fast(x), twin(x))
        fast.reset_state()
        twin = private_copy(model)
        for x in frames(5):
            assert same(fast(x), twin(x))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_low_precision_lane_keeps_the_state_too(function: Any) -> None:
    model = keeping(function)
    fast, twin = served(model, BF16), private_copy(model)
    for x in frames(8):
        assert same(fast(x), twin(x), 0.05)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_neither_prepare_nor_a_new_shape_advances_the_state_and_all_shapes_share_it(function: Any) -> None:
    model = keeping(function)
    fast, twin = served(model), private_copy(model)
    fast.prepare((1, 3, 6, 6))
    first, second = frames(3), frames(3, 1, 3, 6, 6)
    for pair in zip(first, second, frames(3, 1, 3, 5, 7), strict=True):
        for x in pair:
            assert same(fast(x), twin(x))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_original_that_answers_goes_on_from_the_same_state(function: Any) -> None:
    model = keeping(function)
    fast, twin = served(model), private_copy(model)
    fast._new.max_captures = 0
    for x, y in zip(frames(3), frames(3, 1, 3, 6, 6), strict=True):
        assert same(fast(x), twin(x))
        assert same(fast(y), twin(y))


def test_optimize_lifts_a_state(quick: None) -> None:
    model = keeping(_in_place)
    fast, twin = optimize(model, frames(1)[0], precision="fp32", budget_s=5.0), private_copy(model)
    assert isinstance(fast, ampopt.OptimizedModule)
    for x in frames(5):
        assert same(fast(x), twin(x))


def test_a_copy_goes_on_from_where_the_module_stands_and_alone() -> None:
    model = keeping(smooth)
    fast, twin = served(model), private_copy(model)
    x, y, z = frames(3)
    assert same(fast(x), twin(x))
    other, second = copy.deepcopy(fast), copy.deepcopy(twin)
    assert same(fast(y), twin(y))
    assert same(other(z), second(z))
    assert same(fast(z), twin(z))


def test_a_call_in_inference_mode_advances_the_state_like_any_other() -> None:
    model = keeping(smooth)
    fast, twin = served(model), private_copy(model)
    for number, x in enumerate(frames(4)):
        with torch.inference_mode(mode=number % 2 == 0):
            assert same(fast(x), twin(x).clone())


def _in_an_attribute(m: Any, x: Tensor) -> Tensor:
    m.kept.append(m.conv(x))
    out: Tensor = m.head(sum(m.kept) / len(m.kept))
    return out


def test_a_state_that_is_not_lifted_is_named_and_served_from_its_beginning() -> None:
    torch.manual_seed(0)
    model = Model(_in_an_attribute, conv=nn.Conv2d(3, 3, 3, padding=1), head=nn.Conv2d(3, 2, 1)).eval()
    vars(model)["kept"] = []
    fast, twin = optimize(model, frames(1)[0], precision="fp32", budget_s=2.0), private_copy(model)
    assert isinstance(fast, PartlyOptimizedModule)
    assert any("attribute kept" in note for note in fast.report.notes)
    for _ in range(2):
        for x in frames(4):
            assert same(fast(x), twin(x))
        fast.reset_state()
        twin = private_copy(model)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_onnx_file_takes_and_returns_the_state(precision: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = keeping(smooth)
    fast, twin = served(model), private_copy(model)
    report = fast.export_onnx(tmp_path / "m.onnx", precision=precision)
    assert (report.inputs, report.output_names) == (("inputs_0", "h"), ("output", "h_next"))
    assert report.notes[-1] == "state: give the next call what this one returns as h_next for h"
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    state = model.get_buffer("h").numpy()
    for x in frames(4):
        out, state = session.run(None, {"inputs_0": x.numpy(), "h": state})
        assert same(torch.from_numpy(out), twin(x), 1e-2 if precision == "fp16" else 1e-4)


def test_what_cannot_hold_a_state_says_so(tmp_path: Path) -> None:
    fast = served(keeping(smooth))
    with pytest.raises(InputError, match="keeps a state in its buffer h, whose sizes are fixed"):
        fast.export_onnx(tmp_path / "m.onnx", dynamic="batch")
    assert list(tmp_path.iterdir()) == []


def test_a_call_under_autocast_advances_the_state_once() -> None:
    model = keeping(_in_place)
    fast, twin = served(model), private_copy(model)
    for number, x in enumerate(frames(5)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 1):
            assert same(fast(x).float(), twin(x).float(), 0.02)
    assert int(twin.get_buffer("count")) == 5


def _in_its_parameter(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.conv.weight.mul_(1.5)
    out: Tensor = m.conv(x)
    return out


def test_a_model_that_writes_to_its_parameters_runs_as_it_was_from_its_beginning() -> None:
    torch.manual_seed(0)
    model = Model(_in_its_parameter, conv=nn.Conv2d(3, 3, 3, padding=1)).eval()
    before = model.get_parameter("conv.weight").clone()
    fast, twin = optimize(model, frames(1)[0], precision="fp32", budget_s=2.0), private_copy(model)
    assert torch.equal(model.get_parameter("conv.weight"), before)
    assert any("parameter conv.weight" in note for note in fast.report.notes)
    for _ in range(2):
        for x in frames(4):
            assert same(fast(x), twin(x))
        fast.reset_state()
        twin = private_copy(model)


@pytest.mark.parametrize("same_tensor", [lambda x: x.type_as(x), lambda x: x, lambda x: x.contiguous()])
def test_a_model_that_writes_to_its_input_is_never_one_graph(same_tensor: Any) -> None:
    model = Model(lambda m, x: m.conv(same_tensor(x).mul_(2)), conv=nn.Conv2d(3, 3, 3)).eval()
    with pytest.raises(CaptureError, match="the model changes its input"):
        captured_of(model, frames(1)[0])
