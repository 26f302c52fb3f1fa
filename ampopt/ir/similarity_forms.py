"""The cosine similarity and the distances of all pairs for ONNX.

Its exporter divides a product by the product of the lengths: of a vector with an infinity that is an
infinity, where PyTorch has NaN; lengths from 1e19 on overflow. It has no distances but those that are made of
a product of matrices, as PyTorch makes them from 26 rows on.

Correct because: PyTorch divides each vector by its own length, or by `eps` if that is more, and multiplies
then, as the form does. A length of NaN stays one. A distance is the norm of a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import add_constant, arguments, aten, shape_of

MOST_ROWS = 25
"""The most rows whose Euclidean distances PyTorch makes of differences by default."""

ALWAYS_A_PRODUCT, NEVER_A_PRODUCT = 1, 2
"""PyTorch's numbers of modes: `use_mm_for_euclid_dist` and `donot_use_mm_for_euclid_dist`."""


def _cosine(call: Call, node: fx.Node) -> Any:
    """None where a vector is repeated to the other's length."""
    values = arguments(node)
    vectors = [values["x1"], values["x2"]]
    rank = max(len(shape_of(each)) for each in vectors)
    dim = values["dim"] if values["dim"] < 0 else values["dim"] - rank
    if any(len(shape_of(each)) < -dim for each in vectors):
        return None
    if len({shape_of(each)[dim] for each in vectors}) > 1:
        return None
    units = []
    for each in vectors:
        length = call(aten.linalg_vector_norm.default, each, 2, [dim], True)
        bounded = call(aten.hardtanh.default, length, values["eps"], math.inf)
        units.append(call(aten.div.Tensor, each, bounded))
    return call(aten.sum.dim_IntList, call(aten.mul.Tensor, *units), [dim])


def _distances(call: Call, node: fx.Node) -> Any:
    """None where PyTorch takes a product of matrices: differences of all pairs take far more memory."""
    values = arguments(node)
    one, other, mode = values["x1"], values["x2"], values.get("compute_mode")
    rows = max(shape_of(each)[-2] for each in (one, other))
    is_product = mode == ALWAYS_A_PRODUCT or (mode != NEVER_A_PRODUCT and rows > MOST_ROWS)
    if values["p"] == 2.0 and is_product:
        return None
    pairs = (call(aten.unsqueeze.default, one, -2), call(aten.unsqueeze.default, other, -3))
    difference = call(aten.sub.Tensor, *pairs)
    if values["p"] == math.inf:  # PyTorch's largest difference, of which NaN is none
        difference = call(aten.masked_fill.Scalar, difference, call(aten.isnan.default, difference), 0.0)
    return _length(call, difference, values["p"])


def _distances_once(call: Call, node: fx.Node) -> Any:
    """Of each pair once."""
    values = arguments(node)
    source, rows = values["self"], shape_of(values["self"])[0]
    source = call(aten.unflatten.int, source, 0, [rows])  # refuses another size
    one, other = torch.triu_indices(rows, rows, 1)
    parts = []
    for name, numbers in (("first", one), ("second", other)):
        assert node.graph.owning_module is not None
        numbers = add_constant(node.graph.owning_module, name, numbers, node)
        parts.append(call(aten.index_select.default, source, 0, numbers))
    return _length(call, call(aten.sub.Tensor, *parts), values["p"])


def _length(call: Call, difference: Any, p: float) -> Any:
    """The norm; how many differences there are, `p` of 0, is NaN here where one is."""
    length = call(aten.linalg_vector_norm.default, difference, p, [-1])
    if p != 0.0:
        return length
    is_nan = call(aten.any.dim, call(aten.isnan.default, difference), -1)
    return call(aten.masked_fill.Scalar, length, is_nan, math.nan)


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.cosine_similarity.default: _cosine,
    aten.cdist.default: _distances,
    aten.pdist.default: _distances_once,
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
