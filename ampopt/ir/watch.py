"""Looks, quickly and again and again, whether anything that a module reaches is another than it was.

`Moment` tells all changes and their places, and takes milliseconds. A watch is for every call: it compares
what containers, attributes and variables hold, by identity and in C, tensors by their version counters,
arrays and other values with memory of their own by its bytes, and all by their class.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ampopt.ir.moments import mark_of
from ampopt.ir.parts import (
    ATOMS,
    CODE,
    Variable,
    contents_of,
    is_foreign,
    slots_of,
    variables_of_class,
    variables_of_function,
    walk,
)
from ampopt.ir.shared_memory import memory_of_arrays

_CALLED = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
"""The containers of a module that its calls read."""

_OF_EVERY_MODULE = vars(nn.Module()).keys()
_NOT_CALLED = _OF_EVERY_MODULE - {*_CALLED}
"""What else every module has: hooks of other kinds, and what tells how it is saved."""

_version = operator.attrgetter("_version")


class Watch:
    """What a module reaches at one moment: attributes, containers, closures, class attributes, globals.

    Global variables are those that `forward` and what it calls name, and the methods of the classes. Not seen
    are writes through `.data`, and other code in the place of a function. The memory of tensors that arrays
    may have, too, is compared: writes to an array do not show in a tensor's version.
    """

    def __init__(self, module: nn.Module, leave_out: Callable[[Any], bool]) -> None:
        """`leave_out` tells what is no part of the module."""
        self._tensors, self._mappings = list[Tensor](), list[Mapping[str, Any]]()
        self._attributes = list[tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any]]]()
        self._listed, self._cells = list[Iterable[Any]](), list[types.CellType]()
        self._dicts, self._slots = list[dict[Any, Any]](), list[tuple[Any, str]]()
        self._objects, self._bytes = list[Any](), list[tuple[Any, object, bytearray]]()
        self._variables, self._odd = list[tuple[Mapping[str, Any], str]](), list[tuple[Any, Any]]()
        self._seen, self._leave_out = set[int](), leave_out
        waiting: list[Any] = [module]
        while waiting:
            for value in self._new(waiting.pop()):
                waiting += self._note(value)
        self._filled = [each for each in self._mappings if each]
        self._versions, self._kinds = [*map(_version, self._tensors)], [*map(type, self._objects)]
        self._lengths = self._lengths_now()
        self._held = [*self._held_now()]

    def is_unchanged(self) -> bool:
        """Whether everything is what it was, or a number, a word or a list of them that equals it."""
        if [*map(_version, self._tensors)] != self._versions or self._lengths_now() != self._lengths:
            return False
        if [*map(type, self._objects)] != self._kinds or not all(itertools.starmap(_has_bytes, self._bytes)):
            return False
        try:
            is_same = all(map(operator.is_, self._held_now(), self._held))
            if not is_same and not all(map(_alike, self._held_now(), self._held)):
                return False
        except KeyError:  # an attribute is gone, and another has come
            return False
        return all(mark_of(value) == mark for value, mark in self._odd)

    def _new(self, root: Any) -> Iterator[Any]:
        for _, value in walk(root, classes=False, leave_out=self._leave_out):
            is_fixed = isinstance(value, ATOMS) and not isinstance(value, np.void)  # a row of an array
            if is_fixed or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._objects.append(value)
            yield value

    def _note(self, value: Any) -> list[Any]:
        """Remember what to compare of a value; returns class attributes and variables to look into."""
        if isinstance(value, torch.jit.ScriptModule):  # its attributes live in C++
            return [*value.parameters(), *value.buffers()]
        if isinstance(value, Tensor):
            self._tensors += [] if value.is_inference() else [value]
            if (memory := memory_of_arrays(value)) is not None:
                self._note_bytes(memory)
            self._mappings += _attributes_of(value)
            return []
        if isinstance(value, nn.Module):
            own = vars(value)
            self._seen.update(id(own[name]) for name in _NOT_CALLED if name in own)
            called = [own[name] for name in _CALLED if name in own]
            self._mappings += [each for each in called if not self._leave_out(each)]
            self._seen.update(map(id, called))
            names = [name for name in own if name == "training" or name not in _OF_EVERY_MODULE]
            self._attributes.append((operator.itemgetter(*names, *names[:1]), own))  # a tuple in any case
            return self._of_class(type(value))
        if isinstance(value, types.FunctionType):
            self._cells += value.__closure__ or ()
            self._mappings += _attributes_of(value)
            return self._variables_of(variables_of_function(value))
        if isinstance(value, CODE):
            return []
        self._note_content(value)
        self._mappings += _attributes_of(value)
        self._slots += [(value, name) for name in slots_of(type(value))]
        return self._of_class(type(value))

    def _note_content(self, value: Any) -> None:
        """Remember what an object holds beside its attributes."""
        if isinstance(value, dict):
            self._mappings.append(value)
            self._dicts.append(value)
            self._slots += [(value, "default_factory")] if isinstance(value, defaultdict) else []
        elif isinstance(value, (list, deque)):
            self._listed.append(value)
        elif not isinstance(value, tuple) and not self._note_bytes(value):
            if isinstance(value, types.MappingProxyType):
                self._listed.append(value.values())
            elif isinstance(value, np.ndarray) and value.dtype.hasobject:
                self._listed.append(_Elements(value))
            mark = mark_of(value)
            self._odd += [(value, mark)] if mark is not None else []

    def _note_bytes(self, value: Any) -> bool:
        """Remember a value's own memory, if it shows that in one piece, and whether it does."""
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            return False  # it is of addresses
        try:
            with memoryview(value) as view:
                if view.c_contiguous:
                    self._bytes.append((value, (view.format, view.shape), bytearray(view)))
                return view.c_contiguous
        except (TypeError, ValueError, BufferError):
            return False

    def _of_class(self, kind: type) -> list[Any]:
        new = [each for each in kind.__mro__ if not is_foreign(each) and id(each) not in self._seen]
        self._seen.update(map(id, new))
        return [value for each in new for value in self._variables_of(variables_of_class(each))]

    def _variables_of(self, variables: Iterable[Variable]) -> list[Any]:
        new = [(mapping, name) for _, mapping, name in variables]
        self._variables += new
        return [mapping[name] for mapping, name in new]

    def _lengths_now(self) -> list[int]:
        own = (attributes for _, attributes in self._attributes)
        return [*map(len, own), *map(len, self._mappings), *map(len, self._listed)]  # type: ignore[arg-type]

    def _held_now(self) -> Iterator[Any]:
        return itertools.chain(
            itertools.chain.from_iterable([take(own) for take, own in self._attributes]),
            itertools.chain.from_iterable(map(dict.values, self._filled)),  # type: ignore[arg-type]
            itertools.chain.from_iterable(self._dicts),
            itertools.chain.from_iterable(self._listed),
            (variables.get(name) for variables, name in self._variables),
            (getattr(value, name, None) for value, name in self._slots),
            map(_content, self._cells),
        )


class _Elements:
    """The elements of an array of objects, one after another; of an array of rows the rows as tuples."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __len__(self) -> int:
        """How many there are."""
        return self._array.size

    def __iter__(self) -> Iterator[Any]:
        """Those of now."""
        return iter(self._array.ravel().tolist())


def _attributes_of(value: Any) -> list[dict[str, Any]]:
    own = getattr(value, "__dict__", None)
    return [own] if isinstance(own, dict) else []


def _has_bytes(value: Any, form: object, kept: bytearray) -> bool:
    """Whether a value's memory is as it was; it is read in place, and let go."""
    try:
        with memoryview(value) as view:
            return (view.format, view.shape) == form and kept == view
    except (ValueError, BufferError):  # it is closed
        return False


def _content(cell: types.CellType) -> Any:
    return next(iter(contents_of(cell)), None)


def _alike(now: Any, before: Any) -> bool:
    """Whether a value is another's equal: a number, a word, or a container of such."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, ATOMS):
        return bool(mark_of(now) == mark_of(before))
    if isinstance(now, dict):
        return [*now] == [*before] and all(map(_alike, now.values(), before.values()))
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(map(_alike, now, before))
    return False
