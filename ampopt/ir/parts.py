"""What an object is made of: the one walk by which state, sharing and results are looked through.

The parts of a function are its closure, its defaults and the global variables that its code names; those of a
bound method, a `functools.partial` or a weak reference are what it is bound to.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import enum
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx, nn

ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), slice, range),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum, np.generic),
)
"""Values without parts that cannot change."""

_KINDS_OF_ATOMS = frozenset(map(id, (bool, int, float, complex, str, bytes, type(None), torch.dtype)))
"""The identities of the classes of most of them: a user's class may have no hash."""

_PLAIN = frozenset(map(id, (dict, list, tuple, set, frozenset, collections.OrderedDict)))

LRU_CACHED = type(functools.lru_cache(lambda: None))

_WITHOUT = (*ATOMS, types.ModuleType, types.CodeType, torch.jit.ScriptModule, np.dtype, fx.Graph)
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "sympy", "mpmath", "ampopt"})
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_OF_THE_PROCESS = frozenset(
    {"logging", "threading", "_thread", "multiprocessing", "asyncio", "concurrent", "io", "_io", "socket"}
    | {"subprocess", "importlib", "re", "os", "pathlib", "inspect", "ast", "unittest", "warnings", "sympy"}
)
"""Modules whose objects belong to the process: a logger leads to every other."""

_OF_TRACERS = ("torch.fx.", "torch._subclasses.", "torch._dynamo.", "torch._guards", "torch.export.")
"""Modules of PyTorch whose objects belong to its tracers: one of them leads to all that was ever traced."""

CODE = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType),
    *(staticmethod, classmethod, property, functools.partialmethod, types.GetSetDescriptorType),
)
"""Values of variables and class attributes that are code."""

Part = tuple[str, Any]
Variable = tuple[str, Mapping[str, Any], str]
"""How a variable is called in a message, what holds it, and its name there."""


Runs = Callable[[types.FunctionType], bool]
"""Whether a function matters: whether it may run."""


def parts_of(
    value: Any, *, code: bool = True, classes: bool = True, runs: Runs | None = None
) -> Iterator[Part]:
    """The parts of a value, each with the step that leads to it, such as `.feats` or `['f']`.

    With `code`, a function has the global variables that it names, and a module the function `forward` of its
    class. With `classes`, an object has its class, and that its attributes. Classes and functions of Python,
    PyTorch and NumPy have none; of functions that `runs` tells do not run, others may read what they keep.
    """
    if isinstance(value, _WITHOUT) or is_of_the_process(value):
        return
    if isinstance(value, type):
        if classes and not is_foreign(value):
            bases = [each for each in value.__mro__ if not is_foreign(each)]
            yield from ((f".{name}", part) for each in bases for name, part in attributes_of_class(each))
        return
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value, code) if runs is None or runs(value) else kept_by(value)
        return
    if isinstance(value, _BOUND):
        yield from _bound(value)
    if isinstance(value, (dict, types.MappingProxyType)):
        items = items_of(value)
        for key, part in items:
            yield f"[{key!r}]", part
        yield from ((f" key {key!r}", key) for key, _ in items if not isinstance(key, ATOMS))
    elif isinstance(value, _SEQUENCES):
        yield from ((f"[{index}]", part) for index, part in enumerate(list(value)))
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        yield from ((f"[{index}]", part) for index, part in enumerate(value.flat))
    yield from attributes_of(value)
    if classes and not is_foreign(type(value)):
        yield "", type(value)
    elif code and isinstance(value, nn.Module) and not is_foreign(type(value)):
        yield ".forward", type(value).forward


_known: weakref.WeakKeyDictionary[type, tuple[bool, list[str]]] = weakref.WeakKeyDictionary()
"""For classes, whether their instances belong to the process, and the names of their slots."""


def is_of_the_process(value: Any) -> bool:
    """Whether an object belongs to the process, as a logger, a lock and a tracer's tensor do."""
    return _known_of(type(value))[0]


def _known_of(kind: type) -> tuple[bool, list[str]]:
    with contextlib.suppress(TypeError):  # a class of a class that has no hash
        if (known := _known.get(kind)) is not None:
            return known
    is_a_tracers = str(getattr(kind, "__module__", "")).startswith(_OF_TRACERS)
    is_own = root_of(kind) in _OF_THE_PROCESS or (is_a_tracers and not issubclass(kind, nn.Module))
    found = is_own, _slots_of(kind)
    with contextlib.suppress(TypeError):
        _known[kind] = found
    return found


def items_of(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """A dict's own items: a class of a user's may make others, or import a library, where it is asked."""
    return list(dict.items(value) if isinstance(value, dict) else value.items())


def is_empty(value: Any) -> bool:
    """Whether a value is a plain container without anything: a module has a dozen of hooks."""
    return id(type(value)) in _PLAIN and not value and not getattr(value, "__dict__", None)


def attributes_of(value: Any) -> Iterator[Part]:
    """An object's own attributes, in its `__dict__` and its `__slots__`."""
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        for name, part in list(own.items()):
            yield f".{name}", part
    for name in slots_of(type(value)):
        if hasattr(value, name):
            yield f".{name}", getattr(value, name)


def slots_of(kind: type) -> list[str]:
    """The names of attributes that instances of a class have in `__slots__`, as `getattr` takes them."""
    return _known_of(kind)[1]


def _slots_of(kind: type) -> list[str]:
    found = list[str]()
    for each in kind.__mro__:  # of most classes none has any
        if slots := vars(each).get("__slots__", ()):
            names = (slots,) if isinstance(slots, str) else slots
            found += [_mangled(name, each) for name in names if name not in ("__dict__", "__weakref__")]
    return found


def _mangled(name: str, kind: type) -> str:
    """A private name as an attribute of instances of a class has it."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if is_private else name


def is_foreign(thing: type | types.FunctionType | types.ModuleType) -> bool:
    """Whether code belongs to Python, PyTorch, NumPy or SymPy, which keep no state of a model."""
    if isinstance(thing, types.ModuleType):
        return thing.__name__.partition(".")[0] in _FOREIGN
    return root_of(thing) in _FOREIGN


def root_of(thing: Any) -> str:
    """The package in which a class or function was defined; empty where that is not known."""
    return str(getattr(thing, "__module__", "") or "").partition(".")[0]


def referent_of(proxy: Any) -> Any:
    """What a `weakref.proxy` stands for; None if that is gone."""
    try:
        return proxy.__reduce_ex__.__self__
    except ReferenceError:
        return None


_BOUND: tuple[Any, ...] = (
    *(types.MethodType, types.BuiltinMethodType, types.MethodWrapperType, functools.partial),
    *(weakref.ref, *weakref.ProxyTypes, staticmethod, classmethod, LRU_CACHED, property, types.CellType),
)


def _bound(value: Any) -> Iterator[Part]:
    if isinstance(value, (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)):
        if not isinstance(value.__self__, (type, types.ModuleType)):
            yield ".__self__", value.__self__
        if isinstance(value, types.MethodType):
            yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, weakref.ref):
        yield "()", value()
    elif type(value) in weakref.ProxyTypes:
        yield "", referent_of(value)
    elif isinstance(value, (staticmethod, classmethod, LRU_CACHED)):
        yield "", value.__wrapped__
    elif isinstance(value, property):
        yield from ((f".{name}", getattr(value, name)) for name in ("fget", "fset") if getattr(value, name))
    elif isinstance(value, types.CellType):
        yield from (("", part) for part in contents_of(value))


def contents_of(cell: types.CellType) -> list[Any]:
    """What a variable of a closure holds, if anything."""
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing was assigned to the variable yet
        return []


def _parts_of_function(function: types.FunctionType, code: bool) -> Iterator[Part]:
    named = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((f"<{name}>", part) for name, cell in named for part in contents_of(cell))
    yield from kept_by(function)
    if code and not is_foreign(function):
        for name in sorted(names_in(function.__code__)):
            if name in function.__globals__:
                yield f"<global {name}>", function.__globals__[name]


def kept_by(function: types.FunctionType) -> Iterator[Part]:
    """What a function keeps where others find it without a call: its defaults and its attributes."""
    yield from ((f"<default {i}>", part) for i, part in enumerate(function.__defaults__ or ()))
    yield from ((f"<{name}>", part) for name, part in (function.__kwdefaults__ or {}).items())
    yield from ((f".{name}", part) for name, part in list(vars(function).items()))


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The global variables that code, and the functions inside it, name."""
    own = (each.argval for each in dis.get_instructions(code) if each.opname.endswith(("_GLOBAL", "_NAME")))
    inner = [names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(own).union(*inner)


_OF_A_CLASS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slots__", "_abc_impl"}
)


def attributes_of_class(of: type) -> Iterator[Part]:
    """The attributes that a class adds to its bases', methods among them."""
    for name, part in list(vars(of).items()):
        if name not in _OF_A_CLASS and not isinstance(part, types.MemberDescriptorType):
            yield name, part


def variables_of_class(kind: type) -> Iterator[Variable]:
    """The attributes of a user's class that are no code, and the global variables that its methods name."""
    for name, value in attributes_of_class(kind):
        if isinstance(value, types.FunctionType):
            yield from variables_of_function(value)
        elif not isinstance(value, CODE):
            yield f"the class attribute {kind.__qualname__}.{name}", vars(kind), name


def variables_of_function(function: types.FunctionType) -> Iterator[Variable]:
    """The global variables that are no code and that a user's function names, also those of other modules."""
    variables = function.__globals__
    if is_foreign(function):
        return
    for name in sorted(names_in(function.__code__)):
        value = variables.get(name)
        if not can_be_looked_at(value):
            yield f"the global variable {name}", variables, name
        elif isinstance(value, types.ModuleType) and not is_foreign(value):
            named = sorted(attributes_in(function.__code__) & vars(value).keys())
            yield from (
                (f"the global variable {name}.{own}", vars(value), own)
                for own in named
                if not (can_be_looked_at(vars(value)[own]) and isinstance(vars(value)[own], CODE))
            )
        elif name in variables and not isinstance(value, CODE):
            yield f"the global variable {name}", variables, name


@functools.lru_cache(maxsize=4096)
def attributes_in(code: types.CodeType) -> frozenset[str]:
    """The names of attributes that code, and the functions inside it, reads or sets."""
    own = (each.argval for each in dis.get_instructions(code) if each.opname.endswith(("_ATTR", "_METHOD")))
    inner = [attributes_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(own).union(*inner)


@functools.lru_cache(maxsize=4096)
def paths_in(code: types.CodeType) -> frozenset[tuple[str, ...]]:
    """The global variables that code, and the functions inside it, name, with the attributes read of each.

    `net.backbone(x)` has the path (net, backbone).
    """
    found, path = set[tuple[str, ...]](), list[str]()
    inner = [paths_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    for each in dis.get_instructions(code):
        if each.opname.endswith(("_GLOBAL", "_NAME")):
            path = [each.argval]
        elif path and each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append(each.argval)
        elif each.opname != "EXTENDED_ARG":
            path = []
        if path:
            found.add(tuple(path))
    return frozenset(found).union(*inner)


@functools.lru_cache(maxsize=4096)
def compared_in(code: types.CodeType) -> frozenset[str]:
    """The names with which code, and the functions inside it, compares: FAST in `self.mode is FAST`."""
    found, loaded = set[str](), list[str]()
    inner = [compared_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    for each in dis.get_instructions(code):
        if each.opname in ("IS_OP", "COMPARE_OP", "CONTAINS_OP"):
            found.update(loaded)
        elif each.opname.startswith("LOAD_"):
            loaded.append(str(each.argval))
        elif not each.opname.startswith(("BUILD_", "EXTENDED_ARG")):
            loaded.clear()
    return frozenset(found).union(*inner)


_FILLING = frozenset(
    {"append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault", "put", "pop"}
    | {"popleft", "popitem", "clear", "remove", "discard", "__setitem__", "move_to_end"}
)
"""The methods that change a container."""


@functools.lru_cache(maxsize=4096)
def may_fill(code: types.CodeType) -> bool:
    """Whether code, or a function inside it, changes a container, or gives a variable another one."""
    for each in dis.get_instructions(code):
        is_in_place = each.opname == "BINARY_OP" and each.argrepr.endswith("=")
        if is_in_place or each.opname.startswith(("STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "INPLACE_")):
            return True
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return not _FILLING.isdisjoint(attributes_in(code)) or any(map(may_fill, inner))


@functools.lru_cache(maxsize=4096)
def words_in(code: types.CodeType) -> frozenset[str]:
    """The words in code, and in the functions inside it, such as the name that `getattr` is given."""
    inner = [words_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(each for each in code.co_consts if isinstance(each, str)).union(*inner)


def can_be_looked_at(value: Any) -> bool:
    """Whether an object tells its class: those of web frameworks refuse, outside of a request."""
    try:
        return value.__class__ is not None
    except Exception:
        return False


def walk(
    root: Any,
    *,
    code: bool = True,
    classes: bool = True,
    leave_out: Callable[[Any], bool] | None = None,
    runs: Runs | None = None,
) -> Iterator[Part]:
    """Every value that a value is made of, itself included, once each, with the path to it."""
    seen, waiting = set[int](), [("", root)]
    kept = []
    while waiting:
        path, value = waiting.pop()
        is_atom = id(type(value)) in _KINDS_OF_ATOMS
        if not is_atom and (id(value) in seen or not can_be_looked_at(value)):
            continue
        if leave_out is not None and leave_out(value):
            continue
        if is_atom or isinstance(value, ATOMS):
            yield path, value
            continue
        seen.add(id(value))
        kept.append(value)  # an identity is one only as long as the object lives
        yield path, value
        if not is_empty(value):
            parts = parts_of(value, code=code, classes=classes, runs=runs)
            waiting += [(path + step, part) for step, part in parts]
