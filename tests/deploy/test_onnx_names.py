"""Inputs and outputs are named as in the model, or as the user says."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from torch import Tensor, nn

from ampopt.errors import InputError
from tests.support.exporting import X, conv_bn, export, run, shapes_of

Pair = namedtuple("Pair", ["left", "right"])


class Two(nn.Module):
    """Two inputs, one of them nested, and results of every structure."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.result = result

    def forward(self, input: Tensor, more: dict[str, Tensor]) -> Any:
        """Add, and put together."""
        return self.result(input + more["x"])


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (lambda y: y, ("output",)),
        (lambda y: (y, [y * 2]), ("output", "output_1")),
        (lambda y: {"out": y, "aux": (y * 2, y * 3)}, ("out", "aux_0", "aux_1")),
        (lambda y: Pair(y, y * 2), ("left", "right")),
        (lambda y: (None, y, 3, {"input": y * 2}), ("output", "input_1")),
        (lambda y: (y, y), ("output", "output_1")),
    ],
)
def test_names_are_the_models_own(
    result: Callable[[Tensor], Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    report = export(Two(result), path, X, {"x": X + 1})
    model = onnx.load(path)
    assert report.inputs == tuple(v.name for v in model.graph.input) == ("input", "more_x")
    assert report.output_names == tuple(v.name for v in model.graph.output) == names
    assert np.allclose(run(path, X, X + 1)[0], (X + X + 1).numpy())


def test_names_can_be_given_and_inner_values_make_way(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    export(conv_bn(), path, input_names=["conv2d"], output_names=["0.weight"])
    assert list(shapes_of(path)) == ["conv2d", "0.weight"]


@pytest.mark.parametrize("names", [["a", "b"], [""], "x"])
def test_names_that_do_not_fit_are_refused(names: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="input_names"):
        export(conv_bn(), tmp_path / "m.onnx", input_names=names)


def test_an_output_named_as_an_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is the name of an input"):
        export(conv_bn(), tmp_path / "m.onnx", input_names=["a"], output_names=["a"])
