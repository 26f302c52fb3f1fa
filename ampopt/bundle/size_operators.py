"""The arithmetic with sizes that a program for a range of sizes may contain: numbers of numbers.

`torch.export` writes a size that varies as a node, and what is computed of it as calls of Python's operators.
Only those here are written and read. Each is computed when a bundle is read, and again in each call, so the
numbers stay within 64 bits and powers of integers have small exponents: no file makes it compute large ones.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt.bundle.stored_values import INT64

SIZE = "size"
"""The operator that reads a dimension's size of a tensor."""

SIZE_OPERATORS: dict[str, Callable[..., Any]] = {
    SIZE: torch.ops.aten.sym_size.int,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "mod": operator.mod,
    "pow": operator.pow,
    "neg": operator.neg,
    "ceil": math.ceil,
    "floor": math.floor,
    "sym_float": torch.sym_float,
    "sym_int": torch.sym_int,
    "sym_max": torch.sym_max,
    "sym_min": torch.sym_min,
}

_NAMES: Mapping[Any, str] = {function: name for name, function in SIZE_OPERATORS.items()}

LARGEST_EXPONENT = 4
"""Largest exponent of an integer; powers of other numbers, and with negative exponents, have 64 bits."""


def size_operator_name(target: object) -> str | None:
    """The name of an operator of sizes; None for others."""
    return _NAMES.get(target)


def computed_size(target: Callable[..., Any], args: Sequence[Any]) -> int | float:
    """The number of a call. Raises ValueError for arguments and results that are no numbers of 64 bits."""
    name = size_operator_name(target)
    if name == SIZE:
        if len(args) != 2 or not isinstance(args[0], Tensor) or type(args[1]) is not int:
            raise ValueError("it takes a tensor and the number of a dimension")
        args = args[0].shape, args[1]
        return int(operator.getitem(*args))
    if not args or not all(map(_is_number, args)):
        raise ValueError("it takes numbers of 64 bits")
    if name == "pow" and all(type(each) is int for each in args) and args[-1] > LARGEST_EXPONENT:
        raise ValueError(f"the exponent of an integer is at most {LARGEST_EXPONENT}")
    result: int | float = target(*args)
    if not _is_number(result):
        raise ValueError("its result is no number of 64 bits")
    return result


def _is_number(value: object) -> bool:
    if type(value) is int:
        return value in INT64
    return type(value) is float and math.isfinite(value)
