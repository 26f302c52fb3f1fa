"""How far two results of a model are apart, whatever they are made of: tensors, arrays, numbers, objects."""

from __future__ import annotations

import collections
import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampopt.errors import AmpoptError
from ampopt.ir.deep_copy import deep_copy
from ampopt.ir.model_copy import same_tensor
from ampopt.ir.numerics import relative_error
from ampopt.ir.parts import ATOMS, parts_of

_WHOLE = (*ATOMS, type, types.ModuleType, types.BuiltinFunctionType, set, frozenset)
"""Values that are equal or not; the elements of a set are told apart by their hashes alone."""

_WITH_PARTS = (Mapping, Sequence, collections.deque, types.FunctionType, types.MethodType, np.ndarray)
"""Values that may have no parts and are compared by them all the same."""


class IncomparableError(AmpoptError):
    """A result holds something of which nothing tells whether it is right."""


@dataclasses.dataclass(frozen=True)
class Distance:
    """The largest relative error, and the path to it in the result ("" for the result itself).

    Infinite where the structure differs, or a value that has no error: a word, a class, an integer. Or what
    a metric gives, which may be NaN.
    """

    error: float
    path: str = ""

    def __str__(self) -> str:
        return f"{self.error:.2g}" + (f" at {self.path.removeprefix('.')}" if self.path else "")


def kept(result: Any) -> Any:
    """A copy of a result that later calls cannot change. Raises IncomparableError if it cannot be copied."""
    try:
        return deep_copy(result, {})
    except Exception as error:
        raise IncomparableError(f"the result cannot be compared ({error})") from error


def distance(expected: Any, found: Any) -> Distance:
    """How far a result is from the expected one, of which it shares no part that could change.

    All that can be reached from them is compared: items, attributes, closures. A list of floats counts as one
    vector. Raises IncomparableError for what cannot be looked into, such as a generator.
    """
    worst, seen = Distance(0.0), set[tuple[int, int]]()
    waiting = [("", expected, found)]
    while waiting and worst.error < math.inf:
        path, a, b = waiting.pop()
        if (id(a), id(b)) in seen or (a is b and not isinstance(a, Tensor)):
            continue
        seen.add((id(a), id(b)))
        error = _error_of_leaves(path, a, b)
        if error is None:
            inside = _pairs(a, b)
            error = math.inf if inside is None else 0.0
            waiting += [(path + step, x, y) for step, x, y in inside or ()]
        if not error <= worst.error:
            worst = Distance(error, path)
    return worst


def _error_of_leaves(path: str, a: Any, b: Any) -> float | None:
    """The error of values without parts; None for those that have some."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _error_of_tensors(a, b)
    if type(a) is not type(b):
        return math.inf
    one, other = _as_tensor(a), _as_tensor(b)
    if one is not None or other is not None:
        is_same_kind = (
            one is not None and other is not None and getattr(a, "dtype", 0) == getattr(b, "dtype", 0)
        )
        return relative_error(other, one) if is_same_kind else math.inf  # type: ignore[arg-type]
    if isinstance(a, np.ndarray) and not a.dtype.hasobject:  # words, dates, records
        is_same = (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
        return 0.0 if is_same else math.inf
    if isinstance(a, _WHOLE):
        return 0.0 if a == b else math.inf
    if (
        isinstance(a, _WITH_PARTS)
        or hasattr(a, "__dict__")
        or next(parts_of(a, code=False, classes=False), None)
    ):
        return None
    if type(a) is object:
        return 0.0
    if getattr(type(a), "__eq__", None) is not object.__eq__:
        return 0.0 if bool(a == b) else math.inf
    where = f" at {path.removeprefix('.')}" if path else ""
    raise IncomparableError(f"the result holds a {type(a).__name__}{where}, which cannot be compared")


def _error_of_tensors(a: Tensor, b: Tensor) -> float:
    if a.dtype is not b.dtype or a.layout is not b.layout or a.is_nested != b.is_nested:
        return math.inf
    if a.is_nested:
        mine, yours = a.unbind(), b.unbind()
        return max(map(relative_error, yours, mine), default=0.0) if len(mine) == len(yours) else math.inf
    try:
        dense = (a, b) if a.layout is torch.strided else (a.to_dense(), b.to_dense())
        return relative_error(dense[1], dense[0])
    except (RuntimeError, NotImplementedError):  # quantized: there is no such arithmetic
        return 0.0 if same_tensor(a, b) else math.inf


def _as_tensor(value: Any) -> Tensor | None:
    """Numbers with a fraction as a tensor: one, a sequence or an array of them; None for anything else."""
    if isinstance(value, (float, complex)):
        dtype = torch.complex128 if isinstance(value, complex) else torch.float64
        return torch.tensor(value, dtype=dtype, device="cpu")
    if isinstance(value, (np.ndarray, np.generic)) and np.asarray(value).dtype.kind in "biufc":
        return torch.from_numpy(np.array(value, ndmin=1, dtype=_plain(np.asarray(value).dtype)))
    if isinstance(value, (list, tuple)) and value and all(type(each) is float for each in value):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    return None


def _plain(dtype: np.dtype[Any]) -> Any:
    """The dtype that PyTorch knows for numbers of any width."""
    return {"f": np.float64, "c": np.complex128, "b": np.bool_}.get(dtype.kind, np.int64)


def _pairs(a: Any, b: Any) -> list[tuple[str, Any, Any]] | None:
    """The parts of two values of one class, side by side; None where they do not have the same ones."""
    if isinstance(a, types.FunctionType) and a.__code__ is not b.__code__:
        return None
    if isinstance(a, np.ndarray) and (a.shape, a.dtype) != (b.shape, b.dtype):
        return None
    mine, yours = dict(parts_of(a, code=False, classes=False)), dict(parts_of(b, code=False, classes=False))
    if mine.keys() != yours.keys():
        return None
    return [(step, part, yours[step]) for step, part in mine.items()]
