"""Integers that a graph computes outside of tensors, from numbers of tensors: as tensors of int64.

Correct because: Python's integers have no bounds, and int64 has the same sums, differences, products and
negatives but for multiples of 2⁶⁴. Quotients, extremes and remainders are taken of numbers that int64 holds,
by one number above zero, for which PyTorch's and Python's are the same. A remainder by a power of two is that
of a number which has gone around, too; by another one, no larger than 2³¹, it is that of what the remainders
of the operands give, which int64 holds. A number within 2⁶³ + 2⁶² of 0 that has gone around is 2⁶² from 0 at
the least, and so no place of any tensor, as it was none before.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ampopt.ir.fake_values import result_of
from ampopt.ir.graph import aten, insert_call
from ampopt.ir.integer_ranges import ARITHMETIC, RING, Range, lies_in, range_of, ranges_of

_INT64: Range = (-(1 << 63), (1 << 63) - 1)
_NO_PLACE_AROUND: Range = (-(3 << 62), 3 << 62)

_CONSTANTS: Range = (-(1 << 62), 1 << 62)
"""Constants that may be negated, and given to an operator of tensors."""

_EXACT_PRODUCTS = 1 << 31
"""Of remainders by no more than this, products are exact in int64."""

_DEEPEST = 10
"""How many operators deep a remainder is taken of operands in place of the result."""


class Exactness:
    """Whether int64 can compute numbers; `items`: those of tensors, with what they may be."""

    def __init__(self, numbers: Sequence[fx.Node], items: Mapping[fx.Node, Range]) -> None:
        self.items = items
        self._ranges = ranges_of(numbers, items)
        self._going_around = set(items)
        for node in numbers:
            if self._can_go_around(node):
                self._going_around.add(node)

    def is_no_place_around(self, number: fx.Node) -> bool:
        """Whether int64 can compute a number, and it is no place where it has gone around."""
        return self.goes_around(number) and lies_in(self._ranges[number], _NO_PLACE_AROUND)

    def goes_around(self, number: Any) -> bool:
        """Whether int64 can compute a number but for multiples of 2⁶⁴."""
        return number in self._going_around if isinstance(number, fx.Node) else _is_constant(number)

    def has_whole_remainder(self, number: Any, by: int) -> bool:
        """Whether the remainder of a number is that of its tensor."""
        is_held = (1 << 64) % by == 0 or lies_in(range_of(number, self._ranges), _INT64)
        return is_held and self.goes_around(number)

    def _can_go_around(self, node: fx.Node) -> bool:
        if node.target in RING:
            return all(map(self.goes_around, node.args))
        if node.target not in ARITHMETIC or self._ranges[node] is None:
            return False
        if node.target is operator.mod:
            number, by = node.args
            return isinstance(by, int) and _is_constant(by) and self._has_remainder(number, by)
        return all(self.goes_around(n) and lies_in(range_of(n, self._ranges), _INT64) for n in node.args)

    def _has_remainder(self, number: Any, by: int, depth: int = 0) -> bool:
        if isinstance(number, int) or self.has_whole_remainder(number, by):
            return True
        if by > _EXACT_PRODUCTS or depth == _DEEPEST or number.target not in RING:
            return False
        return all(self._has_remainder(each, by, depth + 1) for each in number.args)


def _is_constant(number: object) -> bool:
    return isinstance(number, int) and lies_in((number, number), _CONSTANTS)


class NumbersAsTensors:
    """Writes the operators of tensors that compute numbers, each before the number itself."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode, exactness: Exactness) -> None:
        self.module = module
        self._mode, self._exactness = mode, exactness
        self._tensors: dict[tuple[fx.Node, int], Any] = {}

    def call(self, before: fx.Node, target: Any, *args: Any) -> fx.Node:
        """Insert a call, with its value."""
        node = insert_call(self.module, before, target, *args)
        node.meta["val"] = result_of(self._mode, target, node)
        return node

    def tensor(self, number: Any, by: int = 0) -> Any:
        """A number as a tensor without dimensions, a constant as it is; `by` > 0: its remainder by that."""
        if isinstance(number, int):
            return number % by if by else number
        if (number, by) not in self._tensors:
            self._tensors[number, by] = self._remainder(number, by) if by else self._whole(number)
        return self._tensors[number, by]

    def _whole(self, number: fx.Node) -> Any:
        given: tuple[Any, ...] = number.args
        if number in self._exactness.items:
            tensor, value = given[0], given[0].meta["val"]
            assert isinstance(value, Tensor)
            if value.dtype is not torch.int64:
                tensor = self.call(number, aten.to.dtype, tensor, torch.int64)
            return self.call(number, aten.reshape.default, tensor, []) if value.dim() else tensor
        if number.target is operator.mod:
            return self.tensor(given[0], given[1])
        return self._combined(number, *map(self.tensor, given))

    def _remainder(self, number: fx.Node, by: int) -> fx.Node:
        if self._exactness.has_whole_remainder(number, by):
            whole = self.tensor(number)
        else:
            whole = self._combined(number, *(self.tensor(each, by) for each in number.args))
        return self.call(number, aten.remainder.Scalar, whole, by)

    def _combined(self, number: fx.Node, *given: Any) -> fx.Node:
        """What an operator computes from one or two operands, not all of which are constant."""
        target, (first, *others) = number.target, given
        if target is operator.neg:
            return self.call(number, aten.neg.default, first)
        second = others[0]
        if target is operator.floordiv:
            return self.call(number, aten.floor_divide.default, first, second)
        if target is operator.sub and isinstance(second, int):
            return self.call(number, aten.add.Tensor, first, -second)
        if target is operator.sub and isinstance(first, int):
            first, second, target = self.call(number, aten.neg.default, second), first, operator.add
        if isinstance(first, int):
            first, second = second, first
        return self.call(number, _OF_TENSORS[target, isinstance(second, int)], first, second)


_OF_TENSORS: dict[tuple[Any, bool], Any] = {
    **{(operator.add, is_constant): aten.add.Tensor for is_constant in (False, True)},
    **{(operator.mul, is_constant): aten.mul.Tensor for is_constant in (False, True)},
    (operator.sub, False): aten.sub.Tensor,
    (torch.sym_min, False): aten.minimum.default,
    (torch.sym_min, True): aten.clamp_max.default,
    (torch.sym_max, False): aten.maximum.default,
    (torch.sym_max, True): aten.clamp_min.default,
}
"""The operators of tensors that compute as those of numbers, by whether the second operand is constant."""
