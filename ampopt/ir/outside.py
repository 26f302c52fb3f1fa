"""What a model's code names and no copy of the model has: class attributes and global variables.

Calls of copies write to them as calls of the model do: ahead of their time, in float64, or with tensors that
have no numbers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ampopt.ir.parts import (
    ATOMS,
    CODE,
    Variable,
    attributes_of_class,
    contents_of,
    is_foreign,
    slots_of,
    variables_of_class,
    variables_of_function,
    walk,
)

_ABSENT = object()

Undo = Callable[[], object]


def code_of(model: nn.Module) -> tuple[list[FunctionType], list[type]]:
    """A user's functions that calls of the model may run, and the classes that they name or that it is of."""
    functions, kinds, seen = dict[FunctionType, None](), dict[type, None](), set[int]()

    def is_seen(value: Any) -> bool:
        return id(value) in seen

    roots: list[Any] = [model]
    while roots:
        for _, each in walk(roots.pop(), classes=False, leave_out=is_seen):
            if isinstance(each, (Tensor, *ATOMS)):
                continue
            seen.add(id(each))
            if isinstance(each, FunctionType):
                functions[each] = None
                continue
            named = each if isinstance(each, type) else type(each)
            new = [kind for kind in named.__mro__ if kind not in kinds and not is_foreign(kind)]
            kinds.update(dict.fromkeys(new))
            methods = (part for kind in new for _, part in attributes_of_class(kind))
            roots += [method for method in methods if isinstance(method, FunctionType)]
    return [function for function in functions if not is_foreign(function)], list(kinds)


def variables_of(functions: list[FunctionType], kinds: list[type]) -> dict[str, Variable]:
    """The variables of a model's code that are no code themselves, by what to call them in a message."""
    named = [*map(variables_of_function, functions), *map(variables_of_class, kinds)]
    return {variable[0]: variable for variable in itertools.chain.from_iterable(named)}


@contextlib.contextmanager
def variables_kept(model: nn.Module) -> Iterator[None]:
    """Put back after the block what calls of a model, or of its copies, write to where no copy has it.

    Class attributes and global variables hold again what they held, and that its numbers, its elements and
    its attributes. Code that has come to them stays: a library may have registered what it loads.
    """
    functions, kinds = code_of(model)
    undo = [step for kind in kinds for step in _of_class(kind)]
    for _, mapping, name in variables_of(functions, []).values():
        undo += [partial(_put_back, mapping, {name: mapping[name]}, own=False), *_contents(mapping[name])]
    for function in functions:
        undo += _contents(function)
    try:
        yield
    finally:
        for step in undo:
            step()


P = ParamSpec("P")
T = TypeVar("T")


def keeps_variables(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function of a model, its first parameter, put back its variables, see `variables_kept`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        model = kwargs.get("model", args[0] if args else None)
        with variables_kept(model) if isinstance(model, nn.Module) else contextlib.nullcontext():
            return function(*args, **kwargs)

    return call


def _of_class(kind: type) -> Iterator[Undo]:
    for _, attributes, name in variables_of_class(kind):
        if vars(kind).get(name, _ABSENT) is attributes[name]:  # a method's global variables are no attributes
            yield partial(_assign_again, kind, name, attributes[name])
            yield from _contents(attributes[name])


def _contents(value: Any) -> Iterator[Undo]:
    """What puts back everything that a value is made of."""
    for _, each in walk(value, code=False, classes=False):
        if isinstance(each, ATOMS):
            continue
        if isinstance(each, Tensor):
            if each.layout is torch.strided and not isinstance(each, nn.Parameter):
                yield partial(_write_back, each, each.detach().clone())
            continue
        if isinstance(each, dict):
            yield partial(_put_back, each, dict(dict.items(each)), own=True)
        elif isinstance(each, (list, deque)):
            yield partial(_refill, each, [*each])
        elif isinstance(each, set):
            yield partial(_exchange, each, set(each))
        elif isinstance(each, np.ndarray) and each.flags.writeable:
            yield partial(np.copyto, each, each.copy())
        elif isinstance(each, random.Random):
            yield partial(each.setstate, each.getstate())
        elif isinstance(each, torch.Generator):
            yield partial(each.set_state, each.get_state())
        elif isinstance(each, FunctionType):
            for cell in each.__closure__ or ():
                yield from (partial(_set_again, cell, "cell_contents", held) for held in contents_of(cell))
        if isinstance(own := getattr(each, "__dict__", None), dict):
            yield partial(_put_back, own, dict(own), own=True)
        for name in slots_of(type(each)):
            if hasattr(each, name):
                yield partial(_set_again, each, name, getattr(each, name))


def _assign_again(kind: type, name: str, before: Any) -> None:
    if vars(kind).get(name, _ABSENT) is not before:
        setattr(kind, name, before)


def _set_again(holder: Any, name: str, before: Any) -> None:
    """Give a cell or an object with slots, a frozen one too, what it held."""
    if getattr(holder, name, _ABSENT) is not before:
        object.__setattr__(holder, name, before)


def _put_back(mapping: Mapping[Any, Any], before: Mapping[Any, Any], *, own: bool) -> None:
    """Give a dict its items again; with `own`, what else has come to it goes, but for code."""
    assert isinstance(mapping, dict)  # of a class that may make items where it is asked for some
    for key, value in before.items():
        if dict.get(mapping, key, _ABSENT) is not value:
            mapping[key] = value
    for key in [key for key in dict.keys(mapping) if key not in before] if own else ():
        if not isinstance(dict.get(mapping, key), CODE):
            del mapping[key]


def _refill(sequence: list[Any] | deque[Any], before: list[Any]) -> None:
    if len(sequence) != len(before) or any(a is not b for a, b in zip(sequence, before, strict=True)):
        sequence.clear()
        sequence.extend(before)


def _exchange(elements: set[Any], before: set[Any]) -> None:
    if elements != before:
        elements.clear()
        elements.update(before)


def _write_back(tensor: Tensor, before: Tensor) -> None:
    """Give a tensor its numbers again, where it was written to, without a trace in its version."""
    if tensor.shape == before.shape and not torch.equal(tensor.detach(), before):
        tensor.data.copy_(before)
