"""Between which bounds integers lie that an exported graph computes with numbers, outside of tensors.

Such a number is Python's, which has no bounds: `item` reads it from a tensor, and operators compute with it.
A condition is 0 or 1.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from ampopt.ir.graph import aten

Range = tuple[int, int]
"""The least and the largest integer that a number may be."""

FAR = 1 << 200
"""Stands for no bound."""

_EITHER: Range = (0, 1)


def _by_ends(compute: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    """The range of what grows, or falls, with each of two operands."""

    def ends(first: Range, second: Range) -> Range:
        found = [compute(a, b) for a in first for b in second]
        return min(found), max(found)

    return ends


def _floor(first: Range, second: Range) -> Range | None:
    return _by_ends(operator.floordiv)(first, second) if _is_divisor(second) else None


def _modulo(first: Range, second: Range) -> Range | None:
    if not _is_divisor(second):
        return None
    low, high, by = *first, second[0]
    return (low % by, high % by) if low // by == high // by else (0, by - 1)


def _is_divisor(by: Range) -> bool:
    """Whether it is one number above zero: by another PyTorch's operators and Python's differ, or fail."""
    return by[0] == by[1] > 0


def _less(first: Range, second: Range) -> Range:
    return (1, 1) if first[1] < second[0] else (0, 0) if first[0] >= second[1] else _EITHER


def _not(condition: Range) -> Range | None:
    return (1 - condition[1], 1 - condition[0]) if lies_in(condition, _EITHER) else None


def _of_conditions(compute: Callable[[int, int], int]) -> Callable[[Range, Range], Range | None]:
    """The range of what combines two conditions: of other integers, the operators combine the bits."""

    def combined(first: Range, second: Range) -> Range | None:
        are_conditions = lies_in(first, _EITHER) and lies_in(second, _EITHER)
        return _by_ends(compute)(first, second) if are_conditions else None

    return combined


def _equal(first: Range, second: Range) -> Range:
    if first == second and first[0] == first[1]:
        return 1, 1
    return (0, 0) if first[1] < second[0] or second[1] < first[0] else _EITHER


RING: dict[object, Callable[..., Range | None]] = {
    operator.add: _by_ends(operator.add),
    operator.sub: _by_ends(operator.sub),
    operator.mul: _by_ends(operator.mul),
    operator.neg: lambda one: (-one[1], -one[0]),
}
"""Operators that are exact in int64 but for multiples of 2⁶⁴."""

ARITHMETIC: dict[object, Callable[..., Range | None]] = {
    **RING,
    operator.floordiv: _floor,
    operator.mod: _modulo,
    torch.sym_min: _by_ends(min),
    torch.sym_max: _by_ends(max),
}
"""Operators that compute integers, and the range of their result from those of their operands."""

_CONDITIONS: dict[object, Callable[..., Range | None]] = {
    operator.lt: _less,
    operator.gt: lambda one, other: _less(other, one),
    operator.ge: lambda one, other: _not(_less(one, other)),
    operator.le: lambda one, other: _not(_less(other, one)),
    operator.eq: _equal,
    operator.ne: lambda one, other: _not(_equal(one, other)),
    operator.and_: _of_conditions(min),
    operator.or_: _of_conditions(max),
    torch.sym_not: _not,
}

KNOWN: dict[object, Callable[..., Range | None]] = {**ARITHMETIC, **_CONDITIONS}
"""Operators of which this module knows what they compute from integers and conditions."""


def ranges_of(nodes: Iterable[fx.Node], given: Mapping[fx.Node, Range]) -> dict[fx.Node, Range | None]:
    """The ranges of the numbers and conditions among nodes in order, from those of the numbers in `given`."""
    found: dict[fx.Node, Range | None] = dict(given)
    for node in nodes:
        found.setdefault(node, _computed(node, found))
    return found


def range_of(number: Any, known: Mapping[fx.Node, Range | None]) -> Range | None:
    """The range of an operand; None where nothing is known of it."""
    if isinstance(number, int):
        return int(number), int(number)
    return known.get(number) if isinstance(number, fx.Node) else None


def _computed(node: fx.Node, known: Mapping[fx.Node, Range | None]) -> Range | None:
    """The range of what a node computes. A place in memory is no less than zero, whatever values decide."""
    if node.target is aten.sym_storage_offset.default:
        return 0, FAR
    if node.target not in KNOWN or node.kwargs:
        return None
    operands = [range_of(each, known) for each in node.args]
    return None if None in operands else KNOWN[node.target](*operands)


def source_range(number: fx.Node, source: fx.Node, wanted: Range) -> Range | None:
    """Where a number that one other is computed to, `source`, lies exactly if the result is as `wanted`.

    None where that is not one range, or not known. An empty one has a least that is larger than the largest.
    """
    while number is not source:
        if (found := _operand_range(number, wanted)) is None or not isinstance(found[0], fx.Node):
            return None
        number, wanted = found
    return wanted


def _operand_range(number: fx.Node, wanted: Range) -> tuple[Any, Range] | None:
    """The one operand of a number that is not constant, and its range if the number's is as `wanted`."""
    (low, high), target = wanted, number.target
    if target is operator.neg:
        return number.args[0], (-high, -low)
    if target not in ARITHMETIC or len(number.args) != 2:
        return None
    first, second = number.args
    if target is operator.sub and isinstance(first, int):
        return second, (first - high, first - low)
    if isinstance(first, int) and target in (operator.add, operator.mul):
        first, second = second, first
    if not isinstance(second, int):
        return None
    if target is operator.add:
        return first, (low - second, high - second)
    if target is operator.sub:
        return first, (low + second, high + second)
    if second <= 0:
        return None
    if target is operator.mul:
        return first, (-(-low // second), high // second)
    return (first, (low * second, high * second + second - 1)) if target is operator.floordiv else None


def both(one: Range, other: Range) -> Range:
    """What lies in both ranges."""
    return max(one[0], other[0]), min(one[1], other[1])


def lies_in(one: Range | None, other: Range) -> bool:
    """Whether a range is known and within another."""
    return one is not None and other[0] <= one[0] and one[1] <= other[1]
