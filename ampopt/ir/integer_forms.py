"""Forms of operators on integers for ONNX, whose own operators take other indices and round large numbers.

PyTorch refuses a negative index where it looks up rows; ONNX counts it from the end, and so answers what
eager refuses, and makes a row of zeros of a class that there is not. torch.onnx divides integers in floating
point, which is inexact from 2²⁴ on. ONNX Runtime adds and multiplies along a dimension, and takes powers, in
float64, which is inexact from 2⁵³ on, and ends at the bounds of the result's dtype, where PyTorch's integers
go around. It dies where the smallest integer is divided by -1, for which PyTorch, and negation, have that
integer itself.

Correct because: an index that is not negative stays, and a negative one becomes one that no tensor has, which
ONNX Runtime refuses as eager does; a class is looked up in their list, and compared with all of it; a
quotient of integers rounded down is ONNX's floor division, or the negative of what -1 divides, and towards
zero that of the dividend without its remainder, which divides exactly; a sum is the last of the running sums,
or, of short integers, one in int64 whose low half it is; a product is that of the products of both halves,
and a power that of the powers that its exponent's bits have; and integers that go around may be combined in
any order. A trace is the sum of the diagonal, which is read at every (columns + 1)-th place, and an einsum is
taken apart as PyTorch does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.fx.passes.shape_prop import ShapeProp

from ampopt.ir.capturing import capturing
from ampopt.ir.deciding_forms import in_dtype_of
from ampopt.ir.graph import (
    add_constant,
    arguments,
    aten,
    calls,
    constant,
    copy_of,
    dtype_of,
    finish,
    insert_call,
    is_constant,
    replace,
    shape_of,
)

OUT_OF_RANGE = 2**31 - 1
"""The index that stands for a negative one: int32 has it, and no dimension is as long."""

INDEXED: dict[Any, str] = {
    aten.embedding.default: "indices",
    aten.embedding_bag.default: "indices",
    aten.embedding_bag.padding_idx: "indices",
    aten.index_select.default: "index",
    aten.gather.default: "index",
    aten.scatter.src: "index",
    aten.scatter.value: "index",
    aten.scatter.reduce: "index",
    aten.scatter.value_reduce: "index",
    aten.scatter_add.default: "index",
    aten.scatter_reduce.two: "index",
    aten.index_add.default: "index",
    aten.index_copy.default: "index",
}
"""Operators that refuse negative indices, and the argument that has these."""

PLACES = (aten.index.Tensor, aten.index_put.default)
"""Operators that take places as PyTorch's brackets do: of int32, too, which ONNX has not."""

DIVISIONS = (
    *(aten.div.Tensor_mode, aten.div.Scalar_mode, aten.divide.Tensor_mode, aten.divide.Scalar_mode),
    aten.floor_divide.default,
)

SUMS = (aten.sum.default, aten.sum.dim_IntList)

PRODUCTS = (aten.prod.default, aten.prod.dim_int)

POWERS = (aten.pow.Tensor_Scalar,)

COMPOSITES = (aten.trace.default, aten.einsum.default)
"""Operators that are taken apart into sums, diagonals and products."""

DIAGONALS = (aten.diagonal.default, aten.linalg_diagonal.default, aten.diag.default)
"""Operators that torch.onnx writes as sums in which all but the diagonal is 0."""

SHORT = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)
"""Dtypes of which float64 adds millions exactly."""

EXACT_POWERS = range(4)
"""Exponents with which ONNX Runtime multiplies."""

CASTS = (aten._to_copy.default, aten.to.dtype)

END = 2**63 - 1
"""The end of a slice that goes to the last element, however many there are."""


def with_integer_forms(
    module: fx.GraphModule, examples: Sequence[Tensor], *, is_dynamic: bool = False
) -> fx.GraphModule:
    """The graph with checked indices and exact arithmetic of integers; unchanged if there are none.

    `examples` are inputs of the graph: a run on them tells what is of integers, and how many factors a
    product has. Products, diagonals and einsums stay as they are where sizes are dynamic.
    """
    candidates = (*DIVISIONS, *SUMS, *PRODUCTS, *POWERS, *PLACES, *COMPOSITES, *DIAGONALS)
    arithmetic = [n for n in calls(module, candidates) if _may_be_of_integers(n)]
    if not arithmetic and not any(calls(module, [*INDEXED, aten.one_hot.default])):
        return module
    changed = copy_of(module)
    for node in calls(changed, [aten.one_hot.default]):
        _look_up_class(changed, node)
    if arithmetic:
        ShapeProp(changed).propagate(*examples)
    composites = [] if is_dynamic else [*calls(changed, COMPOSITES)]
    taken = [_take_apart(changed, node) for node in composites]
    if any(taken):
        ShapeProp(changed).propagate(*examples)
    for node in () if is_dynamic else calls(changed, DIAGONALS):
        if dtype_of(node) is torch.int64:
            _read_diagonal(changed, node)
    for node in calls(changed, DIVISIONS):
        if _may_be_of_integers(node) and not dtype_of(node).is_floating_point:
            _divide_exactly(changed, node)
    for node in calls(changed, SUMS):
        if _is_inexact(node):
            _add_exactly(changed, node)
    for node in () if is_dynamic else calls(changed, PRODUCTS):
        if _is_inexact(node):
            _multiply_exactly(changed, node)
    for node in calls(changed, POWERS):
        if not dtype_of(node).is_floating_point and not dtype_of(node).is_complex:
            _raise_exactly(changed, node)
    for node in calls(changed, PLACES):
        for index in filter(None, arguments(node)["indices"]):
            if dtype_of(index) is torch.int32:
                wide = insert_call(changed, node, aten._to_copy.default, index, dtype=torch.int64)
                indices = [wide if each is index else each for each in node.args[1]]  # type: ignore[union-attr]
                node.update_arg(1, indices)
    for node in calls(changed, INDEXED):
        index = arguments(node)[INDEXED[node.target]]
        if isinstance(index, fx.Node) and index.op != "get_attr":  # a constant index was read already
            _refuse_negative(changed, node, index)
    return finish(changed)


def _may_be_of_integers(node: fx.Node) -> bool:
    is_division = node.target in DIVISIONS and node.target is not aten.floor_divide.default
    return not is_division or node.kwargs.get("rounding_mode") is not None


def _is_inexact(node: fx.Node) -> bool:
    """Whether a sum or product is of integers, and may not fit into float64, or a sum not into int32.

    Booleans are counted exactly.
    """
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    while source.target in CASTS and dtype_of(source) is torch.int64:
        source = source.all_input_nodes[0]
    is_long = dtype_of(node) is torch.int64
    is_count = node.target in SUMS and dtype_of(source) in (SHORT if is_long else (torch.bool,))
    return dtype_of(node) in (torch.int32, torch.int64) and not is_count and 0 not in shape_of(source)


def _divide_exactly(module: fx.GraphModule, node: fx.Node) -> None:
    values = arguments(node)
    a, b = (_operand(module, node, values[name]) for name in ("self", "other"))
    if node.kwargs.get("rounding_mode") == "trunc":
        remainder = aten.fmod.Tensor if _is_tensor(b) else aten.fmod.Scalar
        a = insert_call(module, node, aten.sub.Tensor, a, insert_call(module, node, remainder, a, b))
    quotient = _rounded_down(module, node, a, b)
    quotient.meta["tensor_meta"] = node.meta["tensor_meta"]  # another division may ask what it reads
    replace(node, quotient)


def _operand(module: fx.GraphModule, node: fx.Node, value: Any) -> Any:
    """An operand in the dtype of a node's result; a number, also one that sizes make, stays."""
    if not _is_tensor(value):
        return value
    operand = in_dtype_of(partial(insert_call, module, node), value, node)
    operand.meta.setdefault("tensor_meta", node.meta["tensor_meta"])  # of which the dtype alone is read
    return operand


def _is_tensor(value: object) -> bool:
    return isinstance(value, fx.Node) and "tensor_meta" in value.meta


def _rounded_down(module: fx.GraphModule, node: fx.Node, a: Any, b: Any) -> fx.Node:
    """a // b, which is -a where b is -1; shorter integers than int32 do not end the process."""
    call = partial(insert_call, module, node)
    if not isinstance(a, fx.Node) or dtype_of(node) not in (torch.int32, torch.int64):
        return call(aten.floor_divide.default, a, b)
    if not isinstance(b, fx.Node):
        return call(aten.neg.default, a) if b == -1 else call(aten.floor_divide.default, a, b)
    if not _is_tensor(b):
        return call(aten.floor_divide.default, a, b)  # by a size, which is not negative
    known = constant(module, b) if is_constant(b) else None
    if known is not None and not bool(known.eq(-1).any()):
        return call(aten.floor_divide.default, a, b)
    negates = call(aten.eq.Scalar, b, -1)
    divisor = call(aten.masked_fill.Scalar, b, negates, 1)
    return call(
        aten.where.self, negates, call(aten.neg.default, a), call(aten.floor_divide.default, a, divisor)
    )


def _take_apart(module: fx.GraphModule, node: fx.Node) -> bool:
    """Write a trace or an einsum of integers in PyTorch's own steps; whether it did."""
    if dtype_of(node).is_floating_point or dtype_of(node).is_complex:
        return False
    call = partial(insert_call, module, node)
    if node.target is aten.trace.default:
        replace(node, call(aten.sum.default, call(aten.diagonal.default, node.args[0])))
        return True
    operands: list[fx.Node] = arguments(node)["tensors"]
    like = [torch.empty(shape_of(each), dtype=dtype_of(each), device="meta") for each in operands]
    with capturing():
        steps = make_fx(lambda *tensors: aten.einsum.default(node.args[0], list(tensors)))(*like)
    made: dict[fx.Node, Any] = dict(zip(steps.graph.find_nodes(op="placeholder"), operands, strict=True))
    for step in calls(steps):
        args, kwargs = map_arg((step.args, step.kwargs), made.__getitem__)
        made[step] = call(step.target, *args, **kwargs)  # type: ignore[arg-type]
    replace(node, made[steps.graph.output_node().all_input_nodes[0]])
    return True


def _read_diagonal(module: fx.GraphModule, node: fx.Node) -> None:
    values, call = arguments(node), partial(insert_call, module, node)
    source: fx.Node = values["self" if "self" in values else "A"]
    shape, count = shape_of(source), shape_of(node)[-1]
    if len(shape) < 2:
        return  # what makes a matrix of a row
    offset: int = values["offset" if "offset" in values else "diagonal"]
    pair = [values.get(name, default) % len(shape) for name, default in (("dim1", 0), ("dim2", 1))]
    others = [dim for dim in range(len(shape)) if dim not in pair]
    rows, columns = (shape[dim] for dim in pair)
    first = max(offset, -offset * columns)
    places = torch.arange(first, first + count * (columns + 1), columns + 1)
    last = call(aten.permute.default, source, [*others, *pair])
    flat = call(aten.reshape.default, last, [*(shape[dim] for dim in others), rows * columns])
    chosen = add_constant(module, "diagonal", places, node)
    read = call(aten.index_select.default, flat, -1, chosen)
    read.meta["tensor_meta"] = node.meta["tensor_meta"]
    replace(node, read)


def _raise_exactly(module: fx.GraphModule, node: fx.Node) -> None:
    """The product of the squares of squares that the exponent's bits have, where it is an integer."""
    exponent = node.args[1]
    if not isinstance(exponent, int) or exponent in EXACT_POWERS or exponent < 0:
        return
    square, power = _operand(module, node, node.args[0]), None
    while True:
        if exponent % 2:
            power = square if power is None else insert_call(module, node, aten.mul.Tensor, power, square)
        exponent //= 2
        if not exponent:
            break
        square = insert_call(module, node, aten.mul.Tensor, square, square)
    assert power is not None
    power.meta["tensor_meta"] = node.meta["tensor_meta"]
    replace(node, power)


def _add_exactly(module: fx.GraphModule, node: fx.Node) -> None:
    if dtype_of(node) is torch.int32 and dtype_of(node.args[0]) in SHORT:  # type: ignore[arg-type]
        kwargs = {**node.kwargs, "dtype": torch.int64}
        long = insert_call(module, node, node.target, *node.args, **kwargs)  # type: ignore[arg-type]
        low = insert_call(module, node, aten._to_copy.default, long, dtype=torch.int32)
        low.meta["tensor_meta"] = node.meta["tensor_meta"]
        return replace(node, low)
    total, values = _operand(module, node, node.args[0]), arguments(node)
    rank = len(shape_of(node.args[0]))  # type: ignore[arg-type]
    dims = sorted({dim % rank for dim in values.get("dim") or range(rank)})
    for dim in dims:
        running = insert_call(module, node, aten.cumsum.default, total, dim, dtype=dtype_of(node))
        total = insert_call(module, node, aten.slice.Tensor, running, dim, -1, END)
    return _replace_reduced(module, node, total, dims)


def _multiply_exactly(module: fx.GraphModule, node: fx.Node) -> None:
    product, shape = _operand(module, node, node.args[0]), shape_of(node.args[0])  # type: ignore[arg-type]
    dim = arguments(node).get("dim")
    dims = list(range(len(shape))) if dim is None else [dim % len(shape)]
    for dim in dims:
        product = _product_along(module, node, product, dim, shape[dim])
    _replace_reduced(module, node, product, dims)


def _product_along(module: fx.GraphModule, node: fx.Node, factors: fx.Node, dim: int, size: int) -> fx.Node:
    """The product along a dimension, of size 1; an odd one out is multiplied last."""
    if size == 1:
        return factors
    half = size // 2
    parts = [
        insert_call(module, node, aten.slice.Tensor, factors, dim, start, start + half) for start in (0, half)
    ]
    product = insert_call(module, node, aten.mul.Tensor, *parts)
    product = _product_along(module, node, product, dim, half)
    if size % 2 == 0:
        return product
    last = insert_call(module, node, aten.slice.Tensor, factors, dim, size - 1, size)
    return insert_call(module, node, aten.mul.Tensor, product, last)


def _replace_reduced(module: fx.GraphModule, node: fx.Node, reduced: fx.Node, dims: Sequence[int]) -> None:
    if not arguments(node).get("keepdim"):
        reduced = insert_call(module, node, aten.squeeze.dims, reduced, list(dims))
    reduced.meta["tensor_meta"] = node.meta["tensor_meta"]
    replace(node, reduced)


def _look_up_class(module: fx.GraphModule, node: fx.Node) -> None:
    """Compare a look-up in the list of classes, which refuses what is none, with all of them."""
    call, classes = partial(insert_call, module, node), torch.arange(arguments(node)["num_classes"])
    rows = add_constant(module, "classes", classes.unsqueeze(1), node)
    row = add_constant(module, "classes", classes, node)
    is_one = call(aten.eq.Tensor, call(aten.embedding.default, rows, node.args[0]), row)
    replace(node, call(aten._to_copy.default, is_one, dtype=torch.int64))


def _refuse_negative(module: fx.GraphModule, node: fx.Node, index: fx.Node) -> None:
    is_negative = insert_call(module, node, aten.lt.Scalar, index, 0)
    checked = insert_call(module, node, aten.masked_fill.Scalar, index, is_negative, OUT_OF_RANGE)
    node.replace_input_with(index, checked)
