"""Writes weight normalization out: PyTorch's own operator for it trusts the sizes that it is given.

So no program file may hold it (`ir.operator_list`), and bundles could not hold such a model.

Correct because: `v g / ‖v‖`, with the norm along all dimensions but one, or all for dim -1, is what it is;
other negative dims count from the end.
"""

from __future__ import annotations

import operator

from torch import Tensor, fx

from ampopt.ir.graph import arguments, aten, calls, insert_call, replace


def write_out_weight_norms(module: fx.GraphModule) -> None:
    """Replace `_weight_norm(v, g, dim)` by operators of linear algebra; `meta["val"]` tells the rank of v."""
    for node in calls(module, [aten._weight_norm.default]):
        replace(node, _normed(module, node)[0])
    for node in calls(module, [aten._weight_norm_interface.default]):
        results = _normed(module, node)
        for user in list(node.users):
            assert user.target is operator.getitem
            replace(user, results[user.args[1]])  # type: ignore[index]


def _normed(module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The normalized weight, and the norm."""
    own = arguments(node)
    value = own["v"].meta["val"]
    assert isinstance(value, Tensor)
    kept = own["dim"] if own["dim"] == -1 else own["dim"] % value.dim()
    dims = [dim for dim in range(value.dim()) if dim != kept]
    norm = insert_call(module, node, aten.linalg_vector_norm.default, own["v"], 2, dims, True)
    factor = insert_call(module, node, aten.div.Tensor, own["g"], norm)
    return insert_call(module, node, aten.mul.Tensor, own["v"], factor), norm
