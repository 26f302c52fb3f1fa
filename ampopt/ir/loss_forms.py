"""Forms of cross entropies for ONNX, whose operator has neither smoothed labels nor probabilities.

And of a sigmoid that a logarithm follows, as in log(sigmoid(x) + 1e-12), in a focal loss or an entropy: ONNX
Runtime's has an error of 7 % at -14, and is 0 from -18 on.

Correct because: they are PyTorch's own steps, of the logarithm of a softmax. A row that is ignored is 0
whatever its numbers are, and no part of the mean. A sigmoid is 1 / (1 + exp(-x)); where the exponential
overflows, from -88 on, it is 0, and PyTorch's is below 1e-38.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from ampopt.ir.deciding_forms import Call, in_dtype_of
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


_LOGARITHMS = {
    *(aten.log.default, aten.log2.default, aten.log10.default, aten.xlogy.Tensor),
    *(aten.reciprocal.default, aten.binary_cross_entropy.default),
}
_ON_THE_WAY = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.rsub.Tensor, aten.mul.Tensor),
    *(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.maximum.default),
    *(aten.cat.default, aten.where.self, aten.view.default, aten.reshape.default, aten.squeeze.dim),
    *(aten.neg.default, aten.square.default, aten.pow.Tensor_Scalar, aten.abs.default),
}
"""What a number may go through before its logarithm or root is taken."""

MOST_STEPS = 4


def _sigmoid(call: Call, node: fx.Node) -> Any:
    """Exact for small results, too, where a logarithm follows; of the sigmoid itself it has its own form."""
    is_wide = dtype_of(node) in (torch.float32, torch.float64)  # exp(12) overflows in float16
    if not is_wide or any(user.target is aten.log.default for user in node.users):
        return None
    if not leads_to(node, _LOGARITHMS):
        return None
    grown = call(aten.exp.default, call(aten.neg.default, in_dtype_of(call, node.args[0], node)))
    return call(aten.reciprocal.default, call(aten.add.Tensor, grown, 1))


def leads_to(node: fx.Node, targets: Collection[Any]) -> bool:
    """Whether one of some operators gets a node's result, or a sum or product of it, after few steps."""
    reached = {node}
    for _ in range(MOST_STEPS):
        users = {user for each in reached for user in each.users}
        if any(user.target in targets for user in users):
            return True
        reached = {user for user in users if user.target in _ON_THE_WAY}
    return False


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.sigmoid.default: _sigmoid,
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
