"""NaN and infinity pass OpenVINO's operators as they pass PyTorch's, and no finite result changes."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.ort.openvino_nan import LostNanError, keep_nan
from ampopt.ort.openvino_options import OpenVinoOptions

ov = pytest.importorskip("openvino")
ops = pytest.importorskip("openvino.opset14")

SHAPE = (1, 8, 9, 7)
LARGEST = float(np.finfo(np.float32).max)
Build = Callable[[Any], Any]


def number(value: float) -> Any:
    return ops.constant(np.float32(value))


def ints(*values: int) -> Any:
    return ops.constant(np.array(values, np.int64))


def ints32(*values: int) -> Any:
    return ops.constant(np.array(values, np.int32))


def pooled(x: Any, rounding: str = "floor") -> Any:
    return ops.max_pool(x, [2, 2], [1, 1], [1, 1], [1, 1], [3, 3], rounding).output(0)


def places(x: Any) -> Any:
    return ops.max_pool(x, [2, 2], [1, 1], [1, 1], [1, 1], [3, 3])


def top_two(x: Any) -> Any:
    return ops.topk(x, ops.constant(np.int64(2)), 1, "max", "value")


def dilated(x: Any) -> Any:
    return ops.max_pool(x, [1, 1], [2, 2], [0, 0], [0, 0], [2, 3]).output(0)


OPERATORS: dict[str, tuple[Build, Callable[[Tensor], Tensor]]] = {
    "relu": (ops.relu, torch.relu),
    "clamp": (lambda x: ops.clamp(x, 0.0, 6.0), F.relu6),
    "clamp below": (lambda x: ops.clamp(x, 0.5, LARGEST), lambda x: x.clamp(min=0.5)),
    "clamp above": (lambda x: ops.clamp(x, -LARGEST, 0.5), lambda x: x.clamp(max=0.5)),
    "clamp of two": (lambda x: ops.minimum(ops.maximum(x, number(-1)), number(1)), lambda x: x.clamp(-1, 1)),
    "one bound of two": (
        lambda x: ops.minimum(ops.maximum(x, number(0)), number(LARGEST)),
        lambda x: x.clamp(min=0),
    ),
    "maximum": (lambda x: ops.maximum(x, ops.negative(x)), lambda x: torch.maximum(x, -x)),
    "minimum": (lambda x: ops.minimum(x, number(0.25)), lambda x: x.clamp(max=0.25)),
    "hard sigmoid": (lambda x: ops.hard_sigmoid(x, number(1 / 6), number(0.5)), F.hardsigmoid),
    "maximum of axes": (
        lambda x: ops.reduce_max(x, ints(2, 3), True),
        lambda x: x.amax((2, 3), keepdim=True),
    ),
    "minimum of an axis": (lambda x: ops.reduce_min(x, ints(1), False), lambda x: x.amin(1)),
    "max pooling": (pooled, lambda x: F.max_pool2d(x, 3, 2, 1)),
    "max pooling, rounded up": (
        lambda x: pooled(x, "ceil_torch"),
        lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    ),
    "max pooling, dilated": (dilated, lambda x: F.max_pool2d(x, (2, 3), 1, 0, 2)),
    "softmax": (lambda x: ops.softmax(x, 1), lambda x: x.softmax(1)),
    "logarithm of a softmax": (lambda x: ops.log_softmax(x, 1), lambda x: x.log_softmax(1)),
    "exponential": (ops.exp, torch.exp),
    "clamped exponential": (lambda x: ops.clamp(ops.exp(x), 0.0, 6.0), lambda x: F.relu6(x.exp())),
}
KEPT: dict[str, tuple[Build, Callable[[Tensor], Tensor]]] = {
    "hard swish": (ops.hswish, F.hardswish),
    "sigmoid": (ops.sigmoid, torch.sigmoid),
    "gelu": (lambda x: ops.gelu(x, "ERF"), F.gelu),
    "elu": (lambda x: ops.elu(x, 1.0), F.elu),
    "mean": (lambda x: ops.reduce_mean(x, ints(2, 3), True), lambda x: x.mean((2, 3), keepdim=True)),
}


def convolution(x: Any) -> Any:
    weight = np.random.default_rng(0).standard_normal((8, 8, 1, 1)).astype(np.float32)
    return ops.convolution(x, ops.constant(weight), [1, 1], [0, 0], [0, 0], [1, 1])


def model_of(build: Build, *, fused: bool = False) -> Any:
    """A model of an operator, alone or after a convolution, into which OpenVINO fuses it."""
    x = ops.parameter(list(SHAPE), ov.Type.f32, name="x")
    return ov.Model([ops.result(build(convolution(x) if fused else x))], [x], "model")


def run(model: Any, x: Tensor) -> Tensor:
    compiled = ov.Core().compile_model(model, "CPU", OpenVinoOptions(threads=1).native())
    return torch.from_numpy(compiled.create_infer_request().infer([x.numpy()])[0].copy())


def faulty(value: float) -> Tensor:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    x[0, 3, 4, 3] = value
    return x


BOOLEANS: dict[str, tuple[Build, Callable[[Tensor], Tensor]]] = {
    "greater": (lambda x: ops.greater(x, ops.negative(x)), lambda x: x > -x),
    "greater than a number": (lambda x: ops.greater(x, number(0.5)), lambda x: x > 0.5),
    "greater than or equal": (lambda x: ops.greater_equal(x, number(0.5)), lambda x: x >= 0.5),
    "a number is greater": (lambda x: ops.greater(number(0.5), x), lambda x: x < 0.5),
    "a truth": (lambda x: ops.convert(x, "boolean"), lambda x: x.bool()),
}
RIGHT: dict[str, tuple[Build, Callable[[Tensor], Tensor]]] = {
    "less": (lambda x: ops.less(x, ops.negative(x)), lambda x: x < -x),
    "less than or equal": (lambda x: ops.less_equal(x, number(0.5)), lambda x: x <= 0.5),
    "equal": (lambda x: ops.equal(x, number(0.5)), lambda x: x == 0.5),
    "not equal": (lambda x: ops.not_equal(x, x), lambda x: x != x),
    "integers": (lambda x: ops.greater(ops.convert(x, "i32"), ints32(2)), lambda x: x.int() > 2),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("value", [1.0, 0.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*BOOLEANS, *RIGHT])
def test_booleans_of_what_is_not_finite_are_pytorchs(name: str, value: float, fused: bool) -> None:
    build, definition = (BOOLEANS | RIGHT)[name]
    x, model = faulty(value), model_of(build, fused=fused)
    numbers = run(model_of(lambda y: y, fused=fused), x)
    assert (keep_nan(model) > 0) == (name in BOOLEANS)
    known = torch.ones_like(x).bool() if name != "integers" else numbers.isfinite()
    assert torch.equal(run(model, x)[known], definition(numbers)[known])


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="other processors may compare right"
)
@pytest.mark.parametrize("name", BOOLEANS)
def test_without_it_nan_is_taken_for_another_boolean(name: str) -> None:
    build, definition = BOOLEANS[name]
    x = faulty(math.nan)
    assert not torch.equal(run(model_of(build), x), definition(x))


@pytest.mark.parametrize("value", [1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*OPERATORS, *KEPT])
def test_what_is_not_finite_stays_so(name: str, value: float) -> None:
    build, definition = (OPERATORS | KEPT)[name]
    x, model = faulty(value), model_of(build)
    assert (keep_nan(model) > 0) == (name in OPERATORS)
    found, expected = run(model, x), definition(x)
    assert found.shape == expected.shape
    torch.testing.assert_close(
        found[expected.isfinite()], expected[expected.isfinite()], rtol=1e-5, atol=1e-6
    )
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.equal(found.isnan(), expected.isnan())  # a clamp makes a number of infinity


@pytest.mark.parametrize("name", OPERATORS)
def test_it_stays_where_the_operator_is_fused_into_a_convolution(name: str) -> None:
    build, definition = OPERATORS[name]
    x, model = faulty(math.nan), model_of(build, fused=True)
    expected = definition(run(model_of(lambda y: y, fused=True), x))
    assert expected.isnan().any()
    keep_nan(model)
    assert torch.equal(run(model, x).isfinite(), expected.isfinite())


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors' maxima keep NaN")
@pytest.mark.parametrize("name", ["relu", "clamp", "max pooling", "softmax"])
def test_without_it_nan_is_lost(name: str) -> None:
    build, definition = OPERATORS[name]
    x = faulty(math.nan)
    assert (run(model_of(build), x).isfinite() & ~definition(x).isfinite()).any()


def test_values_of_a_top_k_are_refused_and_its_places_are_not() -> None:
    def top(x: Any, place: int) -> Any:
        return ops.topk(x, ops.constant(np.int64(2)), 1, "max", "value").output(place)

    with pytest.raises(LostNanError, match="TopK loses NaN"):
        keep_nan(model_of(lambda x: top(x, 0)))
    assert keep_nan(model_of(lambda x: ops.convert(top(x, 1), "i64"))) == 0


@pytest.mark.parametrize("build", [places, top_two])
def test_places_of_maxima_are_refused_where_something_is_computed_of_them(build: Build) -> None:
    with pytest.raises(LostNanError, match="other places than NaN's"):
        keep_nan(model_of(lambda x: ops.add(build(x).output(1), build(x).output(1))))
    keep_nan(model_of(lambda x: build(x).output(1)))  # a result is no fault of those that are not finite


def test_integers_stay_as_they_are() -> None:
    x = ops.parameter([4], ov.Type.i32, name="x")
    assert keep_nan(ov.Model([ops.result(ops.relu(x))], [x], "model")) == 0
