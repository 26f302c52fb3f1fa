"""Standard deviations and variances in ONNX Runtime and OpenVINO are PyTorch's, however large the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampopt.engines.executable import executable
from ampopt.ir.graph import calls
from ampopt.ir.spread_forms import FORMS
from ampopt.ir.stable_forms import with_stable_forms
from ampopt.ir.transform import Pass
from ampopt.passes import OnnxRuntime, Openvino
from tests.helpers import Model, program_of

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))

Function = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, tuple[int, Function]] = {
    "deviation of all": (1, lambda x: x.std()),
    "deviation of rows": (1, lambda x: x.std(1)),
    "deviation, kept": (1, lambda x: x.std((0, -1), keepdim=True)),
    "deviation of all that there are": (1, lambda x: x.std(-1, unbiased=False)),
    "deviation with two degrees less": (1, lambda x: torch.std(x, dim=(1, 2), correction=2)),
    "deviation and mean": (1, lambda x: torch.stack(torch.std_mean(x, (1, 2)))),
    "deviation without mean": (1, lambda x: torch.std_mean(x)[0]),
    "normalized": (0, lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)),
    "variance": (2, lambda x: x.var(0)),
    "variance of all": (2, lambda x: x.var(unbiased=False)),
    "variance and mean, kept": (2, lambda x: torch.var_mean(x, -1, keepdim=True)[0]),
    "mean beside a variance": (1, lambda x: torch.var_mean(x, (0, 1), correction=0)[1]),
}
"""Each with the power of the numbers' unit that its result has."""

SIZES = (1e-37, 1e-30, 1e-23, 1e-18, 1e-10, 1e-3, 1.0, 1e3, 1e10, 1e18, 1e25, 1e36)


@pytest.fixture(scope="module", params=[OnnxRuntime(session=()), Openvino()], ids=["onnxruntime", "openvino"])
def done(request: pytest.FixtureRequest) -> Callable[[Tensor], dict[str, Tensor]]:
    """All of these, in one graph, in a runtime."""
    engine: Pass = request.param
    pytest.importorskip("openvino")
    model = Model(lambda m, x: tuple(function(x) for _, function in FUNCTIONS.values()))
    run = executable(engine.apply(program_of(model, X)).program)
    return lambda x: dict(zip(FUNCTIONS, run(x), strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_spreads_are_eager_s(size: float, done: Callable[[Tensor], dict[str, Tensor]]) -> None:
    x = X * size
    for name, got in done(x).items():
        power, function = FUNCTIONS[name]
        found, expected = (each.double() / size**power for each in (got, function(x)))
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6, msg=f"{name}: {{}}".format)


def test_each_row_has_its_own_scale(done: Callable[[Tensor], dict[str, Tensor]]) -> None:
    x = X * torch.tensor([1e-20, 1.0, 1e20]).view(1, 3, 1)
    rows = done(x)["deviation of all that there are"]
    torch.testing.assert_close(rows, x.std(-1, unbiased=False), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 0.0])
def test_faults_and_zeros_reach_them(number: float, done: Callable[[Tensor], dict[str, Tensor]]) -> None:
    """Of infinities PyTorch's means are NaN or infinite, as their order has it."""
    x = X.clone()
    x[1, 2] = number
    for name, got in done(x).items():
        expected = FUNCTIONS[name][1](x)
        assert torch.equal(got.isfinite(), expected.isfinite()), name
        finite = expected.isfinite()
        torch.testing.assert_close(
            got[finite], expected[finite], rtol=2e-5, atol=2e-6, msg=f"{name}: {{}}".format
        )


def test_what_is_no_float32_stays() -> None:
    for x in (X.double(), torch.tensor(1.0)):
        program = program_of(Model(lambda m, x: x.std(correction=0)), x)
        stable = with_stable_forms(program.graph, program.examples)
        assert [node.target for node in calls(stable, FORMS)] == [
            node.target for node in calls(program.graph, FORMS)
        ]
        assert len(stable.graph.nodes) == len(program.graph.graph.nodes)
