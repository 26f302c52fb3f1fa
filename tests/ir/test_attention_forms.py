"""Attention in ONNX Runtime is PyTorch's, of any number of dimensions, with masks and shared heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ampopt.engines.executable import executable
from ampopt.ir.attention_forms import FORMS
from ampopt.ir.graph import aten, calls
from ampopt.ir.stable_forms import with_stable_forms
from ampopt.passes import OnnxRuntime
from tests.helpers import Model, program_of
from tests.support.exporting import export, run

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
"""Of two images four heads, with five places each."""

attend = F.scaled_dot_product_attention


def _bias_of(q: Tensor) -> Tensor:
    """A mask of numbers that leaves nothing to the first place where its numbers are small."""
    bias = q @ q.transpose(-1, -2)
    return bias.masked_fill(bias < 1, -math.inf)


def _is_near(q: Tensor) -> Tensor:
    return _bias_of(q) > -math.inf


Function = Callable[[Tensor], Tensor]

WAYS: dict[str, Function] = {
    "plain": lambda q: attend(q, q * 2, q + 1),
    "causal": lambda q: attend(q, q, q, is_causal=True),
    "causal of fewer places": lambda q: attend(q[..., :3, :], q, q, is_causal=True),
    "with a scale": lambda q: attend(q, q, q, scale=0.25),
    "with a mask": lambda q: attend(q, q, q, _is_near(q)),
    "with a mask of numbers": lambda q: attend(q, q, q, _bias_of(q), scale=0.5),
    "with a mask of nothing": lambda q: attend(q, q, q, _bias_of(q) > math.inf),
    "with a constant mask": lambda q: attend(q, q, q, torch.ones(5, 5).tril().bool()),
    "with values of another width": lambda q: attend(q, q, q[..., :3]),
}

RANKS: dict[str, Callable[[Tensor], Tensor]] = {
    "matrices": lambda x: x[0, 0],
    "three dimensions": lambda x: x[0],
    "four dimensions": lambda x: x,
    "five dimensions": lambda x: torch.stack((x, x.flip(-1))),
}

OTHERS: dict[str, Function] = {
    "a mask for all heads": lambda x: attend(x, x, x, _is_near(x[:, :1])),
    "a mask for all images": lambda x: attend(x[0], x[0], x[0], _is_near(x[0, 0])),
    "one key for all": lambda x: attend(x, x[:1], x[:1]),
    "keys of one image": lambda x: attend(x, x[0], x[0]),
    "shared heads": lambda x: attend(x, x[:, :2], x[:, :2], enable_gqa=True),
    "shared heads with a mask": lambda x: attend(x, x[:, 2:], x[:, 2:], _is_near(x), enable_gqa=True),
    "shared heads of one image": lambda x: attend(x[0], x[0, :2], x[0, 2:], enable_gqa=True),
    "shared heads, causal": lambda x: attend(x, x[:, :1], x[:, :1], is_causal=True, enable_gqa=True),
    "heads that are not shared": lambda x: attend(x, x, x, enable_gqa=True),
}


def _of_rank(way: Function, rank: Function) -> Function:
    return lambda x: way(rank(x))


FUNCTIONS: dict[str, Function] = {
    **{f"{rank}, {way}": _of_rank(WAYS[way], RANKS[rank]) for rank in RANKS for way in WAYS},
    **OTHERS,
}


def _all() -> Model:
    return Model(lambda m, x: tuple(function(x) for function in FUNCTIONS.values()))


@pytest.fixture(scope="module")
def done() -> Callable[[Tensor], dict[str, Tensor]]:
    """All of these functions in ONNX Runtime, in one graph."""
    run = executable(OnnxRuntime(session=()).apply(program_of(_all(), X)).program)
    return lambda x: dict(zip(FUNCTIONS, run(x), strict=True))


def _with(number: float) -> Tensor:
    """Numbers of which one is this."""
    changed = X.clone()
    changed[0, 0, 1, 2] = number
    return changed


INPUTS = {
    "usual": X,
    "small": 0.1 * X,
    "large": 10 * X,
    "zero": torch.zeros_like(X),
    "NaN": _with(math.nan),
    "infinity": _with(math.inf),
    "minus infinity": _with(-math.inf),
}


@pytest.mark.parametrize("given", INPUTS)
def test_attention_is_eager_s(given: str, done: Callable[[Tensor], dict[str, Tensor]]) -> None:
    """By its definition: the fused kernel loses the NaN of a row of scores."""
    x = INPUTS[given]
    for name, got in done(x).items():
        with sdpa_kernel(SDPBackend.MATH):
            wanted = FUNCTIONS[name](x)
        torch.testing.assert_close(
            got,
            wanted,
            rtol=1e-4,
            atol=1e-5,
            equal_nan=True,
            msg=f"{name}: {{}}".format,
        )


def test_an_exported_file_has_them(tmp_path: Path) -> None:
    """Of five dimensions, and the others; a runtime has every number of dimensions."""
    path = tmp_path / "model.onnx"
    functions = [f for name, f in FUNCTIONS.items() if name in OTHERS or name.startswith("five")]
    export(Model(lambda m, x: tuple(function(x) for function in functions)), path, X)
    for got, function in zip(run(path, X), functions, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), function(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["plain", "causal", "with a mask"])
def test_sizes_may_vary(way: str, tmp_path: Path) -> None:
    path, function = tmp_path / "model.onnx", WAYS[way]
    export(Model(lambda m, x: function(x)), path, X[0], dynamic={"inputs_0": {0: "heads", 1: "places"}})
    other = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.from_numpy(run(path, other)[0]), function(other), rtol=1e-4, atol=1e-5)


def test_what_torch_onnx_has_right_is_left_alone() -> None:
    graph = program_of(Model(lambda m, x: attend(x, x, x, is_causal=True)), X).graph
    assert any(calls(with_stable_forms(graph, (X,)), FORMS))
    of_three = program_of(Model(lambda m, x: attend(x, x, x)), X[0]).graph
    assert not any(calls(with_stable_forms(of_three, (X[0],)), FORMS))
    assert any(calls(with_stable_forms(of_three, (X[0],)), [aten.matmul.default]))
