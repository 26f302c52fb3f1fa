"""A served model whose norms move their running statistics answers as the original does, call after call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampopt
from ampopt.ir.model_copy import private_copy
from tests.helpers import BF16, Model
from tests.support.keeping import check_calls, served
from tests.support.norms import training
from tests.support.planted import optimize

SHAPE = (2, 3, 8, 8)


def frames(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*(shape or SHAPE), generator=generator) * (1 + n) + n for n in range(count)]


def _by_hand(m: Any, x: Tensor) -> Tensor:
    y = F.batch_norm(m.conv(x), m.mean, m.var, training=True, momentum=0.3)
    return y.add(m.mean.sum())


def _read(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.norm(m.conv(x))
    z: Tensor = m.frozen(y.relu()) + m.norm.running_mean.sum() + m.norm.running_var.view(4, 1, 1)
    return z


def _made(norm: nn.Module) -> nn.Module:
    return Model(_read, conv=nn.Conv2d(3, 4, 3), norm=norm, frozen=nn.BatchNorm2d(4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: _made(training(nn.BatchNorm2d, 4)),
    "all batches": lambda: _made(training(nn.BatchNorm2d, 4, momentum=None)),
    "instance norm": lambda: _made(training(nn.InstanceNorm2d, 4, track_running_stats=True)),
    "by hand": lambda: Model(_by_hand, conv=nn.Conv2d(3, 4, 3), mean=torch.zeros(4), var=torch.ones(4)),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def same(a: Tensor, b: Tensor, limit: float = 1e-5) -> bool:
    return bool((a - b).double().norm() <= limit * b.double().norm())


def _statistics(model: nn.Module) -> list[Tensor]:
    return [buffer.detach().clone() for buffer in model.buffers()]


def test_eight_calls_are_the_originals_and_leave_it_as_it_was(model: nn.Module) -> None:
    before = _statistics(model)
    fast, twin = served(model, x=frames(1)[0]), private_copy(model)
    check_calls(fast, twin, frames(8))
    fast.reset_state()
    twin = private_copy(model)
    check_calls(fast, twin, frames(8))
    assert all(map(torch.equal, before, _statistics(model)))


def test_what_earlier_calls_of_the_model_have_left_is_taken_over(model: nn.Module) -> None:
    with torch.no_grad():
        for x in frames(3):
            model(x)
    fast, twin = served(model, x=frames(1)[0]), private_copy(model)
    check_calls(fast, twin, frames(4))


def test_the_low_precision_lane_moves_the_statistics_too(model: nn.Module) -> None:
    fast, twin = served(model, BF16, frames(1)[0]), private_copy(model)
    check_calls(fast, twin, frames(8), 0.05)


def test_batches_of_several_sizes_move_the_same_statistics(model: nn.Module) -> None:
    fast, twin = served(model, x=frames(1)[0]), private_copy(model)
    fast.prepare((5, 3, 8, 8))
    for calls in zip(frames(3), frames(3, 5, 3, 8, 8), frames(3, 1, 3, 9, 7), strict=True):
        check_calls(fast, twin, list(calls))


def test_a_copy_goes_on_alone(model: nn.Module) -> None:
    fast, twin = served(model, x=frames(1)[0]), private_copy(model)
    x, y, z = frames(3)
    assert same(fast(x), twin(x))
    other, second = copy.deepcopy(fast), copy.deepcopy(twin)
    assert same(fast(y), twin(y))
    assert same(other(z), second(z))
    assert same(fast(z), twin(z))


def test_a_bundle_begins_where_the_model_did(model: nn.Module, tmp_path: Path) -> None:
    fast, twin = served(model, x=frames(1)[0]), private_copy(model)
    fast(frames(1)[0])
    fast.save(tmp_path / "model.ampopt")
    loaded = ampopt.load(tmp_path / "model.ampopt")
    check_calls(loaded, twin, frames(5))


def test_an_onnx_file_takes_and_returns_the_statistics(model: nn.Module, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    fast, twin = served(model, x=frames(1)[0]), private_copy(model)
    report = fast.export_onnx(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    first, *names = report.inputs
    kept = [name for name, _ in model.named_buffers() if name.replace(".", "_") in names]
    state = [model.get_buffer(name).numpy() for name in kept]
    for x in frames(8):
        out, *state = session.run(None, {first: x.numpy(), **dict(zip(names, state, strict=True))})
        assert same(torch.from_numpy(out), twin(x), 1e-4)
        for name, tensor in zip(kept, state, strict=True):
            assert same(torch.from_numpy(tensor), twin.get_buffer(name), 1e-4), name


def test_optimize_verifies_it(model: nn.Module, quick: None) -> None:
    fast, twin = optimize(model, frames(1)[0], precision="fp32", budget_s=5.0), private_copy(model)
    assert isinstance(fast, ampopt.OptimizedModule)
    assert not any("verified" in note or "not one graph" in note for note in fast.report.notes)
    check_calls(fast, twin, frames(8))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_a_gpu_moves_the_statistics_in_a_cuda_graph(model: nn.Module, precision: str) -> None:
    first, *others = [x.cuda() for x in frames(9)]
    fast = ampopt.optimize(model.cuda(), first, precision=precision, budget_s=15.0)
    assert isinstance(fast, ampopt.OptimizedModule)
    twin = private_copy(model)
    check_calls(fast, twin, others, 0.02)
    fast.reset_state()
    twin = private_copy(model)
    check_calls(fast, twin, others, 0.02)
