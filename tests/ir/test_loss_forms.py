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

FUNCTIONS: dict[str, Function] = {}
for reduction in ("mean", "sum", "none"):
    for weight in (None, WEIGHT):
        for smoothing in (0.0, 0.2):

            def of(
                x: Tensor,
                target: Tensor,
                *,
                w: Tensor | None = weight,
                r: str = reduction,
                s: float = smoothing,
                ignore: int = -100,
            ) -> Tensor:
                return F.cross_entropy(x, target, w, reduction=r, label_smoothing=s, ignore_index=ignore)

            name = f"{reduction}, {smoothing}, {'plain' if weight is None else 'weighted'}"
            FUNCTIONS[f"probabilities, {name}"] = lambda x, t, of=of: of(x, (x * 2).nan_to_num().softmax(1))
            FUNCTIONS[f"rows of probabilities, {name}"] = lambda x, t, of=of: of(
                x[:, :, 0], (x[:, :, 1]).nan_to_num().softmax(1)
            )
            FUNCTIONS[f"one row's probabilities, {name}"] = lambda x, t, of=of: of(
                x[0, :, 0], (x[0, :, 1]).nan_to_num().softmax(0)
            )
            if smoothing:
                FUNCTIONS[f"classes, {name}"] = of
                FUNCTIONS[f"classes of rows, {name}"] = lambda x, t, of=of: of(x[:, :, 0], t[:, 0])
                FUNCTIONS[f"one class, {name}"] = lambda x, t, of=of: of(x[0, :, 0], t[0, 0])
                FUNCTIONS[f"all but one class, {name}"] = lambda x, t, of=of: of(x, t, ignore=2)
                FUNCTIONS[f"nothing but the ignored, {name}"] = lambda x, t, of=of: of(
                    x, t * 0 - 1, ignore=-1
                )


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
                msg=lambda m, name=name: f"{name}: {m}",
            )


def test_an_exported_file_has_them(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    finite = {name: f for name, f in FUNCTIONS.items() if f(X, TRUE).isfinite().all()}
    export(Model(lambda m, x, t: tuple(f(x, t) for f in finite.values())), path, X, TRUE)
    for got, function in zip(run(path, X, TRUE), finite.values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), function(X, TRUE), rtol=1e-5, atol=1e-5)


def test_what_onnx_has_an_operator_for_is_left_alone() -> None:
    graph = program_of(Model(lambda m, x, t: F.cross_entropy(x, t, WEIGHT)), X, TRUE).graph
    assert any(calls(with_stable_forms(graph, (X, TRUE)), FORMS))
