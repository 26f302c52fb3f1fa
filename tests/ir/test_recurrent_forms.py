"""LSTMs that project their hidden state give in ONNX Runtime what they give in PyTorch, NaN included."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.engines.executable import executable
from ampopt.ir.lanes import FP32
from ampopt.passes import OnnxRuntime
from tests.deploy.test_runtime_io import lane_module
from tests.helpers import BF16, Model, eager_of, program_of
from tests.support.exporting import export, run

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")

STEPS, BATCH, FEATURES, HIDDEN, KEPT = 2, 3, 5, 6, 4

WITHOUT_STATES: dict[str, dict[str, Any]] = {
    "one": {},
    "one without biases": {"bias": False},
    "one in both directions, of batches": {"bidirectional": True, "batch_first": True},
    "two": {"num_layers": 2},
}
WITH_STATES: dict[str, dict[str, Any]] = {
    "one, with states": {},
    "two in both directions, of batches": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "two in both directions without biases": {"num_layers": 2, "bidirectional": True, "bias": False},
}


def _layer(**options: Any) -> nn.LSTM:
    torch.manual_seed(0)
    return nn.LSTM(FEATURES, HIDDEN, proj_size=KEPT, **options).eval()


def _states(layer: nn.LSTM, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    count = layer.num_layers * (1 + layer.bidirectional)
    return torch.randn(count, batch, KEPT), torch.randn(count, batch, HIDDEN)


def _inputs(layer: nn.LSTM, with_states: bool, batch: int = BATCH) -> tuple[Tensor, ...]:
    shape = (batch, STEPS, FEATURES) if layer.batch_first else (STEPS, batch, FEATURES)
    return (torch.randn(shape), *(_states(layer, batch) if with_states else ()))


def _all_of(layer: nn.Module, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    result, (hidden, cell) = layer(x, states or None)
    return result, hidden, cell


Case = tuple[nn.LSTM, tuple[Tensor, ...]]
"""A layer and its inputs: a sequence, with or without first states."""


def _beside(cases: Iterable[Case]) -> tuple[Model, tuple[Tensor, ...]]:
    """A model that runs each of the layers on inputs of its own, and all these inputs."""
    layers, given = zip(*cases, strict=True)

    def forward(m: Any, *inputs: Tensor) -> list[Tensor]:
        rest = iter(inputs)
        own = [[next(rest) for _ in each] for each in given]
        return [y for layer, taken in zip(m.layers, own, strict=True) for y in _all_of(layer, *taken)]

    return Model(forward, layers=nn.ModuleList(layers)), tuple(x for each in given for x in each)


def _check(path: Path, model: nn.Module, inputs: tuple[Tensor, ...], cases: Iterable[str]) -> None:
    """Compare what a file gives with what a model gives, of which each case has three results."""
    names = [name for name in cases for _ in range(3)]
    for name, found, expected in zip(names, run(path, *inputs), model(*inputs), strict=True):
        torch.testing.assert_close(
            torch.from_numpy(found), expected, rtol=1e-5, atol=1e-6, msg=f"{name}: {{}}".format
        )


def test_a_file_has_every_output(tmp_path: Path) -> None:
    """One file has all layers, each of which has inputs of its own."""
    cases = dict[str, Case]()
    for with_states, layers in ((False, WITHOUT_STATES), (True, WITH_STATES)):
        for name, options in layers.items():
            layer = _layer(**options)
            cases[name] = layer, _inputs(layer, with_states)
    for layer in (_layer(), _layer(bidirectional=True)):
        x = torch.randn(1, BATCH, FEATURES)
        cases[f"one step, {layer}"] = layer, (x, *_states(layer))
        cases[f"one step of one sequence, {layer}"] = layer, (x[:, 0],)
    model, inputs = _beside(cases.values())
    path = tmp_path / "m.onnx"
    export(model, path, *inputs)
    _check(path, model, inputs, cases)


def test_a_file_of_the_amp_lane(tmp_path: Path) -> None:
    two, both = _layer(num_layers=2), _layer(bidirectional=True, batch_first=True)
    model, inputs = _beside([(two, _inputs(two, with_states=False)), (both, _inputs(both, with_states=True))])
    fast = lane_module(model, *inputs, lane=BF16)
    assert fast.export_onnx(tmp_path / "m.onnx").verified


def test_a_file_takes_other_batches(tmp_path: Path) -> None:
    layer, path = _layer(bidirectional=True, batch_first=True), tmp_path / "m.onnx"
    dynamic = {f"inputs_{place}": {dim: "batch"} for place, dim in enumerate((0, 1, 1))}
    model, inputs = _beside([(layer, _inputs(layer, with_states=True))])
    export(model, path, *inputs, dynamic=dynamic)
    for batch in (1, 3, 4):
        _check(path, model, _inputs(layer, True, batch), [f"a batch of {batch}"])


def test_nan_and_infinity_spread_as_in_eager() -> None:
    layer = _layer(bidirectional=True)
    model, inputs = _beside([(layer, _inputs(layer, with_states=True))])
    serve = executable(OnnxRuntime(session=()).apply(program_of(model, *inputs)).program)
    for value in (torch.nan, torch.inf, -torch.inf):
        for place, tensor in enumerate(inputs[:2]):
            for index in range(tensor.numel()):
                spoilt = tensor.clone()
                spoilt.view(-1)[index] = value
                given = (*inputs[:place], spoilt, *inputs[place + 1 :])
                for expected, found in zip(eager_of(model, given, FP32), serve(*given), strict=True):
                    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


CELLS: dict[str, Callable[[], nn.Module]] = {
    "LSTMCell": lambda: nn.LSTMCell(FEATURES, HIDDEN),
    "GRUCell": lambda: nn.GRUCell(FEATURES, HIDDEN),
    "RNNCell": lambda: nn.RNNCell(FEATURES, HIDDEN, nonlinearity="relu"),
    "RNNCell without biases": lambda: nn.RNNCell(FEATURES, HIDDEN, bias=False),
}


def test_cells_are_as_they_were(tmp_path: Path) -> None:
    """Side by side in one file, each of an input of its own."""
    torch.manual_seed(0)
    cells, path = nn.ModuleDict({name: make() for name, make in CELLS.items()}), tmp_path / "m.onnx"

    def forward(m: Any, *inputs: Tensor) -> list[Tensor]:
        results = list[Tensor]()
        for (name, cell), x in zip(m.cells.items(), inputs, strict=True):
            first = cell(x)
            results += first if name == "LSTMCell" else (first, cell(x, first))
        return results

    model, inputs = Model(forward, cells=cells), [torch.randn(BATCH, FEATURES) for _ in cells]
    export(model, path, *inputs)
    names = [name for name in CELLS for _ in range(2)]
    for name, found, expected in zip(names, run(path, *inputs), model(*inputs), strict=True):
        torch.testing.assert_close(
            torch.from_numpy(found), expected.detach(), rtol=1e-5, atol=1e-6, msg=f"{name}: {{}}".format
        )
