"""Numerically stable forms of operators, for runtimes that compute the textbook formula.

PyTorch computes log(sigmoid(x)) as min(x, 0) - log1p(exp(-|x|)); torch.onnx writes Log(Sigmoid(x)), which is
-inf from about -17 on, because ONNX Runtime's Sigmoid is exactly 0 there. `FORMS` is the table of all such
operators: each is written with other operators that ONNX has and that neither overflow nor cancel.
`deciding_forms` are exact, `mean_forms` are for long sums, `border_forms` and `similarity_forms` are for
signs of zero and infinities, `spread_forms` for squares beyond float32, and `reduction_forms`,
`recurrent_forms`, `attention_forms`, `loss_forms` and `matrix_forms` for what torch.onnx does not write.

Correct because: every form is equal to its operator over the real numbers, but the series of log1p, which
stops where the next term is below float32's rounding. Where eager overflows on finite numbers, the form may
give the number that it should have been.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.passes.shape_prop import ShapeProp

from ampopt.ir import (
    adaptive_forms,
    attention_forms,
    border_forms,
    deciding_forms,
    loss_forms,
    matrix_forms,
    mean_forms,
    order_forms,
    part_forms,
    plain_forms,
    pooling_forms,
    recurrent_forms,
    reduction_forms,
    resize_forms,
    scatter_forms,
    similarity_forms,
    spread_forms,
)
from ampopt.ir.border_forms import ratio_of, with_nan_of
from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import (
    arguments,
    aten,
    calls,
    copy_of,
    dtype_of,
    finish,
    insert_call,
    replace_result,
    shape_of,
)
from ampopt.ir.reduction_forms import added

SERIES = 0.03
"""Limit of the argument up to which log1p uses its series; both forms are within about 2e-6 of it there."""

TAIL, TERMS = 2.0, 16
"""Where the tail of the normal distribution begins, in units of √2, and the terms of its fraction."""

Forms = Mapping[Any, Callable[[Call, fx.Node], Any]]
"""For operators, functions of (call, node) that make another form of it; None: no change needed."""


def with_stable_forms(module: fx.GraphModule, examples: Sequence[Tensor]) -> fx.GraphModule:
    """The graph with every operator of `FORMS` in its stable form, see `with_forms`."""
    return with_forms(module, examples, FORMS)


def with_forms(module: fx.GraphModule, examples: Sequence[Tensor], forms: Forms) -> fx.GraphModule:
    """The graph with every operator in its form of these; unchanged if there is none.

    `examples` are inputs of the graph: a run on them tells dtypes.
    """
    if not any(calls(module, forms)):
        return module
    changed = copy_of(module)
    ShapeProp(changed).propagate(*examples)
    for node in calls(changed, forms):

        def call(target: Callable[..., Any], *args: Any, at: fx.Node = node, **kwargs: Any) -> fx.Node:
            return insert_call(changed, at, target, *args, **kwargs)

        form = forms[node.target](call, node)
        if form is not None:
            replace_result(node, form)
    known = {name for name, _ in module.named_buffers()}
    for name, constant in list(changed.named_buffers()):
        if name not in known and examples:
            changed.register_buffer(name, constant.to(examples[0].device))
    return finish(changed)


def _log_sigmoid(call: Call, x: Any) -> Any:
    return call(aten.neg.default, call(aten.softplus.default, call(aten.neg.default, x)))


def _log(call: Call, node: fx.Node) -> Any:
    """Of a sigmoid: what a user may write for LogSigmoid."""
    source = node.args[0]
    is_sigmoid = isinstance(source, fx.Node) and source.target is aten.sigmoid.default
    return _log_sigmoid(call, source.args[0]) if is_sigmoid else None  # type: ignore[union-attr]


def _log_sum_exp(call: Call, node: fx.Node) -> Any:
    """With the largest number of the row taken out, where that is finite.

    ONNX Runtime takes 0 for it where the first number of a row is infinite, and then everything underflows.
    """
    values = arguments(node)
    source, dims = values["self"], values["dim"]
    if not dtype_of(source).is_floating_point:
        return None
    if not shape_of(source):
        return call(aten.clone.default, source)
    largest = call(aten.amax.default, source, dims, True)
    is_infinite = call(aten.eq.Scalar, call(aten.abs.default, largest), math.inf)
    largest = call(aten.masked_fill.Scalar, largest, is_infinite, 0.0)
    terms = call(aten.exp.default, call(aten.sub.Tensor, source, largest))
    total = call(aten.log.default, call(aten.sum.dim_IntList, terms, dims, values["keepdim"]))
    if not values["keepdim"]:
        largest = call(aten.sum.dim_IntList, largest, dims, False)  # of one number each
    return call(aten.add.Tensor, total, largest)


def _times_log(call: Call, node: fx.Node, log: Callable[[Call, Any], Any]) -> Any:
    """x log(y), which is 0 where x is, but for NaN."""
    x, y = (_tensor_of(call, value, node) for value in node.args[:2])
    product = call(aten.mul.Tensor, x, log(call, y))
    is_none = call(aten.eq.Scalar, x, 0)
    is_number = call(aten.eq.Tensor, y, y)
    is_zero = call(aten.logical_and.default, is_none, is_number)
    return call(aten.masked_fill.Scalar, product, is_zero, 0.0)


def _tensor_of(call: Call, value: Any, node: fx.Node) -> Any:
    """An operand in the dtype of a node's result, a number as a tensor of one."""
    if isinstance(value, fx.Node):
        return deciding_forms.in_dtype_of(call, value, node)
    other = next(each for each in node.args[:2] if isinstance(each, fx.Node))
    return deciding_forms.filled_like(call, other, value, node)


def _expm1(call: Call, node: fx.Node) -> Any:
    """tanh(x/2) (exp(x) + 1), which does not cancel."""
    half = call(aten.mul.Tensor, node.args[0], 0.5)
    more = call(aten.add.Tensor, call(aten.exp.default, node.args[0]), 1.0)
    return call(aten.mul.Tensor, call(aten.tanh.default, half), more)


def _log1p(call: Call, x: Any) -> Any:
    """x - x²/2 + x³/3 - x⁴/4 near 0, and log(1 + x) elsewhere."""
    series: Any = -0.25
    for term in (1 / 3, -0.5, 1.0):
        product = call(aten.mul.Tensor, x, series)
        series = call(aten.add.Tensor, product, term)
    near = call(aten.lt.Scalar, call(aten.abs.default, x), SERIES)
    far = call(aten.log.default, call(aten.add.Tensor, x, 1.0))
    return call(aten.where.self, near, call(aten.mul.Tensor, x, series), far)


def _log_ndtr(call: Call, node: fx.Node) -> Any:
    """log((1 + erf(x/√2)) / 2), and beyond `TAIL` by means of the area of the tail, which does not cancel.

    That is exp(-t²) erfcx(t) / 2 with t = |x|/√2, and erfcx(t) √π the continued fraction
    1 / (t + (1/2) / (t + (2/2) / (t + (3/2) / …))) (Abramowitz and Stegun, 7.1.14).
    """
    scaled = call(aten.mul.Tensor, node.args[0], math.sqrt(0.5))
    middle = call(aten.add.Tensor, call(aten.erf.default, scaled), 1.0)
    middle = call(aten.log.default, call(aten.mul.Tensor, middle, 0.5))
    t = call(aten.clamp_min.default, call(aten.abs.default, scaled), TAIL)
    fraction = t
    for term in range(TERMS, 0, -1):
        part = call(aten.div.Tensor, call(aten.full_like.default, t, 0.5 * term), fraction)
        fraction = call(aten.add.Tensor, t, part)
    minus_square = call(aten.neg.default, call(aten.mul.Tensor, t, t))
    log_scaled = call(
        aten.neg.default, call(aten.log.default, call(aten.mul.Tensor, fraction, 2 * math.sqrt(math.pi)))
    )
    below = call(aten.add.Tensor, minus_square, log_scaled)
    above = _log1p(call, call(aten.neg.default, call(aten.exp.default, below)))
    result = call(aten.where.self, call(aten.lt.Scalar, scaled, -TAIL), below, middle)
    return call(aten.where.self, call(aten.gt.Scalar, scaled, TAIL), above, result)


def _hypot(call: Call, node: fx.Node) -> Any:
    return _length(call, node.args[0], node.args[1])


def _absolute(call: Call, node: fx.Node) -> Any:
    """The length of a complex number, of which ONNX's form adds squares."""
    source: Any = node.args[0]
    if not dtype_of(source).is_complex:
        return None
    parts = call(aten.view_as_real.default, source)
    return _length(call, *(call(aten.select.int, parts, -1, part) for part in (0, 1)))


def _length(call: Call, a: Any, b: Any) -> Any:
    """The larger one times sqrt(1 + (smaller / larger)²), which does not overflow; of an infinity, that."""
    a, b = (call(aten.abs.default, x) for x in (a, b))
    large, small = call(aten.maximum.default, a, b), call(aten.minimum.default, a, b)
    ratio = ratio_of(call, small, large)
    square = call(aten.add.Tensor, call(aten.mul.Tensor, ratio, ratio), 1.0)
    length = call(aten.mul.Tensor, large, call(aten.sqrt.default, square))
    is_infinite = (call(aten.eq.Scalar, each, math.inf) for each in (a, b))  # also beside NaN
    return call(aten.masked_fill.Scalar, length, call(aten.logical_or.default, *is_infinite), math.inf)


def _keeping_nan(call: Call, node: fx.Node) -> Any:
    """The operator itself, whose ONNX form compares and so loses NaN, and NaN."""
    return with_nan_of(call, call(node.target, *node.args, **node.kwargs), node.args[0])


def _bounded(call: Call, node: fx.Node) -> Any:
    """With infinity for a bound that is not given, where ONNX's Clip takes the largest finite number.

    Of two bounds one may be an integer and one not, which torch.onnx refuses, also for a tensor of integers.
    """
    values, dtype = arguments(node), dtype_of(node)
    source, low, high = values["self"], values.get("min"), values.get("max")
    if not dtype.is_floating_point or (type(low) is type(high) and dtype_of(source) is dtype):
        return None
    if dtype_of(source) is not dtype:
        source = call(aten._to_copy.default, source, dtype=dtype)
    if low is None or high is None:
        low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
        return call(aten.hardtanh.default, source, low, high)
    numbers = (float(each) if isinstance(each, int) else each for each in (low, high))
    return call(aten.clamp.default, source, *numbers)


def _plain_log(call: Call, x: Any) -> Any:
    return call(aten.log.default, x)


_OVERLOADS_OF_XLOGY = (
    *(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other),
    *(aten.special_xlogy.default, aten.special_xlogy.self_scalar, aten.special_xlogy.other_scalar),
)
_OVERLOADS_OF_XLOG1PY = (
    *(aten.special_xlog1py.default, aten.special_xlog1py.self_scalar, aten.special_xlog1py.other_scalar),
)

FORMS: Forms = {
    **adaptive_forms.FORMS,
    **deciding_forms.FORMS,
    **mean_forms.FORMS,
    **border_forms.FORMS,
    **resize_forms.FORMS,
    **pooling_forms.FORMS,
    **recurrent_forms.FORMS,
    **reduction_forms.FORMS,
    **attention_forms.FORMS,
    **loss_forms.FORMS,
    **similarity_forms.FORMS,
    **matrix_forms.FORMS,
    **order_forms.FORMS,
    **part_forms.FORMS,
    **plain_forms.FORMS,
    **scatter_forms.FORMS,
    **scatter_forms.FORMS,
    **spread_forms.FORMS,
    aten.log_sigmoid.default: lambda call, node: _log_sigmoid(call, node.args[0]),
    aten.log.default: _log,
    aten.logaddexp.default: lambda call, node: added(call, node.args[0], node.args[1]),
    aten.logaddexp2.default: lambda call, node: added(call, node.args[0], node.args[1], math.log(2.0)),
    aten.expm1.default: _expm1,
    aten.special_expm1.default: _expm1,
    aten.logsumexp.default: _log_sum_exp,
    aten.special_logsumexp.default: _log_sum_exp,
    **{xlogy: lambda call, node: _times_log(call, node, _plain_log) for xlogy in _OVERLOADS_OF_XLOGY},
    **{xlog1py: lambda call, node: _times_log(call, node, _log1p) for xlog1py in _OVERLOADS_OF_XLOG1PY},
    aten.log1p.default: lambda call, node: _log1p(call, node.args[0]),
    aten.special_log1p.default: lambda call, node: _log1p(call, node.args[0]),
    aten.special_log_ndtr.default: _log_ndtr,
    aten.hypot.default: _hypot,
    aten.abs.default: _absolute,
    aten.clamp_min.default: _bounded,
    aten.clamp_max.default: _bounded,
    aten.clamp.default: _bounded,
    aten.logit.default: _keeping_nan,
}
"""For each operator, a function of (call, node) that makes its stable form; None: no change needed."""
