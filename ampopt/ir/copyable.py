"""Whether copies of a model do what the model does, which is never called: all is verified against a copy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampopt.errors import UncopyableError
from ampopt.ir.deep_copy import share
from ampopt.ir.model_copy import exact_copy
from ampopt.ir.model_differences import differences, named_parts
from ampopt.ir.moments import in_words
from ampopt.ir.outside import Code
from ampopt.ir.parts import (
    ATOMS,
    CODE,
    attributes_of,
    can_be_looked_at,
    compared_in,
    is_foreign,
    paths_in,
    walk,
)

LEAST_DIGITS = 6
"""Numbers of fewer digits are no addresses."""


def check_copyable(model: nn.Module) -> None:
    """Raise UncopyableError where a copy of a model would not be the model, or would reach it.

    It reaches the model by class attributes and global variables that code names which a call runs. It is
    not the model where something keeps the identity of a part or its address, which is another in a copy,
    and where a number or a word that such code names is another, as its class copies it otherwise. Objects
    of the model with which such code compares (`if self.mode is FAST`), or that are keys in its variables,
    are their own copies from now on.
    """
    for why in _reasons(model):
        raise UncopyableError(
            f"the model cannot be copied: in its copy {why}; ampopt works on a copy so that yours stays as "
            "it is: let functions get at the model by their arguments, and keep nothing by identity"
        )


def _reasons(model: nn.Module) -> Iterator[str]:
    code, names = Code(model), _names_of(model)
    compared = frozenset[str]().union(*(compared_in(each.__code__) for each in code.functions))
    held = {id(part): part for _, part in walk(model, code=False, classes=False)}
    for label, value in _variables(code):
        is_compared = label.rpartition(".")[2].rpartition(" ")[2] in compared
        for path, part in walk(value, code=False, classes=False):
            keys = [*part] if isinstance(part, (dict, set, frozenset)) else []
            for mark in (*keys, part) if is_compared else keys:
                if id(mark) in held and _is_mark(mark):
                    share(mark)
            if isinstance(part, nn.Module) and id(part) in names:
                yield f"{in_words(label + path)} is the original's {names[id(part)]}"
            elif (found := _known_by(part, names)) is not None:
                yield f"{in_words(label + path)} knows the original's {found} by its identity"
    copied = exact_copy(model, {id(tensor): _same(tensor) for tensor in _tensors(model)})
    for path, part in walk(copied, code=False, classes=False):
        if (found := _known_by(part, names)) is not None:
            yield f"{in_words(path)} knows the original's {found} by its identity or address"
    own, copies = named_parts(model), named_parts(copied)
    if lost := own.keys() ^ copies.keys():
        yield f"{min(lost)} is missing, or new"
        return
    for place in differences(model, copied, emptied=False):
        if str(place) in own or code.may_name(f"{place.attribute}{place.rest}"):
            yield f"{place} is another: its class copies it otherwise"


def _variables(code: Code) -> Iterator[tuple[str, Any]]:
    """The values of class attributes and global variables that calls may read, those of modules by paths.

    Each is yielded once, however many functions name it.
    """
    seen = set[int]()
    for label, kind, name in code.class_attributes():
        yield label, vars(kind)[name]
    for function in code.functions:
        for path in paths_in(function.__code__):
            variables, name, *rest = function.__globals__, *path
            value = variables.get(name)
            while rest and isinstance(value, ModuleType) and not is_foreign(value):
                name = f"{name}.{rest[0]}"
                value = vars(value).get(rest.pop(0))
            if id(value) not in seen and can_be_looked_at(value) and not isinstance(value, CODE):
                seen.add(id(value))
                yield f"the global variable {name}", value


def _is_mark(value: Any) -> bool:
    """Whether an object of a user's class has nothing but numbers and words, and no comparison of its own."""
    kinds = [kind for kind in type(value).__mro__ if kind is not object]
    if any(is_foreign(kind) or "__eq__" in vars(kind) for kind in kinds) or not hasattr(value, "__weakref__"):
        return False
    return all(isinstance(part, ATOMS) for _, part in attributes_of(value))


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _same(tensor: Tensor) -> Tensor:
    """Another tensor of the same memory, so that comparing models copies no weights."""
    if is_lazy(tensor):
        return tensor
    same = tensor.detach()
    return nn.Parameter(same, requires_grad=False) if type(tensor) is nn.Parameter else same


def _names_of(model: nn.Module) -> dict[int, str]:
    """The names of a model's parts by their identities, hashes, and the addresses of their memory."""
    kind, found = type(model).__name__, dict[int, str]()
    for name, module in model.named_modules():
        found[id(module)] = found[object.__hash__(module)] = name or kind
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[id(tensor)] = found[_address_of(tensor)] = name
    return {number: name for number, name in found.items() if number >= 10**LEAST_DIGITS}


def _address_of(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):  # it has no numbers, or not yet
        return 0


def _known_by(value: Any, names: Mapping[int, str]) -> str | None:
    """The name of a part of the original of which a value is the number, or which is a key in it."""
    if type(value) is int:
        return names.get(value)
    if not isinstance(value, (str, dict)):
        return None
    keys = [*dict.keys(value)] if isinstance(value, dict) else []
    words = "\n".join(each for each in (value, *keys) if type(each) is str)
    numbers = {each for each in keys if type(each) is int}.union(map(id, keys))
    if len(words) >= LEAST_DIGITS:
        numbers.update(int(digits) for digits in re.findall(rf"\d{{{LEAST_DIGITS},20}}", words))
    return next((names[number] for number in numbers if number in names), None)
