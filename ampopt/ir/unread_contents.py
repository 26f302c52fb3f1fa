"""Whether a call uses the tensors that the calls before it have left in containers.

Features that hooks put into a dict, or that a call appends to a list which it has cleared, are looked up, and
so their attribute is read; but each call reads what it has put there itself.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.ir.lifted_state import Attribute, memory_of, value_at

_CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, list, collections.deque)


class _OtherContentError(Exception):
    """A container holds what is no tensor: nothing tells whether that is used."""


def used_contents(
    model: nn.Module, places: Collection[Attribute], call: Callable[[nn.Module], Any]
) -> set[Attribute]:
    """The attributes with containers whose tensors a call uses, keeps or gives, of a model that was called.

    The model is called, with its tensors there replaced by ones that tell: it is good for nothing else then.
    An attribute that holds no container, or one with numbers or words in it, counts as used.
    """
    used, told = set[Attribute](), dict[int, Attribute]()

    class Telling(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = pytree.tree_leaves((args, kwargs or {}))
            used.update(told[id(each)] for each in given if id(each) in told)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    def telling(place: Attribute, tensor: Tensor) -> Tensor:
        made = tensor.as_subclass(Telling)
        told[id(made)] = place
        kept.append(made)
        return made

    kept = list[Tensor]()  # so that their identities stay theirs
    for place in places:
        try:
            value = value_at(model, *place)
            if type(value) not in _CONTAINERS:
                raise _OtherContentError
            _replace(value, functools.partial(telling, place))
        except (_OtherContentError, RuntimeError, NotImplementedError):  # sparse tensors have no subclass
            used.add(place)
    call(model)
    return used | {told[id(tensor)] for _, tensor in memory_of(model) if id(tensor) in told}


def _replace(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """A value with other tensors: containers in place, tuples anew."""
    if isinstance(value, Tensor):
        return make(value)
    if type(value) is tuple:
        return tuple(_replace(each, make) for each in value)
    if value is None:
        return None
    if type(value) not in _CONTAINERS:
        raise _OtherContentError
    places = list(value) if isinstance(value, dict) else range(len(value))
    for place in places:
        value[place] = _replace(value[place], make)
    return value
