"""What an object holds at one moment, to see later what of it has changed."""

from __future__ import annotations

import collections
import decimal
import inspect
import io
import random
import re
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampopt.ir.model_copy import same_tensor
from ampopt.ir.parts import ATOMS, Runs, items_of, walk


class Moment:
    """Everything that a value is made of, with what tells a change of each part.

    The code of user-defined classes belongs to it: class attributes, and the global variables that methods
    name. No tensor is copied: writes are told by version counters.
    """

    def __init__(
        self, value: Any, leave_out: Callable[[Any], bool], *, code: bool = True, runs: Runs | None = None
    ) -> None:
        """`leave_out` tells what is no part of the value. Without `code` its classes' code is none.

        `runs` tells which functions' parts are; None for all.
        """
        self._parts = collections.defaultdict[str, list[tuple[Any, type, object]]](list)
        for path, part in walk(value, leave_out=leave_out, code=code, classes=code, runs=runs):
            self._parts[path].append((part, type(part), mark_of(part)))  # a class has its object's path

    def change_until(self, later: Moment, *, by_value: bool) -> str | None:
        """The path to a part that is another one `later`; None if there is none.

        `by_value`: a tensor in the place of another one with the same numbers is no change.
        """
        for path in self._parts.keys() | later._parts.keys():
            before, now = self._parts.get(path, []), later._parts.get(path, [])
            if len(before) != len(now) or not all(map(partial(_is_same, by_value=by_value), before, now)):
                return in_words(path)
        return None


def _is_same(before: tuple[Any, type, object], now: tuple[Any, type, object], *, by_value: bool) -> bool:
    (part, kind, mark), (later, kind_now, mark_now) = before, now
    if isinstance(part, Tensor) and isinstance(later, Tensor) and part is not later:
        return by_value and mark_of(part) == mark and same_tensor(part, later)
    return kind is kind_now and mark == mark_now


def in_words(path: str) -> str:
    """A path in words: `._modules['head'].feat` as `head.feat`."""
    return re.sub(r"\._(?:modules|buffers|parameters)\['(\w+)'\]", r".\1", path).removeprefix(".")


_AT_AN_END = (inspect.GEN_CREATED, inspect.GEN_CLOSED)
"""The states of a generator that tell all: nothing of it has run, or nothing is left to run."""


def mark_of(value: Any) -> object:
    """What is equal as long as a value is unchanged, apart from its parts."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, ATOMS):
        return repr(value) if isinstance(value, (float, complex, np.generic)) else value  # NaN is itself
    for kinds, mark in _MARKS:
        if isinstance(value, kinds):
            return mark(value)
    if isinstance(value, types.GeneratorType) and (state := inspect.getgeneratorstate(value)) in _AT_AN_END:
        return state
    if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
        try:
            return repr(value.__reduce__())  # what it would be made of again
        except TypeError:
            return object()  # nothing tells what is left of a generator
    if isinstance(value, (list, tuple)):
        return len(value)
    return _bytes_of(value)


def _bytes_of(value: Any) -> object:
    """What lies in the memory of a value that shows its own, as an array, and how it is read; else None."""
    try:
        with memoryview(value) as view:
            return view.format, view.shape, view.tobytes()
    except (TypeError, ValueError, BufferError):  # it has none, or it is closed
        return None


def _keys_of(value: Any) -> list[object]:
    """An ordered dict's in its own order, which is not that of the dict that it is."""
    is_ordered = isinstance(value, collections.OrderedDict)
    keys = collections.OrderedDict.__iter__(value) if is_ordered else (key for key, _ in items_of(value))
    return [key if isinstance(key, ATOMS) else id(key) for key in keys]


def _mark_of_array(value: np.ndarray[Any, Any]) -> object:
    return value.shape, value.dtype.str, None if value.dtype.hasobject else np.ndarray.tobytes(value)


_MARKS: tuple[tuple[Any, Callable[[Any], object]], ...] = (
    (collections.defaultdict, lambda value: (value.default_factory, _keys_of(value))),
    ((dict, types.MappingProxyType), _keys_of),
    (np.ndarray, _mark_of_array),
    ((set, frozenset), frozenset),
    (torch.Generator, lambda value: value.get_state().numpy().tobytes()),
    (random.Random, lambda value: value.getstate()),
    (np.random.Generator, lambda value: repr(value.bit_generator.state)),
    (np.random.BitGenerator, lambda value: repr(value.state)),
    (np.random.RandomState, lambda value: repr(value.get_state())),
    (decimal.Context, lambda value: re.sub(r" flags=\[.*?\],", "", repr(value))),  # what it has met
    ((io.BytesIO, io.StringIO), lambda value: value.closed or (value.getvalue(), value.tell())),
)
"""For classes of values whose parts do not tell what they hold, what does."""
