"""Arithmetic on sizes in the few operators that ONNX and a bundle's file have.

`n << 2` is `n * 4`, `n >> 1` is `n // 2`, `n & 7` is `n % 8`, `n & ~7` is `n - n % 8`, `abs(n)` is the larger
of n and -n, and a tensor's number of elements is the product of its sizes.

Correct because: Python's integers are in two's complement of any width, and its quotients and remainders are
rounded down, so that a shift to the right is a division by a power of two, and the lowest bits are the
remainder of one, for negative numbers, too. Other masks, and shifts by what sizes make, stay as they are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ampopt.ir.graph import aten, calls

Operation = Callable[..., Any]
"""Inserts a call of an operator, with a number of sizes among its arguments, and returns its node."""

MOST_BITS = 62
"""Largest power of two that stays within 64 bits."""


def write_sizes_plainly(module: fx.GraphModule) -> None:
    """Rewrite the arithmetic on sizes in an exported graph, in place; its nodes have values in `val`."""
    for node in calls(module, _FORMS):
        made = _FORMS[node.target](_inserting_before(node), *node.args)
        if made is not None:
            node.replace_all_uses_with(made)
            module.graph.erase_node(node)
    module.recompile()


def _inserting_before(node: fx.Node) -> Operation:
    def insert(target: Operation, *args: Any) -> Any:
        with node.graph.inserting_before(node):
            made = node.graph.call_function(target, args)
        made.meta = {**node.meta, "val": target(*map(_value, args))}
        return made

    return insert


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _is_whole(number: Any) -> bool:
    return isinstance(_value(number), (int, torch.SymInt))


def _is_shift(bits: Any) -> bool:
    return type(bits) is int and 0 <= bits <= MOST_BITS


def _shifted_left(insert: Operation, number: Any, bits: Any) -> Any:
    return insert(operator.mul, number, 2**bits) if _is_shift(bits) else None


def _shifted_right(insert: Operation, number: Any, bits: Any) -> Any:
    return insert(operator.floordiv, number, 2**bits) if _is_shift(bits) else None


def _masked(insert: Operation, number: Any, mask: Any) -> Any:
    if type(number) is int:
        number, mask = mask, number
    if type(mask) is not int or abs(mask) > 2**MOST_BITS or not _is_whole(number):
        return None
    if mask >= 0 and (mask + 1).bit_count() == 1:  # the lowest bits
        return insert(operator.mod, number, mask + 1)
    if mask < 0 and (-mask).bit_count() == 1:  # all others
        return insert(operator.sub, number, insert(operator.mod, number, -mask))
    return None


def _absolute(insert: Operation, number: Any) -> Any:
    return insert(torch.sym_max, number, insert(operator.neg, number))


def _elements(insert: Operation, tensor: fx.Node) -> Any:
    shape = list(enumerate(_value(tensor).shape))
    product: Any = math.prod(size for _, size in shape if type(size) is int)
    for dim in [dim for dim, size in shape if type(size) is not int]:
        product = insert(operator.mul, insert(aten.sym_size.int, tensor, dim), product)
    return product


_FORMS: Mapping[Any, Callable[..., Any]] = {
    operator.lshift: _shifted_left,
    operator.rshift: _shifted_right,
    operator.and_: _masked,
    operator.abs: _absolute,
    abs: _absolute,
    aten.sym_numel.default: _elements,
}
