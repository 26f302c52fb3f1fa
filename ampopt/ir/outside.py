"""What a model's code names and no copy of the model has: class attributes and global variables.

Calls of copies write to them as calls of the model do: ahead of their time, in float64, or with tensors that
have no numbers.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import random
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
    attributes_in,
    attributes_of_class,
    contents_of,
    is_foreign,
    slots_of,
    variables_of_function,
    walk,
)
from ampopt.system.interrupts import check_interrupted

logger = logging.getLogger("ampopt")

_ABSENT = object()

Undo = Callable[[], object]


class Code:
    """What calls of a model may run, as far as names tell: a user's functions, and his classes' methods.

    A method belongs to it if code that belongs to it names such an attribute, and so does a class attribute.
    """

    def __init__(self, model: nn.Module) -> None:
        self._functions, self._kinds = dict[FunctionType, None](), dict[type, None]()
        self._seen, self._names = set[int](), {"forward"}
        self._unnamed = collections.defaultdict[str, list[Any]](list)
        waiting: list[Any] = [model]
        while waiting:
            for _, value in walk(waiting.pop(), classes=False, leave_out=self._is_seen):
                waiting += self._note(value)

    @property
    def functions(self) -> list[FunctionType]:
        """The functions, methods among them."""
        return [*self._functions]

    def class_attributes(self) -> Iterator[tuple[str, type, str]]:
        """The class attributes that are no code: what to call each in a message, its class, and its name."""
        for kind in self._kinds:
            for name, value in attributes_of_class(kind):
                if name in self._names and not isinstance(value, CODE):
                    yield f"the class attribute {kind.__qualname__}.{name}", kind, name

    def variables(self) -> dict[str, Variable]:
        """Those and the global variables that are no code, by what to call them in a message."""
        named = itertools.chain.from_iterable(map(variables_of_function, self._functions))
        own = ((label, vars(kind), name) for label, kind, name in self.class_attributes())
        return {variable[0]: variable for variable in (*named, *own)}

    def _is_seen(self, value: Any) -> bool:
        return id(value) in self._seen

    def _note(self, value: Any) -> list[Any]:
        """Remember a value that the model's code reaches; returns what it reaches by it."""
        if isinstance(value, (Tensor, *ATOMS)):
            return []
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            if is_foreign(value):
                return []
            self._functions[value] = None
            new = attributes_in(value.__code__) - self._names
            self._names |= new
            return [method for name in new for method in self._unnamed.pop(name, ())]
        kinds = (value if isinstance(value, type) else type(value)).__mro__
        is_made = isinstance(value, type) and not issubclass(value, nn.Module)
        not_of_calls = _NOT_OF_CALLS - {"__init__", "__new__"} if is_made else _NOT_OF_CALLS
        found: list[Any] = []
        for kind in [kind for kind in kinds if kind not in self._kinds and not is_foreign(kind)]:
            self._kinds[kind] = None
            for name, method in attributes_of_class(kind):
                if isinstance(method, CODE):
                    is_run = name in self._names or (name.startswith("__") and name not in not_of_calls)
                    (found if is_run else self._unnamed[name]).append(method)
        return found


_NOT_OF_CALLS = frozenset(
    {"__init__", "__new__", "__init_subclass__", "__class_getitem__", "__repr__", "__str__", "__del__"}
    | {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__"}
    | {"__dir__", "__sizeof__", "__subclasshook__"}
)
"""Methods that Python calls elsewhere than in a forward, which may make objects of a class that it names."""


@contextlib.contextmanager
def variables_kept(model: nn.Module) -> Iterator[None]:
    """Put back after the block what calls of a model, or of its copies, write to where no copy has it.

    Class attributes and global variables hold again what they held, and that its numbers, its elements and
    its attributes. Code that has come to them stays: a library may have registered what it loads.
    """
    undo = list[Undo]()
    _tried(lambda: undo.extend(_everything(model)))
    try:
        yield
    finally:
        for step in undo:
            _tried(step)


def _tried(step: Undo) -> None:
    """Do what an odd object of a user's may refuse: it stays as it is then."""
    try:
        step()
    except Exception as error:
        check_interrupted(error)
        logger.debug("ampopt: a variable is not kept", exc_info=True)


def _everything(model: nn.Module) -> Iterator[Undo]:
    code = Code(model)
    for _, kind, name in code.class_attributes():
        yield partial(_assign_again, kind, name, vars(kind)[name])
        yield from _looked_at(vars(kind)[name])
    for function in code.functions:
        yield from _looked_at(function)
        for _, mapping, name in variables_of_function(function):
            yield partial(_put_back, mapping, {name: mapping[name]}, own=False)
            yield from _looked_at(mapping[name])


def _looked_at(value: Any) -> list[Undo]:
    """What puts back a value's contents, as far as it can be looked at."""
    undo = list[Undo]()
    _tried(lambda: undo.extend(_contents(value)))
    return undo


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
        elif isinstance(each, (list, collections.deque)):
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


def _refill(sequence: list[Any] | collections.deque[Any], before: list[Any]) -> None:
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
