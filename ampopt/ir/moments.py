"""What an object holds at one moment, to see later what of it has changed."""

from __future__ import annotations

import random
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampopt.ir.model_copy import same_tensor
from ampopt.ir.parts import ATOMS, items_of, walk


class Moment:
    """Everything that a value is made of, with what tells a change of each part.

    The code of user-defined classes belongs to it: class attributes, and the global variables that methods
    name. No tensor is copied: writes are told by version counters.
    """

    def __init__(self, value: Any, leave_out: Callable[[Any], bool], *, code: bool = True) -> None:
        """`leave_out` tells what is no part of the value. Without `code` its classes' code is none."""
        parts = walk(value, leave_out=leave_out, code=code, classes=code)
        self._parts = {path: (part, mark_of(part)) for path, part in parts}

    def change_until(self, later: Moment, *, by_value: bool) -> str | None:
        """The path to a part that is another one `later`; None if there is none.

        `by_value`: a tensor in the place of another one with the same numbers is no change.
        """
        for path in self._parts.keys() | later._parts.keys():
            if path not in self._parts or path not in later._parts:
                return in_words(path)
            (before, mark), (now, mark_now) = self._parts[path], later._parts[path]
            if isinstance(before, Tensor) and isinstance(now, Tensor) and before is not now:
                if not by_value or mark_of(before) != mark or not same_tensor(before, now):
                    return in_words(path)
            elif type(before) is not type(now) or mark != mark_now:
                return in_words(path)
        return None


def in_words(path: str) -> str:
    """A path in words: `._modules['head'].feat` as `head.feat`."""
    return re.sub(r"\._(?:modules|buffers|parameters)\['(\w+)'\]", r".\1", path).removeprefix(".")


def mark_of(value: Any) -> object:
    """What is equal as long as a value is unchanged, apart from its parts."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, ATOMS):
        return repr(value) if isinstance(value, (float, complex, np.generic)) else value  # NaN is itself
    if isinstance(value, (dict, types.MappingProxyType)):
        return [key if isinstance(key, ATOMS) else id(key) for key, _ in items_of(value)]
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, None if value.dtype.hasobject else value.tobytes()
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
        try:
            return repr(value.__reduce__())  # what it would be made of again
        except TypeError:
            return object()  # nothing tells what is left of a generator
    return len(value) if isinstance(value, (list, tuple)) else None
