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
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ampopt.errors import first_line
from ampopt.ir.parts import (
    ATOMS,
    CODE,
    Variable,
    attributes_in,
    attributes_of_class,
    can_be_looked_at,
    contents_of,
    is_foreign,
    is_of_the_process,
    names_in,
    root_of,
    slots_of,
    variables_of_class,
    variables_of_function,
    walk,
    words_in,
)

logger = logging.getLogger("ampopt")

MOST_TO_COPY = 1 << 26
"""The largest tensor in bytes whose numbers are put back where calls write to them."""

MOST_OF_A_LIBRARY = 300
"""Functions that are looked at of an installed package that a model merely calls."""

_ABSENT = object()

Undo = Callable[[], object]


class Code:
    """What calls of a model may run, as far as names tell: a user's functions, and his classes' methods.

    A method belongs to it if code that belongs to it names such an attribute, or if PyTorch's own may call it
    in the place of its own; and so does a class attribute. Of a library that no module's class is of, the
    first functions count: one of SciPy may lead to thousands.
    """

    def __init__(self, model: nn.Module) -> None:
        self._functions, self._kinds, self._made = dict[FunctionType, None](), dict[type, None](), set[type]()
        self._files = list[ModuleType]()
        self._seen, self._classes, self._names = set[int](), set[type](), {"forward"}
        self._unnamed = collections.defaultdict[str, list[Any]](list)
        every = (kind for module in model.modules() for kind in type(module).__mro__)
        self._of_modules = [kind for kind in dict.fromkeys(every) if not is_foreign(kind)]
        self._own = {root_of(kind) for kind in self._of_modules}
        self._followed = collections.Counter[str | None]()
        waiting: list[Any] = [model]
        while waiting:
            for _, value in walk(waiting.pop(), classes=False, leave_out=self._is_left_out):
                waiting += self._note(value)

    @property
    def functions(self) -> list[FunctionType]:
        """The functions, methods among them."""
        return [*self._functions]

    def may_name(self, path: str) -> bool:
        """Whether the code names every attribute on a path, as in `settings.scales['a']`."""
        words = self._names.union(*(words_in(function.__code__) for function in self._functions))
        return words.issuperset(re.sub(r"\[.*?\]", "", path).split("."))

    def class_attributes(self) -> Iterator[tuple[str, type, str]]:
        """The class attributes that are no code: what to call each in a message, its class, and its name."""
        for kind in self._kinds:
            for name, value in attributes_of_class(kind):
                if name in self._names and not (can_be_looked_at(value) and isinstance(value, CODE)):
                    yield f"the class attribute {kind.__qualname__}.{name}", kind, name

    def global_variables(self) -> Iterator[Variable]:
        """The global variables that are no code; of a user's own files also those named by attribute."""
        yield from itertools.chain.from_iterable(map(variables_of_function, self._functions))
        for file in self._files:
            for name in sorted(self._names & vars(file).keys()):
                value = vars(file)[name]
                if not (can_be_looked_at(value) and isinstance(value, CODE)):
                    yield f"the global variable {name}", vars(file), name

    def variables(self) -> dict[str, Variable]:
        """Those and the global variables that are no code, by what to call them in a message.

        Of the classes of modules all methods count: PyTorch's own code may call them.
        """
        of_methods = itertools.chain.from_iterable(map(variables_of_class, self._of_modules))
        own = [(label, vars(kind), name) for label, kind, name in self.class_attributes()]
        found, places = dict[str, Variable](), dict[str, Any]()
        for variable in itertools.chain(self.global_variables(), of_methods, own):
            label, mapping, _ = variable
            place = mapping.get("__name__", mapping.get("__module__"))  # of a file, of a class
            is_first = places.setdefault(label, place) == place
            found.setdefault(label if is_first else f"{label} of {place}", variable)
        return found

    def _is_left_out(self, value: Any) -> bool:
        if id(value) in self._seen:
            return True
        return (
            isinstance(value, FunctionType) and self._followed[self._library_of(value)] >= MOST_OF_A_LIBRARY
        )

    def _library_of(self, function: FunctionType) -> str | None:
        """The installed package of a function; None if a module's class, or Python itself, is of that."""
        root = root_of(function)
        if is_foreign(function) or root in self._own:
            return None
        return root if _is_installed(sys.modules.get(function.__module__)) else None

    def _note(self, value: Any) -> list[Any]:
        """Remember a value that the model's code reaches; returns what it reaches by it."""
        if isinstance(value, (Tensor, *ATOMS)):
            return []
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            if is_foreign(value):
                return []
            self._functions[value] = None
            if (library := self._library_of(value)) is not None:
                self._followed[library] += 1
            new = attributes_in(value.__code__) - self._names
            self._names |= new
            return [part for name in new for part in self._unnamed.pop(name, ())]
        if isinstance(value, ModuleType):
            if is_foreign(value) or _is_installed(value):
                return []
            self._files.append(value)
            for name, part in vars(value).items():
                self._unnamed[name].append(part)
            return [part for name in self._names & vars(value).keys() for part in self._unnamed.pop(name, ())]
        if type(value) in self._classes:
            return []
        if not isinstance(value, type):
            self._classes.add(type(value))
        kinds = (value if isinstance(value, type) else type(value)).__mro__
        found: list[Any] = []
        foreign = [kind for kind in kinds if is_foreign(kind) and kind not in (object, nn.Module)]
        overridden = {name for kind in foreign for name in vars(kind) if not name.startswith("__")}
        for kind in [kind for kind in kinds if not is_foreign(kind)]:
            if isinstance(value, type) and kind not in self._made and not issubclass(value, nn.Module):
                self._made.add(kind)
                found += [vars(kind)[name] for name in ("__init__", "__new__") if name in vars(kind)]
            if kind not in self._kinds:
                self._kinds[kind] = None
                for name, part in attributes_of_class(kind):
                    is_special = name.startswith("__") and name not in _NOT_OF_CALLS
                    is_run = name in self._names or name in overridden or is_special
                    (found if is_run else self._unnamed[name]).append(part)
        return found


def _is_installed(module: ModuleType | None) -> bool:
    """Whether a module is a library's: its functions reach much that is no model's."""
    file = str(getattr(module, "__file__", None) or "")
    return any(file.startswith(folder) for folder in _LIBRARIES)


def is_of_a_library(variables: Mapping[str, Any]) -> bool:
    """Whether these are the global variables, or the class attributes, of an installed package's file."""
    return _is_installed(sys.modules.get(str(variables.get("__name__", variables.get("__module__")))))


_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib"))

_NOT_OF_CALLS = frozenset(
    {"__init__", "__new__", "__init_subclass__", "__class_getitem__", "__repr__", "__str__", "__del__"}
    | {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__"}
    | {"__dir__", "__sizeof__", "__subclasshook__"}
)
"""Methods that Python calls elsewhere than in a forward, or as a forward makes an object of a class."""


@contextlib.contextmanager
def variables_kept(model: nn.Module) -> Iterator[None]:
    """Put back after the block what calls of a model, or of its copies, write to where no copy has it.

    Where a class attribute, a global variable, or something that these hold was a tensor or a number, it is
    that again, and tensors of up to 64 MiB have their numbers again; tensors without numbers, which an export
    leaves, go. All else stays as it is then: what a library has registered, loaded or switched on, and
    containers that other threads may have filled.
    """
    undo = list[Undo]()
    _tried(lambda: undo.extend(_everything(model)))
    try:
        yield
    finally:
        for step in undo:
            _tried(step, logging.WARNING)


def _tried(step: Undo, level: int = logging.DEBUG) -> None:
    """Do what an odd object of a user's may refuse: it stays as it is then, which is told on this level."""
    try:
        step()
    except Exception as error:
        text = "ampopt: what calls of the model wrote to a variable of yours may stay there: %s"
        logger.log(level, text, first_line(error), exc_info=level < logging.WARNING)


def _everything(model: nn.Module) -> Iterator[Undo]:
    own, code = {id(module) for module in model.modules()}, Code(model)
    held: list[Any] = [*code.functions]
    for _, kind, name in code.class_attributes():
        yield partial(_assign_again, kind, name, vars(kind)[name])
        held.append(vars(kind)[name])
    for _, mapping, name in code.global_variables():
        yield partial(_put_back, mapping, {name: mapping[name]})
        held.append(mapping[name])
    for function in code.functions:
        absent = [name for name in names_in(function.__code__) if name not in function.__globals__]
        if absent:
            yield partial(_drop, function.__globals__, absent)
    for _, value in walk(held, code=False, classes=False, leave_out=lambda part: id(part) in own):
        undo = list[Undo]()
        _tried(partial(_look, value, undo))
        yield from undo


def _look(value: Any, undo: list[Undo]) -> None:
    """Find what puts a value's own contents back."""
    if isinstance(value, (*ATOMS, ModuleType, type, nn.Parameter)) or is_of_the_process(value):
        return
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_inference() and value.nbytes <= MOST_TO_COPY:
            undo.append(partial(_write_back, value, value._version, value.detach().clone()))
        return
    if isinstance(value, dict):
        undo.append(partial(_put_back, value, dict(dict.items(value)), is_whole=True))
    elif isinstance(value, (list, collections.deque)):
        undo.append(partial(_refill, value, [*value]))
    elif isinstance(value, FunctionType):
        cells = [(cell, held) for cell in value.__closure__ or () for held in contents_of(cell)]
        undo += [partial(_set_again, cell, "cell_contents", held) for cell, held in cells]
    if isinstance(own := getattr(value, "__dict__", None), dict):
        undo.append(partial(_put_back, own, dict(own), is_whole=True))
    names = [name for name in slots_of(type(value)) if hasattr(value, name)]
    undo += [partial(_set_again, value, name, getattr(value, name)) for name in names]


def _is_lost(before: Any, now: Any) -> bool:
    """Whether a place has to get back what it held: a tensor, a number, or what an export replaced."""
    if now is before or not can_be_looked_at(before):
        return now is not before
    return isinstance(before, Tensor) or type(before) in (int, float) or isinstance(now, FakeTensor)


def _assign_again(kind: type, name: str, before: Any) -> None:
    if _is_lost(before, vars(kind).get(name, _ABSENT)):
        setattr(kind, name, before)


def _set_again(holder: Any, name: str, before: Any) -> None:
    """Give a cell or an object with slots, a frozen one too, what it held."""
    if _is_lost(before, getattr(holder, name, _ABSENT)):
        object.__setattr__(holder, name, before)


def _put_back(mapping: Any, before: dict[Any, Any], *, is_whole: bool = False) -> None:
    """Give a dict its tensors and numbers again; with `is_whole`, it loses new tensors without numbers."""
    for key, value in before.items():
        if _is_lost(value, dict.get(mapping, key, _ABSENT)):
            mapping[key] = value
    if is_whole:
        _drop(mapping, [key for key in dict.keys(mapping) if key not in before])


def _drop(mapping: Any, keys: list[Any]) -> None:
    for key in keys:
        if isinstance(dict.get(mapping, key), FakeTensor):
            del mapping[key]


def _refill(sequence: list[Any] | collections.deque[Any], before: list[Any]) -> None:
    """Give a list what it held, where its tensors or numbers are others, or where an export was at it."""
    now = [*sequence]
    is_replaced = len(now) == len(before) and any(map(_is_lost, before, now))
    if is_replaced or any(isinstance(each, FakeTensor) for each in now):
        sequence.clear()
        sequence.extend(before)


def _write_back(tensor: Tensor, version: int, before: Tensor) -> None:
    """Give a tensor its numbers again, where it was written to, without a trace in its version."""
    if tensor._version != version and tensor.shape == before.shape:
        tensor.data.copy_(before)


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
