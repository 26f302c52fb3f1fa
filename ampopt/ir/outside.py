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

from torch import Tensor, nn

from ampopt.ir.parts import (
    ATOMS,
    CODE,
    LRU_CACHED,
    Runs,
    Variable,
    attributes_in,
    attributes_of_class,
    can_be_looked_at,
    is_foreign,
    may_fill,
    names_in,
    root_of,
    variables_of_class,
    variables_of_function,
    walk,
    words_in,
)
from ampopt.ir.put_back import CONTAINERS, Before, Undo, drop, is_fake, tried

MOST_OF_A_LIBRARY = 300
"""Functions that are looked at of an installed package that a model merely calls."""


class Code:
    """What calls of a model may run, as far as names tell: a user's functions, and his classes' methods.

    A method belongs to it if code that belongs to it names such an attribute, or if PyTorch's own may call it
    in the place of its own; and so does a class attribute. Of a library that no module's class is of, the
    first functions count: one of SciPy may lead to thousands.
    """

    def __init__(self, model: nn.Module, runs: Runs | None = None) -> None:
        """`runs` tells which of the functions to which names lead count; None for all."""
        self._runs, self.cached, self.passed_over = runs, list[Any](), list[FunctionType]()
        """The functions to which they lead and whose results are cached, and those that do not count."""
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
            for _, value in walk(waiting.pop(), classes=False, leave_out=self._is_left_out, runs=runs):
                waiting += self._note(value)

    @property
    def functions(self) -> list[FunctionType]:
        """The functions, methods among them."""
        return [*self._functions]

    def may_name(self, path: str) -> bool:
        """Whether the code names every attribute on a path, as in `settings.scales['a']`."""
        words = self._names.union(*(words_in(function.__code__) for function in self._functions))
        return words.issuperset(re.sub(r"\[.*?\]", "", path).split("."))

    def may_fill(self, name: str) -> bool:
        """Whether a function that names a variable, or an attribute, changes containers."""
        codes = [function.__code__ for function in self._functions]
        return any(may_fill(code) and name in names_in(code) | attributes_in(code) for code in codes)

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
        return root if is_installed(sys.modules.get(function.__module__)) else None

    def _note(self, value: Any) -> list[Any]:
        """Remember a value that the model's code reaches; returns what it reaches by it."""
        if isinstance(value, (Tensor, *ATOMS)):
            return []
        self._seen.add(id(value))
        self.cached += [value] if isinstance(value, LRU_CACHED) else []
        if isinstance(value, FunctionType):
            if is_foreign(value):
                return []
            if self._runs is not None and not self._runs(value):
                self.passed_over.append(value)
                return []
            self._functions[value] = None
            if (library := self._library_of(value)) is not None:
                self._followed[library] += 1
            new = attributes_in(value.__code__) - self._names
            self._names |= new
            return [part for name in new for part in self._unnamed.pop(name, ())]
        if isinstance(value, ModuleType):
            if is_foreign(value) or is_installed(value):
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


def is_installed(module: ModuleType | None) -> bool:
    """Whether a module is a library's: its functions reach much that is no model's."""
    file = str(getattr(module, "__file__", None) or "")
    return any(file.startswith(folder) for folder in _LIBRARIES)


def is_of_a_library(variables: Mapping[str, Any]) -> bool:
    """Whether these are the global variables, or the class attributes, of an installed package's file."""
    return is_installed(sys.modules.get(str(variables.get("__name__", variables.get("__module__")))))


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
    that again, and tensors and arrays of up to 64 MiB have their numbers again, arrays unless something was
    switched on, too; tensors without numbers, which an export leaves, go. Data that was added to a list,
    deque, set or dict of the user's goes, whoever has added it, if a function of the model's code that names
    it changes containers. All else stays as it is then: what was registered, loaded or switched on, what was
    added beside it, which that may be about, and what a library has added to containers of its own.
    """
    undo = list[Undo]()
    tried(lambda: undo.extend(_everything(model)))
    try:
        yield
    finally:
        for step in undo:
            tried(step, logging.WARNING)


def _everything(model: nn.Module) -> Iterator[Undo]:
    own, code, before = {id(module) for module in model.modules()}, Code(model), Before()
    users, others = list[Any](), list[Any]()
    attributes = [
        (vars(kind), name, partial(setattr, kind, name)) for _, kind, name in code.class_attributes()
    ]
    named = [
        (mapping, name, partial(_set_item, mapping, name)) for _, mapping, name in code.global_variables()
    ]
    for mapping, name, assign in (*attributes, *named):
        is_read = issubclass(type(mapping[name]), CONTAINERS) and not code.may_fill(name)
        is_users = not is_of_a_library(mapping) and not is_read
        yield before.of_variable(mapping, name, assign, is_users=is_users)
        (users if is_users else others).append(mapping[name])
    for function in code.functions:
        (others if is_of_a_library(function.__globals__) else users).append(function)
        absent = [name for name in names_in(function.__code__) if name not in function.__globals__]
        if absent:
            yield partial(drop, function.__globals__, absent, is_fake)
    seen = dict[int, Any]()

    def is_left_out(part: Any) -> bool:
        if _keeps_what_it_likes(part):
            others.append(part)
        return _keeps_what_it_likes(part) or id(part) in own

    for _, value in walk(users, code=False, classes=False, leave_out=is_left_out):
        seen[id(value)] = value
        yield from before.of_value(value, is_users=True)
    for _, value in walk(
        others, code=False, classes=False, leave_out=lambda part: id(part) in own or id(part) in seen
    ):
        yield from before.of_value(value, is_users=False)


def _set_item(mapping: Any, name: str, value: Any) -> None:
    mapping[name] = value


def _keeps_what_it_likes(value: Any) -> bool:
    """Whether an object's class is of an installed package, whose registries and caches stay."""
    kind = type(value)
    return not is_foreign(kind) and is_installed(sys.modules.get(str(getattr(kind, "__module__", ""))))


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
