"""Arithmetic on sizes is written in what ONNX and a bundle's file have, and is the same at every size."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ampopt
from ampopt.bundle.size_operators import SIZE_OPERATORS
from ampopt.ir.graph import calls
from ampopt.ir.size_range import SizeRange
from ampopt.ir.symbolic_capture import capture_ranges
from tests.helpers import Model
from tests.support.planted import captured_of
from tests.support.sized import sized_module

WIDTHS = range(2, 41)
X = torch.randn(2, 3, 4, 12, generator=torch.Generator().manual_seed(0))

WRITTEN: dict[str, Callable[[Tensor, int], Tensor]] = {
    "shifted left": lambda x, w: F.pad(x, (0, w << 1)),
    "shifted right": lambda x, w: x * (w >> 2) + ((3 - w) >> 1),
    "odd or even": lambda x, w: F.pad(x, (0, w & 1)),
    "the lowest bits": lambda x, w: x * (w & 7) + (7 & (3 - w)),
    "aligned": lambda x, w: x * ((w + 7) & ~7) + (-8 & (3 - w)),
    "without a sign": lambda x, w: F.pad(x, (0, abs(w - 20))) + abs(w - 20.5),
    "elements": lambda x, w: x / x.numel() + x[0, 0].numel(),
    "a root below a fraction": lambda x, w: x * w**-0.5,
    "a reciprocal": lambda x, w: x * w**-1,
    "a power of a fraction": lambda x, w: x * 0.9**w,
}


def graph_of(forward: Callable[[Tensor, int], Any]) -> Any:
    original, captured = captured_of(Model(lambda m, x: forward(x, x.shape[3])), X)
    sizes = ({0: SizeRange("batch", 1, 4), 3: SizeRange("width", WIDTHS[0], WIDTHS[-1])},)
    return capture_ranges(original, captured, sizes).program.graph


def numbers_in(graph: Any) -> set[Any]:
    targets = {node.target for node in calls(graph)}
    return {each for each in targets if not isinstance(each, torch._ops.OpOverload)} - {operator.getitem}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_numbers_are_the_same_at_every_size(name: str) -> None:
    graph = graph_of(WRITTEN[name])
    assert numbers_in(graph) <= set(SIZE_OPERATORS.values())
    for width in WIDTHS:
        x = torch.randn(1 + width % 4, 3, 4, width)
        torch.testing.assert_close(graph(x)[0], WRITTEN[name](x, width), rtol=1e-6, atol=1e-6)


OTHERS: dict[str, tuple[Callable[[Tensor, int], Tensor], Any]] = {
    "a mask with a gap": (lambda x, w: x * (w & 5), operator.and_),
    "a mask of one size": (lambda x, w: x * (w & x.shape[0]), operator.and_),
    "a shift by a size": (lambda x, w: x * (1 << w), operator.lshift),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_such_form_stays(name: str) -> None:
    forward, target = OTHERS[name]
    graph = graph_of(forward)
    assert target in numbers_in(graph)
    x = torch.randn(3, 3, 4, 9)
    assert torch.equal(graph(x)[0], forward(x, 9))


def _all(x: Tensor, w: int) -> Tensor:
    padded = F.pad(x, (w & 1, (w << 1) - w)) * ((w + 7) & ~7)
    result: Tensor = padded / x.numel() * abs(w - 20) * w**-0.5 + (w >> 2) * 0.9**w
    return result


def test_a_bundle_and_an_onnx_file_hold_it(tmp_path: Path) -> None:
    model = Model(lambda m, x: _all(m.conv(x), x.shape[3]), conv=torch.nn.Conv2d(3, 4, 1)).eval()
    fast = sized_module(model, X, dynamic={"width": (6, 24)})
    fast.save(tmp_path / "robot.ampopt", tune_s=0.3)
    backends = "ampopt", "onnxruntime"
    loaded = [ampopt.load(tmp_path / "robot.ampopt", backend=each, device="cpu") for each in backends]
    for width in (6, 7, 13, 20, 24):
        x = torch.randn(2, 3, 4, width)
        with torch.no_grad():
            expected = model(x)
        for each in loaded:
            torch.testing.assert_close(each(x), expected, rtol=1e-5, atol=1e-5)
