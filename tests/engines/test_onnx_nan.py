"""NaN in ONNX Runtime's recurrent layers, and in scattered maxima and minima: it stays where eager has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.engines.executable import executable
from ampopt.engines.onnx_program import for_onnx_runtime, plain_model
from ampopt.ir.lanes import FP32
from ampopt.ir.program import Program
from ampopt.passes import OnnxRuntime
from tests.helpers import Model, eager_of, program_of

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

STEPS, BATCH, FEATURES = 3, 2, 4
KINDS: dict[str, Callable[..., nn.Module]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


def served(program: Program) -> Callable[..., Any]:
    return executable(OnnxRuntime(session=()).apply(program).program)


def check_nan(model: nn.Module, *inputs: Tensor) -> None:
    """NaN in each element of each floating-point input makes the same elements NaN as in eager."""
    run, found = served(program_of(model, *inputs)), 0
    for place, tensor in enumerate(inputs):
        for index in range(tensor.numel() if tensor.is_floating_point() else 0):
            spoilt = tensor.clone()
            spoilt.view(-1)[index] = torch.nan
            given = (*inputs[:place], spoilt, *inputs[place + 1 :])
            for expected, output in zip(eager_of(model, given, FP32), run(*given), strict=True):
                assert output.isnan().equal(expected.isnan()), (place, index)
                torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
                found += int(expected.isnan().sum())
    assert found > 0


def both(kind: str, *layers: int, **options: bool) -> nn.ModuleList:
    """A layer of one direction and one of two, side by side in one graph."""
    torch.manual_seed(0)
    made = (KINDS[kind](FEATURES, 5, *layers, bidirectional=two, **options) for two in (False, True))
    return nn.ModuleList(made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_is_nan_from_where_its_input_is(kind: str) -> None:
    model = Model(lambda m, x: [layer(x) for layer in m.layers], layers=both(kind)).eval()
    check_nan(model, torch.randn(STEPS, BATCH, FEATURES))


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_state_of_numbers_and_a_batch_that_is_first(kind: str) -> None:
    layers, states = both(kind, 2, batch_first=True), [torch.randn(2 * count, BATCH, 5) for count in (1, 2)]

    def forward(m: Any, x: Tensor) -> Any:
        given = [(h, h) if kind == "LSTM" else h for h in (m.one, m.two)]
        return [layer(x, state) for layer, state in zip(m.layers, given, strict=True)]

    model = Model(forward, layers=layers, one=states[0], two=states[1]).eval()
    check_nan(model, torch.randn(BATCH, STEPS, FEATURES))


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_state_that_is_nan(kind: str) -> None:
    """An LSTM's cells are not mixed in the first step: that one may spread, so its hidden state is tried."""
    layers, states = both(kind), [torch.randn(count, BATCH, 5) for count in (1, 2)]

    def forward(m: Any, x: Tensor, *given: Tensor) -> Any:
        if kind == "LSTM":
            return [layer(x, (h, torch.ones_like(h))) for layer, h in zip(m.layers, given, strict=True)]
        results = [layer(x, h) for layer, h in zip(m.layers, given, strict=True)]
        return results if kind == "RNN" else [y[0][1:-1] for y in results]  # a GRU's own unit keeps its NaN

    check_nan(Model(forward, layers=layers).eval(), torch.randn(STEPS, BATCH, FEATURES), *states)


@pytest.mark.parametrize("kind", ["amax", "amin", "sum"])
def test_a_scattered_extreme_is_nan_where_one_of_its_numbers_is(kind: str) -> None:
    torch.manual_seed(0)
    index, ways = torch.randint(0, 3, (3, 3)), [(dim, own) for dim in (0, 1) for own in (True, False)]

    def forward(_: object, data: Tensor, x: Tensor) -> list[Tensor]:
        return [data.scatter_reduce(dim, index, x, kind, include_self=own) for dim, own in ways]

    check_nan(Model(forward).eval(), torch.randn(4, 5), torch.randn(3, 3))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_infinities_that_cancel_are_nan_and_one_is_none(kind: str) -> None:
    torch.manual_seed(0)
    model = Model(lambda m, x: m.l(x)[0], l=KINDS[kind](40, 5, bidirectional=True)).eval()
    x = torch.randn(STEPS, BATCH, 40)
    run = served(program_of(model, x))
    one, every = x.clone(), torch.full_like(x, -torch.inf)
    one[2, 1, 3] = torch.inf
    for given, count in ((one, 0), (every, STEPS * BATCH * 10)):
        (expected,), (output,) = eager_of(model, (given,), FP32), run(given)
        assert int(expected.isnan().sum()) == count
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_several_scatters_of_the_same_numbers() -> None:
    torch.manual_seed(0)
    index = torch.randint(0, 3, (5, 5))

    def forward(_: object, x: Tensor) -> tuple[Tensor, ...]:
        once = x.scatter_reduce(0, index, x, "amax")
        return once, once.scatter_reduce(0, index.flip(0), x * 2, "amin"), once * 2

    check_nan(Model(forward).eval(), torch.randn(5, 5))


def test_a_graph_without_any_of_these_stays_as_it_is() -> None:
    x = torch.randn(2, 3)
    model = plain_model(program_of(Model(lambda m, x: x.relu()), x).graph, (x,))
    assert for_onnx_runtime(model) is model
