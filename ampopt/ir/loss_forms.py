"""Forms of cross entropies for ONNX, whose operator has neither smoothed labels nor probabilities.

Correct because: they are PyTorch's own steps, of the logarithm of a softmax. A row that is ignored is 0
whatever its numbers are, and no part of the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import arguments, aten, dtype_of, shape_of

MEAN, SUM = 1, 2
"""PyTorch's numbers of reductions."""


def _cross_entropy(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    source, target, weight = values["self"], values["target"], values["weight"]
    is_of_probabilities = dtype_of(target).is_floating_point
    if not is_of_probabilities and not values["label_smoothing"]:
        return None
    shape = shape_of(source)
    dim = 0 if len(shape) == 1 else 1
    logs = call(aten.log_softmax.int, source, dim)
    if weight is not None:
        per_class = call(aten.view.default, weight, [-1, *[1] * (len(shape) - 1 - dim)])
        logs = call(aten.mul.Tensor, logs, per_class)
    step = _of_probabilities if is_of_probabilities else _of_classes
    return step(call, values, logs, dim)


def _of_probabilities(call: Call, values: Mapping[str, Any], logs: fx.Node, dim: int) -> Any:
    target, smoothing = values["target"], values["label_smoothing"]
    classes = shape_of(values["self"])[dim]
    if smoothing:
        kept = call(aten.mul.Tensor, target, 1 - smoothing)
        target = call(aten.add.Tensor, kept, smoothing / classes)
    losses = _negative_sum(call, call(aten.mul.Tensor, logs, target), dim)
    if values["reduction"] == MEAN:
        return call(aten.mean.default, losses)
    return call(aten.sum.default, losses) if values["reduction"] == SUM else losses


def _of_classes(call: Call, values: Mapping[str, Any], logs: fx.Node, dim: int) -> Any:
    """The losses of the classes that are right, and of all classes, each by its share."""
    target, smoothing = values["target"], values["label_smoothing"]
    is_ignored = call(aten.eq.Scalar, target, values["ignore_index"])
    read = call(aten.masked_fill.Scalar, target, is_ignored, 0)
    right = call(aten.gather.default, logs, dim, call(aten.unsqueeze.default, read, dim))
    share = smoothing / shape_of(values["self"])[dim]
    own = call(aten.mul.Tensor, call(aten.squeeze.dim, right, dim), smoothing - 1)
    every = call(aten.mul.Tensor, _negative_sum(call, logs, dim), share)
    losses = call(aten.masked_fill.Scalar, call(aten.add.Tensor, own, every), is_ignored, 0.0)
    if values["reduction"] not in (MEAN, SUM):
        return losses
    total = call(aten.sum.default, losses)
    if values["reduction"] == SUM:
        return total
    is_counted = call(aten.logical_not.default, is_ignored)
    counts = call(aten._to_copy.default, is_counted, dtype=dtype_of(values["self"]))
    if values["weight"] is not None:
        flat = call(aten.index_select.default, values["weight"], 0, call(aten.flatten.using_ints, read))
        counts = call(aten.mul.Tensor, call(aten.flatten.using_ints, counts), flat)
    return call(aten.div.Tensor, total, call(aten.sum.default, counts))


def _negative_sum(call: Call, source: fx.Node, dim: int) -> Any:
    return call(aten.neg.default, call(aten.sum.dim_IntList, source, [dim]))


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.cross_entropy_loss.default: _cross_entropy,
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
