"""Compares two copies of a model: where their attributes, buffers and parameters differ."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from ampopt.ir.model_copy import same_tensor
from ampopt.ir.numerics import relative_error
from ampopt.ir.parts import attributes_of, is_empty, parts_of

_DEEPEST = 40
"""Nesting of objects that is looked into."""


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """A difference of two copies of a model: a submodule's name, its attribute, and the path inside it."""

    module: str
    attribute: str
    rest: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}".removeprefix(".") + self.rest


def differences(one: nn.Module, other: nn.Module, *, emptied: bool = True) -> list[Place]:
    """The differences of two copies of a model: in tensors, numbers, containers, objects, iterators.

    A number that is the identity of a part is no other one than that of the same part of the other copy.
    Without `emptied`, what holds nothing in the other copy is no difference: a cache that it fills anew.
    """
    found, identities = dict[Place, None](), functools.cache(lambda: _identities(one, other))
    names, others = dict(one.named_modules()), dict(other.named_modules())
    for name, module in one.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or name not in others:
            continue  # its attributes live in C++
        for key, mine, yours in _members(vars(module), vars(others[name])):
            if mine is yours or key in ("_modules", "_parameters", "_buffers") or _are_empty(mine, yours):
                continue
            if (rest := _Comparison(identities, emptied).difference(mine, yours)) is not None:
                found[Place(name, key, rest)] = None
    for tensors in (nn.Module.named_parameters, nn.Module.named_buffers):
        theirs = dict(tensors(other, remove_duplicate=False))
        mine = dict(tensors(one, remove_duplicate=False))
        for path in mine.keys() | theirs.keys():
            module_name, _, attribute = path.rpartition(".")
            if module_name not in names:
                continue  # a submodule's second name
            both = path in mine and path in theirs
            if not both or (mine[path] is not theirs[path] and not same_tensor(mine[path], theirs[path])):
                found[Place(module_name, attribute)] = None
    return sorted(found)


def named_parts(model: nn.Module) -> dict[str, Any]:
    """The modules, parameters and buffers of a model by their names; it itself is ""."""
    return {**dict(model.named_modules()), **dict(model.named_parameters()), **dict(model.named_buffers())}


def _identities(one: nn.Module, other: nn.Module) -> dict[int, int]:
    """The identities of parts of the one, and those of the parts of the other of the same names."""
    mine, theirs = named_parts(one), named_parts(other)
    return {id(mine[name]): id(theirs[name]) for name in mine.keys() & theirs.keys()}


def hidden_difference(one: nn.Module, other: nn.Module) -> Place | None:
    """The first difference of two copies that is in no attribute of a module that they have.

    It is in a function's closure, its defaults or attributes, or in a module that is not registered.
    """
    others = dict(other.named_modules())
    comparison = _Hidden({id(module) for module in (*one.modules(), *other.modules())})
    for name, module in one.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or name not in others:
            continue
        for key, mine, yours in _members(vars(module), vars(others[name])):
            if (rest := comparison.difference(mine, yours, "", 0, inside=False)) is not None:
                return Place(name, key, rest)
    return None


_ABSENT = object()


_LEAST_ADDRESS = 1 << 12
"""The first page of memory is nobody's, and an identity is an address."""


def _are_empty(a: Any, b: Any) -> bool:
    return type(a) is type(b) and is_empty(a) and is_empty(b)


def _members(mine: Mapping[str, Any], yours: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in mine.keys() | yours.keys():
        yield key, mine.get(key, _ABSENT), yours.get(key, _ABSENT)


class _Comparison:
    """Compares two values with all that they are made of; each pair of values once."""

    def __init__(self, identities: Callable[[], Mapping[int, int]] = dict, emptied: bool = True) -> None:
        """`identities`: gives the numbers that are the identities of parts, with those of the other's parts.

        `emptied`: see `differences`.
        """
        self._identities, self._emptied = identities, emptied
        self._seen = dict[tuple[int, int], tuple[Any, Any]]()

    def difference(self, a: Any, b: Any, path: str = "", depth: int = 0) -> str | None:
        """The path to the first place where two values differ; None where they are alike."""
        if a is b or (id(a), id(b)) in self._seen or isinstance(a, (nn.Module, fx.Graph)):
            return None  # modules come by their names; a copy of an fx.GraphModule has its own class
        if _are_empty(a, b):
            return None
        self._seen[id(a), id(b)] = a, b  # an identity is one only as long as the object lives
        if not self._emptied and _is_empty(b) and _may_be_emptied(a):
            return None
        if type(a) is not type(b):
            return path
        if isinstance(a, Tensor):
            return None if same_tensor(a, b) else path
        if isinstance(a, np.ndarray) and not a.dtype.hasobject:
            return None if _of_array(a) == _of_array(b) else path
        if isinstance(a, float) and math.isnan(a) and math.isnan(b):
            return None
        if isinstance(a, _ATOMS):
            return None if self._own(a) == b else path
        if depth > _DEEPEST:
            return None
        if isinstance(a, torch.Generator):
            return self.difference(a.get_state(), b.get_state(), path, depth + 1)
        if isinstance(a, (set, frozenset)):
            return None if sorted(map(self._printed, a)) == sorted(map(_printed, b)) else path
        parts: list[tuple[str, Any, Any]] = list(_contents(a, b))
        if isinstance(a, Mapping):
            if [*map(self._key, a)] != [*map(_key, b)]:
                return path
            parts += [(f"[{key!r}]", x, y) for (key, x), y in zip(a.items(), b.values(), strict=True)]
        elif isinstance(a, Sequence):
            if len(a) != len(b):
                return path
            parts += [(f"[{index}]", x, y) for index, (x, y) in enumerate(zip(a, b, strict=True))]
        for step, x, y in parts:
            if (rest := self.difference(x, y, path + step, depth + 1)) is not None:
                return rest
        if isinstance(a, (Mapping, Sequence, types.MethodType, *_CODE)):
            return None
        return None if self.difference(*_taken_apart(a, b), path, depth + 1) is None else path

    def _own(self, value: Any) -> Any:
        """A value of the one as the other has it: the identity of a part as that of the other's."""
        is_address = type(value) is int and value >= _LEAST_ADDRESS
        return self._identities().get(value, value) if is_address else value

    def _printed(self, thing: Any) -> str:
        return _printed(self._own(thing))

    def _key(self, thing: Any) -> Any:
        return _key(self._own(thing))


_FILLED = (Tensor, np.ndarray, Mapping, Sequence, Set)


def _is_empty(value: Any) -> bool:
    """Whether an attribute is absent, nothing, or a container without entries."""
    return value is _ABSENT or value is None or (isinstance(value, (Mapping, list, Set)) and not value)


def _may_be_emptied(value: Any) -> bool:
    return (_is_empty(value) or isinstance(value, _FILLED)) and not any(attributes_of(value))


def _of_array(array: np.ndarray[Any, Any]) -> object:
    """What equal arrays have in common, however they lie in memory."""
    return array.dtype.str, array.shape, np.ndarray.tobytes(array)


def _key(thing: Any) -> Any:
    return thing if type(thing) in (str, int) else _printed(thing)


_ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range)

_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def _contents(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """The attributes of two objects of one class."""
    if isinstance(a, types.MethodType):
        yield "", a.__self__, b.__self__
    elif not isinstance(a, _CODE):
        mine, yours = (dict(attributes_of(each)) for each in (a, b))
        yield from _members(mine, yours)


def _taken_apart(a: Any, b: Any) -> tuple[Any, Any]:
    """What two objects of one class would be put together of again."""
    try:
        mine, yours = a.__reduce_ex__(4), b.__reduce_ex__(4)
    except Exception:  # they cannot be taken apart: what they print tells
        return _printed(a), _printed(b)
    if not isinstance(mine, tuple) or not isinstance(yours, tuple):
        return None, None  # a name, by which it is found
    listed, theirs = (  # (class, arguments, state, items, …)
        [tuple(part) if isinstance(part, Iterator) else part for part in each[1:]] for each in (mine, yours)
    )
    return listed, theirs


def _printed(thing: Any) -> str:
    """What a thing prints, apart from addresses; nothing where it names its own in another way."""
    text = without_addresses(repr(thing))
    return "" if hex(id(thing))[2:] in text.lower() else text


def without_addresses(text: str) -> str:
    """A text that names objects, as it is of copies of them, too."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text) if " at 0x" in text else text


_TAKEN_APART = (
    *(set, frozenset, Iterator, np.ndarray, random.Random, torch.Generator),
    *(np.random.Generator, np.random.RandomState),
)
"""What has no parts of its own, but can be taken apart."""

_COMPARED = (*_ATOMS, *_TAKEN_APART, Tensor)
"""What is compared as a whole."""

SAME = 1e-3
"""Relative error up to which hidden tensors count as the same: they may be results."""


class _Hidden:
    """Compares what functions and modules that are not registered hold; each pair of values once."""

    def __init__(self, registered: Collection[int]) -> None:
        """`registered`: the identities of the modules whose attributes are not hidden."""
        self._registered, self._seen = registered, dict[tuple[int, int], tuple[Any, Any]]()

    def difference(self, a: Any, b: Any, path: str, depth: int, *, inside: bool) -> str | None:
        """The path to the first difference; `inside`: the values themselves are hidden."""
        if a is b or (id(a), id(b)) in self._seen or depth > _DEEPEST or isinstance(a, fx.Graph):
            return None
        if type(a) is not type(b):
            return path if inside else None
        if isinstance(a, _COMPARED):
            return path if inside and not _is_same(a, b) else None
        self._seen[id(a), id(b)] = a, b  # an identity is one only as long as the object lives
        if isinstance(a, nn.Module) and id(a) in self._registered and depth:
            return None
        if is_empty(a) and is_empty(b):
            return None
        inside = inside or isinstance(a, (types.FunctionType, nn.Module))
        mine, yours = (dict(_steps(each)) for each in (a, b))
        if inside and mine.keys() != yours.keys():
            return path
        for step in mine.keys() & yours.keys():
            found = self.difference(mine[step], yours[step], path + step, depth + 1, inside=inside)
            if found is not None:
                return found
        return None


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        if a.is_floating_point() and a.shape == b.shape and a.dtype == b.dtype:
            return relative_error(a, b) <= SAME
        return same_tensor(a, b)
    return _Comparison().difference(a, b) is None


def _steps(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value, whose steps name no address: that of a copy is another."""
    for step, part in parts_of(value, code=False, classes=False):
        yield without_addresses(step), part
