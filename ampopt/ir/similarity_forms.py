"""The cosine similarity for ONNX, whose exporter divides a product by the product of the lengths.

Of a vector with an infinity that is an infinity, where PyTorch has NaN; lengths from 1e19 on overflow.

Correct because: PyTorch divides each vector by its own length, or by `eps` if that is more, and multiplies
then, as the form does. A length of NaN stays one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import arguments, aten, shape_of


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


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {aten.cosine_similarity.default: _cosine}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
