"""What ONNX's operators are too narrow for is in ONNX files as PyTorch computes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.ir.graph import calls
from ampopt.ir.plain_forms import FORMS
from ampopt.ir.stable_forms import with_stable_forms
from tests.helpers import Model, program_of
from tests.support.exporting import export, run

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
MASK, WHOLE = X > 0, (X * 9).long()
BYTES = torch.arange(48, dtype=torch.uint8).reshape(2, 3, 8) * 5


def _conjugate_of(x: Tensor) -> Tensor:
    return torch.view_as_complex(torch.stack([x, x.flip(1)], -1)).conj()


def _into_a_part(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0].copy_(x[:, 1, :1])
    return y


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "a copy of one channel": (lambda x: torch.empty_like(x).copy_(x[:, :1]), X),
    "a copy of a row": (lambda x: x.clone().copy_(torch.arange(8.0)) + x, X),
    "a copy of a number": (lambda x: torch.empty_like(x).copy_(torch.tensor(2.5)) + x, X),
    "a copy of integers": (lambda x: torch.empty_like(x).copy_(x.long()), X),
    "a copy to integers": (lambda x: torch.zeros(3, 8, dtype=torch.int64).copy_(x[0] * 9), X),
    "a copy into a part": (_into_a_part, X),
    "a choice of masks": (lambda m: torch.where(m[:, :1], m, m.flip(2)), MASK),
    "a choice of one mask": (lambda m: torch.where(m, m[0, 0, 0], ~m[:1]), MASK),
    "a choice of a number and a mask": (lambda m: torch.where(m[0], True, m.flip(2)), MASK),
    "a choice of a mask and a number": (lambda m: torch.where(m, ~m[:1], False), MASK),
    "a choice of int16": (lambda i: torch.where(i > 0, i.short() * 3000, -i.short()), WHOLE),
    "a choice of int8": (lambda i: torch.where(i > 0, i.to(torch.int8) * 90, i[:1].to(torch.int8)), WHOLE),
    "a sum of masks": (lambda m: m + m.flip(2), MASK),
    "a sum of a mask and a number": (lambda m: m + 1, MASK),
    "ReLU of integers": (lambda i: i.relu(), WHOLE),
    "ReLU of int32": (lambda i: F.relu(i.int()), WHOLE),
    "a byte's negative": (lambda u: -u, BYTES),
    "a byte's square": (lambda u: u.square(), BYTES),
    "a byte's power of 2": (lambda u: u**2, BYTES),
    "a byte's power of 3": (lambda u: u**3, BYTES),
    "a power by a mask": (lambda x: x.abs() ** (x > 0), X),
    "a shift to the left": (lambda i: i << (i.abs() % 5), WHOLE),
    "a shift to the right": (lambda i: i >> (i.abs() % 5), WHOLE),
    "a conjugate": (lambda x: _conjugate_of(x).imag + _conjugate_of(x).abs(), X),
    "RReLU": (lambda x: F.rrelu(x, 0.1, 0.4), X),
    "an arc sine of a tanh": (lambda x: torch.asin((x * 10).tanh()), X),
    "a root beside a tanh": (lambda x: torch.sqrt(1 - (x * 10).tanh() ** 2), X),
    "a logarithm beside a tanh": (lambda x: torch.log(1 - x.tanh() + 1e-3), X),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_files_compute_what_eager_does(tmp_path: Path, name: str) -> None:
    function, x = FUNCTIONS[name]
    assert export(Model(lambda _, x: function(x)), tmp_path / "m.onnx", x).verified
    (found,) = run(tmp_path / "m.onnx", x)
    expected = function(x).numpy()
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-3 if "tanh" in name else 1e-6)


def test_a_sum_of_masks_times_a_number_is_left_alone() -> None:
    program = program_of(Model(lambda _, m: torch.add(m, m.flip(2), alpha=0)), MASK)
    changed = with_stable_forms(program.graph, program.examples)
    assert not any(calls(changed, (torch.ops.aten.logical_or.default,)))


def test_a_copy_is_broadcast_at_every_size_of_a_range(tmp_path: Path) -> None:
    model = Model(lambda _, x: torch.empty_like(x).copy_(x[:, :1]))
    export(model, tmp_path / "m.onnx", X, dynamic={"inputs_0": {2: "length"}})
    for length in (8, 3, 20):
        x = torch.randn(2, 3, length)
        (found,) = run(tmp_path / "m.onnx", x)
        np.testing.assert_array_equal(found, x[:, :1].expand_as(x).numpy())


@pytest.mark.parametrize("function", [lambda x: x + x, lambda x: -x.relu(), lambda x: x**2 + x.square(),
                                      lambda x: x.tanh() * 2, lambda x: x.abs() ** x])  # fmt: skip
def test_what_onnx_has_stays(function: Callable[[Tensor], Tensor]) -> None:
    graph = program_of(Model(lambda _, x: function(x)), X).graph
    changed = with_stable_forms(graph, (X,))
    before, after = ([node.target for node in calls(each, FORMS)] for each in (graph, changed))
    assert before == after
    assert before
