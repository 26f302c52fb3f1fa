"""Deep copies that have nothing in common with the original: functions that are bound to it are copied, too.

`copy.deepcopy` takes functions, bound methods of lists and dicts, and weak references for constants. A hook
`lambda *_: self.feats.append(1)` of a copied model would write to the original's list. Arrays that have
memory in common, with tensors too, have it in the copy (`shared_memory`), a number that is the identity of a
part is that of the part's copy, and optimizers keep all of their attributes.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import importlib.util
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ampopt.ir.parts import LRU_CACHED, is_empty, referent_of, walk
from ampopt.ir.shared_memory import copies_in_common

Memo = dict[Any, Any]

_ROOT, _COMMON = "ampopt: the root of the copy", "ampopt: memory in common is copied"
"""The memo's keys for the root, and for having looked at arrays; the others are identities, integers."""


class _HasArraysError(BaseException):
    """There are arrays, of which some may have memory in common; no copier of a user's catches it."""


_shared: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
"""Objects that are their own copies, by identity."""


def share(value: Any) -> None:
    """Let an object be its own copy from now on: code compares with it by a variable, which no copy has."""
    _shared[id(value)] = value


def deep_copy(root: Any, memo: Memo) -> Any:
    """A deep copy of a model; `memo` is that of `copy.deepcopy`.

    A function that is no global of its module is copied with its closure, its defaults and its attributes;
    a variable that several functions share is one variable of their copies. What a closure holds and cannot
    be copied (a file, a lock) is shared, unless it leads to the model: then the error is raised.
    """
    with contextlib.suppress(_HasArraysError):
        return _copied_with({**_shared, **memo, _ROOT: root}, root, memo)
    common: Memo = {_COMMON: True, **copies_in_common(root, memo)}
    return _copied_with({**_shared, **memo, _ROOT: root, **common}, root, memo)


def _copied_with(trial: Memo, root: Any, memo: Memo) -> Any:
    made = _copies.deepcopy(root, trial)
    _take_over(trial, memo)
    return made


def _take_over(trial: Memo, memo: Memo) -> None:
    memo.update({key: value for key, value in trial.items() if not isinstance(key, str)})
    memo.setdefault(id(memo), []).append(trial)  # whose identity is a key of it now


def shared_with(original: nn.Module, duplicate: nn.Module) -> str | None:
    """The path in a copy to a module of the original, which the copy should not reach; None if there is none.

    Global variables that `forward` and hooks name count, too: the user's `model`.
    """
    own = set(map(id, duplicate.modules()))  # one that copies itself as itself is shared on purpose
    ids = {id(each): name for name, each in original.named_modules() if id(each) not in own}
    for path, value in walk(duplicate, classes=False):
        if isinstance(value, nn.Module) and id(value) in ids:
            return f"{path.removeprefix('.')} is the original's {ids[id(value)] or type(original).__name__}"
    return None


def _own_copy_module() -> Any:
    """Another instance of the standard library's module, whose table of copiers is ours alone."""
    spec = importlib.util.find_spec("copy")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Error = copy.Error
    return module


def _copied(value: Any, memo: Memo) -> Any:
    return _copies.deepcopy(value, memo)


def _copy_function(function: types.FunctionType, memo: Memo) -> Any:
    closure, own = function.__closure__ or (), vars(function)
    if not (closure or own or function.__defaults__ or function.__kwdefaults__) or _is_global(function):
        return function
    cells = tuple(_copied(cell, memo) for cell in closure)
    if id(function) in memo:  # its closure led back to it
        return memo[id(function)]
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
    memo[id(function)] = made
    made.__defaults__ = _copied(function.__defaults__, memo)
    made.__kwdefaults__ = _copied(function.__kwdefaults__, memo)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__doc__, made.__annotations__ = function.__doc__, function.__annotations__
    vars(made).update(_copied(own, memo))
    return made


def _is_global(function: types.FunctionType) -> bool:
    """Whether a function is found by its name in its module, and so is code, not a part of a model."""
    found: Any = sys.modules.get(function.__module__ or "")
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    by_name = getattr(sys.modules.get(function.__module__ or ""), function.__name__, None)
    return function in (found, by_name)


def _copy_cell(cell: types.CellType, memo: Memo) -> types.CellType:
    made = memo[id(cell)] = types.CellType()
    with contextlib.suppress(ValueError):  # nothing was assigned to the variable yet
        made.cell_contents = _copy_or_share(cell.cell_contents, memo)
    return made


def _copy_or_share(value: Any, memo: Memo) -> Any:
    trial = dict(memo)
    try:
        made = _copied(value, trial)
    except Exception:
        if any(isinstance(part, (nn.Module, Tensor)) for _, part in walk(value, code=False, classes=False)):
            raise
        return value
    _take_over(trial, memo)
    return made


def _copy_method(method: types.MethodType, memo: Memo) -> Any:
    function, owner = method.__func__, _copied(method.__self__, memo)
    name = getattr(function, "__name__", "")
    if isinstance(function, types.FunctionType) and getattr(type(owner), name, None) is not function:
        function = _copied(function, memo)
    return types.MethodType(function, owner)


def _copy_builtin(function: Any, memo: Memo) -> Any:
    """`self.items.append` as the method of the copied list."""
    if function.__self__ is None or isinstance(function.__self__, (type, types.ModuleType)):
        return function
    owner = _copied(function.__self__, memo)
    return function if owner is function.__self__ else getattr(owner, function.__name__)


def _copy_reference(reference: Any, memo: Memo) -> Any:
    """A weak reference to a part of the model as one to its copy, which something else keeps alive."""
    target = reference()
    return weakref.ref(_copied(target, memo)) if _is_part(target, memo) else reference


def _copy_proxy(proxy: Any, memo: Memo) -> Any:
    target = referent_of(proxy)
    return weakref.proxy(_copied(target, memo)) if _is_part(target, memo) else proxy


def _is_part(target: Any, memo: Memo) -> bool:
    if target is None or id(target) in memo:
        return target is not None
    root = memo.get(_ROOT)
    return isinstance(root, nn.Module) and any(target is part for part in _tensors_and_modules(root))


def _tensors_and_modules(root: nn.Module) -> Iterator[Any]:
    yield from root.modules()
    yield from root.parameters()
    yield from root.buffers()


def _copy_cached(function: Any, memo: Memo) -> Any:
    """A function of `functools.lru_cache`; that of a copied one begins with an empty cache."""
    inside = _copied(function.__wrapped__, memo)
    if inside is function.__wrapped__:
        return function
    return functools.lru_cache(**function.cache_parameters())(inside)


def _copy_tensor(tensor: Tensor, memo: Memo) -> Tensor:
    """PyTorch refuses to copy what autograd has computed from other tensors, and a parameter's attributes."""
    if (plain := _copy_plain(tensor, memo)) is not None:
        return plain
    made: Tensor = tensor.__deepcopy__(memo) if tensor.is_leaf else tensor.detach().clone()
    if vars(tensor).keys() > vars(made).keys():
        memo[id(tensor)] = made  # an attribute may lead back to it
        vars(made).update(_copied(vars(tensor), memo))
    return made


def _copy_plain(tensor: Tensor, memo: Memo) -> Tensor | None:
    """The copy of a tensor that is alone in its memory, as far as is known, and has nothing but its numbers.

    PyTorch's own way takes several times as long, and a batch norm has three. None for other tensors.
    """
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.layout is not torch.strided:
        return None
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor) or tensor.grad is not None:
        return None
    memory, known = tensor.untyped_storage(), memo.setdefault("torch", {})  # where PyTorch notes memory, too
    if memory._cdata in known or memory.nbytes() != tensor.nbytes:
        return None
    made = tensor.clone()
    if made.stride() != tensor.stride():
        return None
    known[memory._cdata] = made.untyped_storage()
    return made


def _copy_array(array: Any, memo: Memo) -> Any:
    """An array that has no memory in common with others, for those are in the memo."""
    if _COMMON not in memo:
        raise _HasArraysError
    if type(array) is not np.ndarray or array.dtype != object:
        return array.__deepcopy__(memo)
    made = memo[id(array)] = array.copy(order="K")
    for place, each in enumerate(array.flat):
        made.flat[place] = _copied(each, memo)
    return made


def _copy_number(number: int, memo: Memo) -> int:
    """The identity of a module or a tensor as that of its copy."""
    made = memo.get(number)
    return id(made) if isinstance(made, (nn.Module, Tensor)) else number


_PLAIN = (str, bool, float, type(None), torch.dtype)
"""Classes of what is its own copy, and never that of a part: most of a module's attributes."""


def _is_own_copy(value: Any, memo: Memo) -> bool:
    """Whether a value is plain, or a number that is no part's identity, or a tuple of these."""
    kind = type(value)
    if kind is tuple:
        return all(_is_own_copy(each, memo) for each in value)
    return kind in _PLAIN or (kind is int and value not in memo)


def _copy_dict(value: dict[Any, Any], memo: Memo) -> Any:
    """As the standard library's, which calls itself for each name, too."""
    made: Any = {}
    _fill(made, value, memo)
    return made


def _copy_ordered(value: collections.OrderedDict[Any, Any], memo: Memo) -> Any:
    """As taking it apart and putting it together would; a module has several that are empty."""
    made: Any = collections.OrderedDict()
    _fill(made, value, memo)
    if vars(value):
        vars(made).update(_copied(vars(value), memo))
    return made


def _fill(made: dict[Any, Any], value: dict[Any, Any], memo: Memo) -> None:
    memo[id(value)] = made  # a part may lead back to it
    for key, each in value.items():
        own = key if type(key) in _PLAIN else _copied(key, memo)
        if _is_own_copy(each, memo):
            made[own] = each
        elif is_empty(each) and isinstance(each, dict) and id(each) not in memo:
            made[own] = memo[id(each)] = type(each)()
            memo.setdefault(id(memo), []).append(each)  # an identity is one only as long as the object lives
        else:
            made[own] = _copied(each, memo)


_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


def _copy_graph_module(module: fx.GraphModule, memo: Memo) -> Any:
    """An `fx.GraphModule`, whose own method loses its hooks and copies those inside of it as constants.

    It loses attributes, too, that hooks may read: `torch.export`'s check of inputs does, in a module that has
    a `train` and an `eval` which only raise. That of torchvision's feature extractors, a subclass, begins in
    training mode.
    """
    hooks = {name: _copied(vars(module)[name], memo) for name in _HOOKS}
    for child in module.children():
        _copied(child, memo)
    made: Any = module.__deepcopy__(memo)  # it finds the children's copies in the memo
    vars(made).update(hooks)
    for name in vars(module).keys() - vars(made).keys() - {"train", "eval"}:
        vars(made)[name] = _copied(vars(module)[name], memo)
    made.train(module.training)
    modes = {name: getattr(each, "training", False) for name, each in module.named_modules()}
    for name, each in made.named_modules():
        each.training = modes.get(name, each.training)
    return made


def _copy_optimizer(optimizer: Any, memo: Memo) -> Any:
    """An optimizer with all of its attributes, of which PyTorch's state has three.

    LBFGS loses its weights in that, a wrapper the optimizer inside, a fused one that it looks at overflows,
    and one with a scheduler that it was called. What cannot be copied is shared, as in closures.
    """
    made = memo[id(optimizer)] = object.__new__(type(optimizer))
    for name, value in list(vars(optimizer).items()):
        vars(made)[name] = _copy_or_share(value, memo)
    return made


def _says_its_state(kind: type) -> bool:
    """Whether a class of optimizers has a method of its own that tells what a copy has."""
    names = ("__getstate__", "__reduce__", "__reduce_ex__", "__deepcopy__")
    return any(getattr(kind, name, None) is not getattr(Optimizer, name, None) for name in names)


_COPIERS: dict[type, Callable[[Any, Memo], Any]] = {
    int: _copy_number,
    dict: _copy_dict,
    collections.OrderedDict: _copy_ordered,
    object: lambda mark, _: mark,  # what code compares with a mark of its own, by identity
    types.FunctionType: _copy_function,
    types.CellType: _copy_cell,
    types.MethodType: _copy_method,
    types.BuiltinMethodType: _copy_builtin,
    types.ModuleType: lambda module, _: module,
    weakref.ref: _copy_reference,
    weakref.ProxyType: _copy_proxy,
    weakref.CallableProxyType: _copy_proxy,
    LRU_CACHED: _copy_cached,
    type(pytree.treespec_leaf()): lambda leaf, _: leaf,  # all are alike; PyTorch 2.11 warns of another
}


class _Copiers(dict[type, Callable[[Any, Memo], Any]]):
    """The table in which `copy.deepcopy` looks a class up; some copiers are for all subclasses."""

    def get(self, key: type, default: Any = None) -> Any:
        if (found := super().get(key)) is not None:
            return found  # what most values are, and none of these classes
        if issubclass(key, Tensor):
            return _copy_tensor
        if issubclass(key, np.ndarray):
            return _copy_array
        if issubclass(key, Optimizer) and not _says_its_state(key):
            return _copy_optimizer
        return _copy_graph_module if issubclass(key, fx.GraphModule) else default


_copies = _own_copy_module()
_copies._deepcopy_dispatch = _Copiers({**_copies._deepcopy_dispatch, **_COPIERS})
if hasattr(_copies, "_atomic_types"):  # Python 3.14 looks there first
    _copies._atomic_types = frozenset(_copies._atomic_types) - _COPIERS.keys()
