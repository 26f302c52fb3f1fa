"""Where a model makes a tensor of another one's dtype, `torch.zeros(n, dtype=x.dtype)`: casts to FP32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from ampopt.ir.graph import arguments, aten, insert_call

_OF_ONE_DTYPE: dict[object, tuple[str, ...]] = {
    **dict.fromkeys((aten.scatter.src, aten.scatter.reduce, aten.scatter_add.default), ("self", "src")),
    aten.scatter_reduce.two: ("self", "src"),
    aten.index_put.default: ("self", "values"),
    **dict.fromkeys((aten.index_add.default, aten.index_copy.default), ("self", "source")),
    **dict.fromkeys((aten.index_reduce.default, aten.masked_scatter.default), ("self", "source")),
    aten.put.default: ("self", "source"),
    aten.lerp.Scalar: ("self", "end"),
    aten.lerp.Tensor: ("self", "end", "weight"),
    **dict.fromkeys((aten.isclose.default, aten.allclose.default, aten.inner.default), ("self", "other")),
    **dict.fromkeys((aten.cross.default, aten.linalg_cross.default, aten.vdot.default), ("self", "other")),
    aten.tensordot.default: ("self", "other"),
    aten.heaviside.default: ("self", "values"),
    aten.dot.default: ("self", "tensor"),
    aten.mv.default: ("self", "vec"),
    aten.addmv.default: ("self", "mat", "vec"),
    aten.bilinear.default: ("input1", "input2", "weight", "bias"),
    aten.searchsorted.Tensor: ("sorted_sequence", "self"),
    aten.bucketize.Tensor: ("self", "boundaries"),
    aten.histogram.bins_tensor: ("self", "bins"),
    **dict.fromkeys((aten.meshgrid.default, aten.meshgrid.indexing), ("tensors",)),
    **dict.fromkeys((aten.cartesian_prod.default, aten.linalg_multi_dot.default), ("tensors",)),
    aten.complex.default: ("real", "imag"),
    aten.polar.default: ("abs", "angle"),
    **dict.fromkeys(
        (aten.embedding_bag.default, aten.embedding_bag.padding_idx), ("weight", "per_sample_weights")
    ),
}
"""Operators that refuse numbers of different dtypes, and the arguments that are meant.

Found by calling all of PyTorch's operators under a CPU's autocast with one of their tensors in bfloat16.
On a GPU autocast widens some of them itself, and lowers `mv` and `addmv` whatever they are given.
"""

_LOWERED = frozenset(
    {aten.inner.default, aten.tensordot.default, aten.mv.default, aten.addmv.default, aten.dot.default}
    | {aten.vdot.default, aten.bilinear.default, aten.linalg_multi_dot.default}
)
"""Those of them that autocast may compute in the lower dtype, whatever it is given, on a CPU or on a GPU."""

_CASTS = (aten.to.dtype, aten._to_copy.default)

_OF_FIRST = frozenset(
    {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default}
    | {aten.new_ones.default, aten.new_full.default, aten.expand_as.default, aten.reshape.default}
    | {aten.view_as.default, aten.reshape_as.default, aten.clone.default, aten.contiguous.default}
    | {aten.lift_fresh_copy.default, aten.repeat.default, aten.flatten.using_ints, aten.index.Tensor}
    | {aten.gather.default, aten.index_select.default, aten.scatter.value, aten.index_put.default}
    | {aten.index_add.default, aten.index_copy.default, aten.scatter.src, aten.scatter_add.default}
    | {aten.masked_scatter.default}
)
"""Operators that give numbers of their first tensor's dtype, beside views."""

_PROMOTING = (aten.cat.default, aten.stack.default)
"""Operators that give numbers of the widest dtype that they take, beside pointwise ones."""


def widen_own(module: fx.GraphModule) -> None:
    """Let such a call compute in float32 where one of its operands may have another dtype than the others.

    Under autocast the model itself would make the one in the lower dtype of the others. The graph has float32
    there in all lanes, and so have weights and inputs. `f(x, own)` -> `f(x.float(), own.float())`: the casts
    do nothing in float32. Requires that the nodes have their values (`val`).
    """
    own = set[fx.Node]()  # what is float32 in every lane: given, made or cast so, or promoted by what is
    for node in list(module.graph.nodes):
        is_widened = _widened(module, node, own) and node.target not in _LOWERED
        is_given = node.op != "call_function" or _says_dtype(node)
        if is_widened or is_given or any(each in own for each in _sources(node)):
            own.add(node)


def _widened(module: fx.GraphModule, node: fx.Node, own: set[fx.Node]) -> bool:
    """Whether a call gets its operands in float32 from now on."""
    if node.target not in _OF_ONE_DTYPE or _fills(node):
        return False
    operands = [each for each in _operands(node) if _is_float32(each)]
    if len({operand in own for operand in operands}) < 2:
        return False
    for operand in operands:
        cast = insert_call(module, node, aten.to.dtype, operand, torch.float32)
        node.replace_input_with(operand, cast)
    return True


def _fills(node: fx.Node) -> bool:
    """Whether a call is `x[mask] = number`, which PyTorch does as `masked_fill`: that takes any dtype."""
    if node.target is not aten.index_put.default:
        return False
    given = arguments(node)
    indices = [each.meta.get("val") for each in given["indices"] if isinstance(each, fx.Node)]
    value = given["values"].meta.get("val")
    is_mask = len(indices) == 1 and isinstance(indices[0], Tensor) and indices[0].dtype is torch.bool
    if not is_mask or not isinstance(value, Tensor) or given["accumulate"]:
        return False
    return all(isinstance(size, int) and size == 1 for size in value.shape)  # values may decide a size


def _says_dtype(node: fx.Node) -> bool:
    is_made = not node.all_input_nodes
    return is_made or node.target in _CASTS or isinstance(node.kwargs.get("dtype"), torch.dtype)


def _sources(node: fx.Node) -> list[fx.Node]:
    """The inputs of which one that is float32 makes the result so; none where autocast may lower it."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return []
    if operator.is_view or operator in _OF_FIRST:
        return node.all_input_nodes[:1]
    if operator in _PROMOTING or torch.Tag.pointwise in operator.tags:
        given = [each for each in node.all_input_nodes if _is_float32(each)]
        return [each for each in given if each.meta["val"].dim()] or given  # a scalar promotes no tensor
    return []


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    given = arguments(node)
    for name in _OF_ONE_DTYPE[node.target]:
        values = given.get(name)
        for each in values if isinstance(values, list | tuple) else [values]:
            if isinstance(each, fx.Node):
                yield each


def _is_float32(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.float32
