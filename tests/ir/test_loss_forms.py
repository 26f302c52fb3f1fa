"""Cross entropies in ONNX Runtime are PyTorch's, with smoothed labels and with probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.engines.executable import executable
from ampopt.ir.graph import calls
from ampopt.ir.loss_forms import FORMS
from ampopt.ir.stable_forms import with_stable_forms
from ampopt.passes import OnnxRuntime
from tests.helpers import Model, program_of
from tests.support.exporting import export, run

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
"""For three places in each of four images, scores of five classes."""

TRUE = torch.randint(0, 5, (4, 3), generator=torch.Generator().manual_seed(1))
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.0, 1.5])

Function = Callable[[Tensor, Tensor], Tensor]


def _losses(reduction: str, weight: Tensor | None, smoothing: float) -> dict[str, Function]:
    """Losses of this kind, each with what it is of."""

    def of(x: Tensor, target: Tensor, ignore: int = -100) -> Tensor:
        return F.cross_entropy(x, target, weight, None, ignore, None, reduction, smoothing)

    probabilities: dict[str, Function] = {
        "probabilities": lambda x, t: of(x, (x * 2).nan_to_num().softmax(1)),
        "rows of probabilities": lambda x, t: of(x[:, :, 0], x[:, :, 1].nan_to_num().softmax(1)),
        "one row's probabilities": lambda x, t: of(x[0, :, 0], x[0, :, 1].nan_to_num().softmax(0)),
    }
    classes: dict[str, Function] = {
        "classes": of,
        "classes of rows": lambda x, t: of(x[:, :, 0], t[:, 0]),
        "one class": lambda x, t: of(x[0, :, 0], t[0, 0]),
        "all but one class": lambda x, t: of(x, t, 2),
        "nothing but the ignored": lambda x, t: of(x, t * 0 - 1, -1),
    }
    return {**probabilities, **(classes if smoothing else {})}


KINDS = (
    *(("mean", weight, smoothing) for weight in (None, WEIGHT) for smoothing in (0.0, 0.2)),
    *(("sum", WEIGHT, 0.2), ("none", WEIGHT, 0.2)),
)
"""A weight and smoothed labels change what is reduced; beyond that, a weight changes means alone."""

FUNCTIONS: dict[str, Function] = {
    f"{name}, {reduction}, {smoothing}, {'plain' if weight is None else 'weighted'}": function
    for reduction, weight, smoothing in KINDS
    for name, function in _losses(reduction, weight, smoothing).items()
}


def _all() -> Model:
    return Model(lambda m, x, t: tuple(function(x, t) for function in FUNCTIONS.values()))


@pytest.fixture(scope="module")
def done() -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """All of these losses in ONNX Runtime, in one graph."""
    run = executable(OnnxRuntime(session=()).apply(program_of(_all(), X, TRUE)).program)
    return lambda x, t: dict(zip(FUNCTIONS, run(x, t), strict=True))


def _with(number: float) -> Tensor:
    """Scores of which one is this."""
    changed = X.clone()
    changed[0, 1, 0] = number
    return changed


INPUTS = {
    "usual": X,
    "large": 1e3 * X,
    "zero": torch.zeros_like(X),
    "NaN": _with(math.nan),
    "infinity": _with(math.inf),
    "minus infinity": _with(-math.inf),
}


@pytest.mark.parametrize("given", INPUTS)
def test_losses_are_eager_s(given: str, done: Callable[[Tensor, Tensor], dict[str, Tensor]]) -> None:
    x = INPUTS[given]
    for target in (TRUE, (TRUE + 1) % 5, TRUE * 0 + 2):
        for name, got in done(x, target).items():
            torch.testing.assert_close(
                got,
                FUNCTIONS[name](x, target),
                rtol=1e-5,
                atol=1e-5,
                equal_nan=True,
                msg=f"{name}: {{}}".format,
            )


def test_an_exported_file_has_them(tmp_path: Path) -> None:
    """Of means without weights, which are all forms that there are; a runtime has the others, too."""
    path = tmp_path / "model.onnx"
    plain = {name: f for name, f in FUNCTIONS.items() if "mean" in name and name.endswith("plain")}
    finite = {name: f for name, f in plain.items() if f(X, TRUE).isfinite().all()}
    export(Model(lambda m, x, t: tuple(f(x, t) for f in finite.values())), path, X, TRUE)
    for got, function in zip(run(path, X, TRUE), finite.values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), function(X, TRUE), rtol=1e-5, atol=1e-5)


def test_what_onnx_has_an_operator_for_is_left_alone() -> None:
    graph = program_of(Model(lambda m, x, t: F.cross_entropy(x, t, WEIGHT)), X, TRUE).graph
    assert any(calls(with_stable_forms(graph, (X, TRUE)), FORMS))


def _focal(x: Tensor) -> Tensor:
    p = x.sigmoid()
    return -((1 - p) ** 2 * torch.log(p + 1e-6) + p**2 * torch.log(1 - p + 1e-6))


LOGARITHMS: dict[str, Callable[[Tensor], Tensor]] = {
    "with an offset": lambda x: torch.log(x.sigmoid() + 1e-12),
    "with a limit": lambda x: x.sigmoid().clamp(min=1e-9).log(),
    "of both sides": lambda x: torch.cat((x.sigmoid(), 1 - x.sigmoid())).clamp(1e-7, 1).log(),
    "of a product": lambda x: (x.sigmoid() * 0.5 + 1e-12).log2(),
    "a focal loss": _focal,
    "an entropy": lambda x: -(x.sigmoid() * (x.sigmoid() + 1e-12).log()),
    "an inverse": lambda x: (x.sigmoid() + 1e-8).reciprocal(),
}

OF_BOTH_SIDES = ("of both sides", "a focal loss")


@pytest.mark.parametrize("name", LOGARITHMS)
def test_a_sigmoid_before_a_logarithm_is_exact(tmp_path: Path, name: str) -> None:
    x = torch.linspace(-120, 120, 512).reshape(8, 64)
    function = LOGARITHMS[name]
    model = Model(lambda _, x: function(x))
    assert export(model, tmp_path / "m.onnx", x).verified
    (found,) = run(tmp_path / "m.onnx", x)
    # 1 - sigmoid(x) loses digits in eager, too: as many where the sigmoid is rounded otherwise.
    lost = 2.0**-23 / (1 - x.double().sigmoid() + 1e-7) if name in OF_BOTH_SIDES else torch.zeros(8, 64)
    error = (torch.from_numpy(found) - function(x.double())).abs().reshape(-1, 8, 64)
    assert bool((error <= 2e-6 + 2e-6 * function(x.double()).abs().reshape(-1, 8, 64) + lost).all())


@pytest.mark.parametrize(
    "x", [torch.tensor([True, False]), torch.arange(64, dtype=torch.uint8), torch.tensor([-9, 3, 20])]
)
def test_a_sigmoid_of_integers_before_a_logarithm_is_exact(tmp_path: Path, x: Tensor) -> None:
    model = Model(lambda _, x: torch.log(x.sigmoid() + 1e-6))
    assert export(model, tmp_path / "m.onnx", x).verified
    (found,) = run(tmp_path / "m.onnx", x)
    assert torch.allclose(torch.from_numpy(found), model(x), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("function", [lambda x: x.sigmoid() * x, lambda x: (x.sigmoid() + 1).relu(),
                                      lambda x: x.sigmoid().log()])  # fmt: skip
def test_other_sigmoids_stay(function: Callable[[Tensor], Tensor]) -> None:
    program = program_of(Model(lambda _, x: function(x)), X)
    changed = with_stable_forms(program.graph, program.examples)
    assert not any(calls(changed, (torch.ops.aten.reciprocal.default,)))
