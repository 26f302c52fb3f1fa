"""Updates of what a mask selects are computed everywhere, with eager's bits; others stay what they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.graph import aten, calls
from ampopt.passes import CudaGraph
from tests.support.exporting import export, run
from tests.support.planted import captured_of

X = torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(0))
CALLS = [X, 3 * X, -X.abs(), X.abs(), torch.zeros_like(X), X.index_fill(3, torch.tensor([1]), math.nan)]

UPDATES: dict[str, Callable[..., Any]] = {}
OTHERS: dict[str, Callable[..., Any]] = {}


class _Model(nn.Module):
    """An update of three times the input, which knows the input, a weight and the tensor."""

    def __init__(self, update: Callable[..., Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, 16))
        self.update = update

    def forward(self, x: Tensor) -> Any:
        y = x * 3
        result = self.update(self, x, y)
        return y if result is None else result


def _update(function: Callable[..., Any]) -> Callable[..., Any]:
    UPDATES[function.__name__] = function
    return function


def _other(function: Callable[..., Any]) -> Callable[..., Any]:
    OTHERS[function.__name__] = function
    return function


@_update
def in_place(m: _Model, x: Tensor, y: Tensor) -> None:
    y[y > 0] *= 2


@_update
def by_a_number(m: _Model, x: Tensor, y: Tensor) -> None:
    y[y < 0] += x.mean()


@_update
def by_a_chain(m: _Model, x: Tensor, y: Tensor) -> None:
    y[y < 0] = y[y < 0].abs().sqrt().clamp(max=1.0)


@_update
def by_another_tensor(m: _Model, x: Tensor, y: Tensor) -> None:
    mask = y > 0
    y[mask] = x.mean(1, keepdim=True).expand_as(y)[mask].exp() + y[mask]


@_update
def several(m: _Model, x: Tensor, y: Tensor) -> None:
    mask = y > 0
    y[mask] *= 2
    y[mask] += 1
    y[~mask] = 0
    y[y > 3] -= y[y > 3] * 0.5


@_update
def rows(m: _Model, x: Tensor, y: Tensor) -> None:
    mask = y.mean(-1) > 0
    y[mask] = y[mask] * m.scale + 1


@_update
def columns(m: _Model, x: Tensor, y: Tensor) -> None:
    y[:, :, (x > 0).any(0).any(0).any(-1)] *= 3


@_update
def columns_of_boxes(m: _Model, x: Tensor, y: Tensor) -> Tensor:
    boxes = y.reshape(2, -1, 4)
    mask = boxes[..., 3] > 0
    boxes[mask, 0] += 1
    boxes[mask, 2:] *= 0.5
    return boxes


@_update
def a_view(m: _Model, x: Tensor, y: Tensor) -> None:
    y.permute(0, 2, 3, 1)[y[:, 0] > 0] *= 2


@_update
def by_places(m: _Model, x: Tensor, y: Tensor) -> None:
    y[torch.where(y > 0)] *= 2
    places = (y < 0).nonzero(as_tuple=True)
    y[places] = y[places].square()


@_update
def the_values_before(m: _Model, x: Tensor, y: Tensor) -> None:
    mask = y > 0
    before = y[mask]
    y += 1
    y[mask] = before


@_update
def beside_other_writes(m: _Model, x: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    other = torch.relu_(y * 2)
    y[mask] *= 2
    return y + other


@_update
def two_tensors(m: _Model, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    mask, z = y > 0, y * 5
    selected = y[mask]
    y[mask] = selected * 2
    z[mask] = selected + 1
    return y, z


@_update
def a_choice(m: _Model, x: Tensor, y: Tensor) -> None:
    mask = y > 0
    y[mask] = torch.where(y[mask] > 1, y[mask], torch.zeros_like(y[mask]))


@_update
def integers(m: _Model, x: Tensor, y: Tensor) -> Tensor:
    counts = y.nan_to_num().int()
    counts[counts != 0] *= 3
    return counts


@_update
def half(m: _Model, x: Tensor, y: Tensor) -> Tensor:
    narrow = y.half()
    narrow[narrow > 0] = (narrow[narrow > 0].float() * 1.5).half()
    return narrow


@_update
def without_gradients(m: _Model, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        y[y > 0] *= 2


@_update
def infinities(m: _Model, x: Tensor, y: Tensor) -> Tensor:
    logs = y.log()
    logs[torch.isnan(logs)] = 0
    logs[logs.isinf()] *= 0
    return logs


@_other
def divided_integers(m: _Model, x: Tensor, y: Tensor) -> Tensor:
    counts = y.nan_to_num().int()
    mask = counts != 0
    counts[mask] = 100 // counts[mask]
    return counts


@_other
def wanted_elsewhere(m: _Model, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    mask = y > 0
    selected = y[mask]
    y[mask] = selected * 2
    return y, selected.sum()


@_other
def less_the_largest(m: _Model, x: Tensor, y: Tensor) -> None:
    y[y < 7e6] -= y[y < 7e6].max()


@_other
def a_view_of_a_mask_in_a_block(m: _Model, x: Tensor, y: Tensor) -> None:
    mask = y > 0
    first = mask[0]
    with torch.enable_grad():
        selected = y[0][first]
        mask.copy_(mask.flip(-1)).copy_(mask.flip(-1))
        y[0][first] = selected * 2


@_other
def normed(m: _Model, x: Tensor, y: Tensor) -> None:
    mask = y > 0
    y[mask] = y[mask] - y[mask].mean()


@_other
def a_selection_alone(m: _Model, x: Tensor, y: Tensor) -> Tensor:
    return y[y > 0].sum()


@_other
def another_mask(m: _Model, x: Tensor, y: Tensor) -> None:
    y[y > 0] = y.flip(-1)[y.flip(-1) > 0] * 2


@_other
def a_mask_that_changes(m: _Model, x: Tensor, y: Tensor) -> None:
    mask = torch.stack([y > 0, y < 0])
    selected = y[mask[0]]
    mask.logical_not_()
    mask.logical_not_()
    y[mask[0]] = selected * 2


def _same(one: Any, other: Any) -> bool:
    pairs = zip(one if isinstance(one, tuple) else (one,), other, strict=True)
    return all(a.dtype is b.dtype and torch.equal(a.nan_to_num(7e6), b.nan_to_num(7e6)) for a, b in pairs)


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_has_no_size_that_values_decide(name: str) -> None:
    model = _Model(UPDATES[name]).eval()
    graph = captured_of(model, X)[1].program.graph
    assert not list(calls(graph, (aten.index.Tensor, aten.sym_size.int)))
    with torch.no_grad():
        for x in CALLS:
            assert _same(model(x.clone()), graph(x)), f"the call with {x.flatten()[:3]}"


@pytest.mark.parametrize("name", OTHERS)
def test_what_needs_the_selected_alone_selects_it(name: str) -> None:
    model = _Model(OTHERS[name]).eval()
    graph = captured_of(model, X)[1].program.graph
    assert list(calls(graph, [aten.index.Tensor]))
    with torch.no_grad():
        for x in CALLS:
            assert _same(model(x.clone()), graph(x)), f"the call with {x.flatten()[:3]}"


@pytest.mark.parametrize("name", ["several", "columns_of_boxes", "by_places", "infinities"])
def test_an_update_is_exported(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model = _Model(UPDATES[name]).eval()
    export(model, tmp_path / "m.onnx", X)
    for x in CALLS[:5]:
        with torch.no_grad():
            expected = model(x.clone())
        found = torch.from_numpy(run(tmp_path / "m.onnx", x)[0])
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.gpu
def test_on_a_gpu_an_update_waits_for_no_host() -> None:
    for update, is_captured in ((UPDATES["several"], True), (OTHERS["a_selection_alone"], False)):
        model, x = _Model(update).eval().cuda(), X.cuda()
        captured = captured_of(model, x)[1]
        assert (CudaGraph().why_not(captured.program) is None) is is_captured
        with torch.no_grad():
            assert _same(model(2 * x), captured.program.graph(2 * x))


@pytest.mark.gpu
def test_a_mask_on_the_cpu_selects_on_a_gpu() -> None:
    def update(m: _Model, x: Tensor, y: Tensor) -> None:
        y[..., torch.arange(16) % 3 == 0] *= 2

    model, x = _Model(update).eval().cuda(), X.cuda()
    graph = captured_of(model, x)[1].program.graph
    with torch.no_grad():
        assert _same(model(2 * x), graph(2 * x))
