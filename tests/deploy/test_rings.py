"""Rings, and what else reads or writes at a place that a tensor's value is: optimized, saved, exported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt import robot
from ampopt.ir.device_asserts import may_assert
from ampopt.ir.graph import aten, calls
from tests.helpers import BF16
from tests.support.exporting import export, run
from tests.support.keeping import served
from tests.support.later_pytorch import needs_places_of_values
from tests.support.planted import NO_ENGINES, captured_of, module_of

pytestmark = needs_places_of_values

FRAMES = list(torch.randn(8, 1, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
T = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class _Ring(nn.Module):
    """Keeps four results and the place of the next one, which a function writes; it gives what is read."""

    kept: Tensor
    place: Tensor

    def __init__(self, function: Callable[[Any, Tensor], Any], dtype: torch.dtype = torch.int64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.function = nn.Conv2d(3, 5, 3), function
        self.register_buffer("kept", torch.ones(4, 5))
        self.register_buffer("place", torch.zeros((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        read: Tensor = self.function(self, self.conv(x).mean((0, 2, 3)))
        return read


def _written(m: Any, x: Tensor) -> Any:
    m.kept[m.place % 4] = x
    m.place += 1
    return m.kept.sum(0) * m.kept[m.place % 4]


def _going_around(m: Any, x: Tensor) -> Any:
    m.kept[m.place] += x
    m.place.copy_((m.place + 1) % 4)
    return m.kept * 2


def _by_a_number(m: Any, x: Tensor) -> Any:
    place = m.place.item()
    oldest = m.kept[(place + 1) % 4].clone()
    m.kept[place % 4] = x
    m.place += 1
    return oldest - m.kept[(place - 1) % 4]


def _from_the_end(m: Any, x: Tensor) -> Any:
    m.kept[-m.place - 1] = x
    m.place.copy_((m.place + 1) % 4)
    return m.kept.cumsum(0)


def _columns(m: Any, x: Tensor) -> Any:
    first = m.place.item() % 3
    m.kept[:, first : first + 3] = x[:3]
    m.place += 1
    return m.kept.narrow(1, first, 2).exp()


RINGS = [_written, _going_around, _by_a_number, _from_the_end, _columns]


class _Read(nn.Module):
    """Reads and writes a row at a place that its caller gives."""

    def forward(self, t: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        written = t * 2
        written[k - 1] = t[k].tanh()
        return t[:, k] + 1, written


def _is_free(program: Any) -> bool:
    """Whether a program reads no number from a tensor, and so can be run without waiting for a device."""
    numbers = aten.item.default, aten._local_scalar_dense.default, aten._assert_scalar.default
    return not any(calls(program.graph, numbers))


def _check_calls(fast: Callable[[Tensor], Tensor], model: nn.Module) -> None:
    """Assert that eight successive calls are those of a copy of the model."""
    twin = copy.deepcopy(model)
    for x in FRAMES:
        with torch.no_grad():
            torch.testing.assert_close(fast(x.clone()), twin(x).clone())


@pytest.mark.parametrize("function", RINGS)
def test_a_ring_goes_around_in_a_module_and_in_all_backends_of_its_bundle(
    function: Any, tmp_path: Path
) -> None:
    model = _Ring(function).eval()
    fast = module_of(model, FRAMES[0])
    assert _is_free(fast.program)
    _check_calls(fast, model)
    fast.reset_state()
    fast.save(tmp_path / "ring", tune_s=0.1)
    for backend in ("ampopt", "onnxruntime"):
        loaded = ampopt.load(tmp_path / "ring", backend=backend, device="cpu")
        assert loaded.notes == []
        _check_calls(loaded, model)
        assert loaded.health.refusals == 0
    runner = robot.load(tmp_path / "ring")
    _check_calls(lambda x: torch.from_numpy(runner(x.numpy())), model)


@pytest.mark.parametrize("function", RINGS)
def test_a_ring_goes_around_in_low_precision_too(function: Any) -> None:
    model = _Ring(function).eval()
    fast, twin = served(model, BF16, FRAMES[0]), copy.deepcopy(model)
    for x in FRAMES:
        with torch.no_grad():
            torch.testing.assert_close(fast(x.clone()), twin(x).clone(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_a_place_of_any_integers_goes_around(dtype: torch.dtype) -> None:
    model = _Ring(_by_a_number, dtype).eval()
    fast = module_of(model, FRAMES[0])
    assert _is_free(fast.program)
    _check_calls(fast, model)


@pytest.mark.parametrize("function", RINGS)
def test_a_ring_that_is_optimized_is_verified(function: Any) -> None:
    model = _Ring(function).eval()
    fast = ampopt.optimize(model, FRAMES[0], budget_s=5.0, exclude=NO_ENGINES, progress=False)
    assert isinstance(fast, ampopt.OptimizedModule)
    assert fast.report.verified
    _check_calls(fast, model)


def test_a_place_that_the_caller_gives_is_taken_and_refused_as_the_model_does(tmp_path: Path) -> None:
    fast = ampopt.optimize(_Read(), (T, torch.tensor(2)), budget_s=5.0, exclude=NO_ENGINES, progress=False)
    assert isinstance(fast, ampopt.OptimizedModule)
    assert _is_free(fast.program)
    fast.save(tmp_path / "bundle", tune_s=0.1)
    loaded = ampopt.load(tmp_path / "bundle", backend="ampopt", device="cpu")
    serving: list[Callable[..., Any]] = [_Read(), fast, loaded]
    for number in range(-5, 6):
        given = T, torch.tensor(number)
        for each in serving:
            torch.testing.assert_close(each(*given), _Read()(*given))
    for number in (-9, -8, -6, 6, 8, 2**40):
        for each in serving:
            with pytest.raises((IndexError, ampopt.AmpoptError), match=r"out of (range|bounds)"):
                each(T, torch.tensor(number))


def test_a_file_for_onnx_counts_places_as_the_model_does(tmp_path: Path) -> None:
    export(_Read(), tmp_path / "model.onnx", T, torch.tensor(2))
    for number in range(-5, 6):
        given = T, torch.tensor(number)
        for mine, its in zip(run(tmp_path / "model.onnx", *given), _Read()(*given), strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), its)
    for number in (-9, 6, 8):
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            run(tmp_path / "model.onnx", T, torch.tensor(number))


def test_a_kernel_may_assert_where_a_place_may_be_out_of_range_and_not_where_it_goes_around() -> None:
    assert may_assert(captured_of(_Read(), T, torch.tensor(2))[1].program)
    assert not may_assert(captured_of(_Ring(_written).eval(), FRAMES[0])[1].program)
