"""What a model makes in the dtype of another tensor meets that tensor in every lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampopt.ir.casting import POLICIES
from ampopt.ir.graph import aten, calls
from ampopt.ir.lanes import FP32
from ampopt.ir.numerics import relative_error
from ampopt.passes import BakeAutocast, RemoveInferenceNoops
from tests.helpers import BF16, FLOORS, FP16, Model, dtypes_of
from tests.support.planted import captured_of, optimize

X = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
PLACES = torch.tensor([3, 0, 5, 5, 1, 7, 2, 3])

Function = Callable[[Any, Tensor], Any]


def _zeros(y: Tensor) -> Tensor:
    return torch.zeros(2, 8, 16, dtype=y.dtype, device=y.device)


def _scattered(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    return _zeros(y).scatter_add(1, m.places[None, :, None].expand_as(y), y)


def _scattered_largest(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    return _zeros(y).scatter_reduce(1, m.places[None, :, None].expand_as(y), y, "amax")


def _put_twice(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    out = _zeros(y)
    out[:, m.places[:2]] = y[:, :2]
    out[:, m.places[3:6]] = y[:, 3:6].relu()
    return out


def _put_ones(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    return y.index_put((torch.tensor([0, 1]),), torch.ones(8, 16, dtype=y.dtype, device=y.device))


def _added(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    return _zeros(y).index_add(1, m.places, y, alpha=0.5).index_copy(1, m.places[:1], y[:, :1])


def _filled_by_mask(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    return (_zeros(y) - 2).masked_scatter(x > 0, y)


def _blended(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    return torch.lerp(y, m.weight.to(y.dtype).expand_as(y), torch.full_like(y, 0.25))


def _inner(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    out: Tensor = torch.inner(y, m.weight.to(y.dtype)) + torch.tensordot(y, m.weight.to(y.dtype), 1)
    return out


def _dots(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    w = torch.ones(16, dtype=y.dtype, device=y.device)
    return torch.dot(y[0, 0], w) + torch.mv(y[0], w) + torch.vdot(w, y[1, 1])


def _crossed(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)[..., :3]
    up = torch.tensor([0.0, 0.0, 1.0], dtype=y.dtype)
    out: Tensor = torch.cross(y, up.expand_as(y), -1) + torch.linalg.cross(up.expand_as(y), y)
    return out


def _chained(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    out: Tensor = torch.linalg.multi_dot([y[0], torch.eye(16, dtype=y.dtype), y[1].T])
    return out


def _steps(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    return torch.heaviside(y, torch.tensor(0.5, dtype=y.dtype)) * y


def _near(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    return torch.isclose(y, torch.zeros((), dtype=y.dtype), atol=100.0) * y


def _bins(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    edges = torch.tensor([-100.0, 0.0, 100.0], dtype=y.dtype)
    return (torch.bucketize(y.contiguous(), edges) * y) + torch.searchsorted(edges, y.contiguous()) * y


def _bags(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    weight = torch.ones(8, 4, dtype=y.dtype)
    return F.embedding_bag(m.places[None].expand(2, 8), weight, per_sample_weights=y[..., 0], mode="sum")


def _bilinear(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    ones = torch.ones(2, 8, 3, dtype=y.dtype)
    return F.bilinear(y, ones, torch.ones(4, 16, 3, dtype=y.dtype))


def _grid(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    rows, columns = torch.meshgrid(y[0, 0], torch.arange(3, dtype=y.dtype), indexing="ij")
    return rows + columns


def _weighted(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    positive = (x > 0).to(y.dtype)
    return torch.zeros_like(y).index_add(1, m.places, y * positive)


def _chosen(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    return y.new_zeros(y.shape).index_add(1, m.places, torch.where(x > 0, y, _zeros(y)))


def _residual(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    half = 0.5 * torch.ones((), dtype=y.dtype)
    summed = torch.cat([x.to(y.dtype)[:, :4] + y[:, :4], y[:, 4:] * half], 1)
    return torch.zeros_like(y).index_add(1, m.places, summed)


def _product_first(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    mixed = torch.tensordot(y, torch.eye(16, dtype=y.dtype), 1)
    return _zeros(y).index_add(1, m.places, mixed)


MODELS: tuple[Function, ...] = (
    *(_scattered, _scattered_largest, _put_twice, _put_ones, _added, _filled_by_mask, _blended, _inner),
    *(_weighted, _chosen, _residual, _product_first),
    *(_dots, _crossed, _chained, _steps, _near, _bins, _bags, _bilinear, _grid),
)


def _model_of(function: Function) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weight = torch.rand(16)
        return Model(function, linear=nn.Linear(16, 16), places=PLACES, weight=weight).eval()


@pytest.mark.parametrize("function", MODELS)
def test_the_original_runs_under_autocast_and_so_does_its_graph(function: Function) -> None:
    original, captured = captured_of(_model_of(function), X)
    with torch.no_grad(), BF16.scope(torch.device("cpu")):
        original(X)  # else it would have no such lane
    with torch.no_grad():
        expected = original(X)
    for lane in (BF16, FP16):
        start = lane.start(captured.program)
        for program in (start, *(BakeAutocast(policy=policy).apply(start).program for policy in POLICIES)):
            (found,) = program.run(X)
            assert found.dtype is torch.float32
            assert relative_error(found, expected) <= 8 * FLOORS[lane.dtype]


@pytest.mark.parametrize("function", MODELS)
def test_in_float32_the_casts_are_removed(function: Function) -> None:
    _, captured = captured_of(_model_of(function), X)
    program = RemoveInferenceNoops().apply(FP32.start(captured.program)).program
    casts = list(calls(program.graph, (aten.to.dtype, aten._to_copy.default)))
    assert len(casts) == (1 if function is _weighted else 0)  # that of a mask


def _of_one_dtype(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x)
    out = torch.zeros_like(y).index_add(1, m.places, y)
    out[:, 2] = y[:, 2].relu()
    return out


def test_what_has_one_dtype_in_each_lane_is_left_as_it_is() -> None:
    _, captured = captured_of(_model_of(_of_one_dtype), X)
    assert not list(calls(captured.program.graph, (aten.to.dtype, aten._to_copy.default)))


def _filled(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x).relu()
    y[y > 1] = 0.5
    y[:, m.places > 3] = -1e4
    return y @ y.transpose(1, 2)


def test_an_assignment_to_a_mask_stays_in_the_lower_dtype() -> None:
    _, captured = captured_of(_model_of(_filled), X)
    start = BF16.start(captured.program)
    for policy in POLICIES:
        dtypes = dtypes_of(BakeAutocast(policy=policy).apply(start).program)
        assert dtypes["relu"] is dtypes["matmul"] is torch.bfloat16
    assert not list(calls(captured.program.graph, (aten.to.dtype,)))


def test_a_scatter_of_features_has_its_lane() -> None:
    fast = optimize(_model_of(_scattered), X, precision="amp", budget_s=20)
    assert not [note for note in fast.report.notes if "the graph fails" in note]
    assert "amp" in {entry.lane for entry in fast.report.entries}
