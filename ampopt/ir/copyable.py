"""Whether copies of a model do what the model does, which is never called: all is verified against a copy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampopt.errors import UncopyableError
from ampopt.ir.deep_copy import share
from ampopt.ir.model_copy import exact_copy
from ampopt.ir.model_differences import differences, named_parts
from ampopt.ir.moments import in_words
from ampopt.ir.outside import Code
from ampopt.ir.parts import ATOMS, CODE, can_be_looked_at, walk

LEAST_ADDRESS = 1 << 16
"""Smaller numbers are no addresses."""


def check_copyable(model: nn.Module) -> None:
    """Let copies share with a model what they must, and look whether they are the model then.

    An object without a comparison of its own that the model holds, and that its code knows by a variable
    (`if self.mode is FAST`), is shared.

    Raise UncopyableError where a copy of a model would not be the model, or would reach it.

    It reaches the model by class attributes and global variables that code names which a call runs. It is
    not the model where something keeps the identity of a part or its address, which is another in a copy,
    and where an attribute that such code names is left out of copies by its class.
    """
    for why in _reasons(model):
        raise UncopyableError(
            f"the model cannot be copied: in its copy {why}; ampopt works on a copy so that yours stays as "
            "it is: let functions get at the model by their arguments, and keep nothing by identity"
        )


def _reasons(model: nn.Module) -> Iterator[str]:
    code, names = Code(model), _names_of(model)
    held = {id(part): part for _, part in walk(model, code=False, classes=False)}
    for label, value in _variables(code):
        for path, part in walk(value, code=False, classes=False):
            if id(part) in held and _is_told_by_identity(part):
                share(part)
            if isinstance(part, nn.Module) and id(part) in names:
                yield f"{in_words(label + path)} is the original's {names[id(part)]}"
            elif (found := _known_by(part, names)) is not None:
                yield f"{in_words(label + path)} knows the original's {found} by its identity"
    copied = exact_copy(model, {id(tensor): _same(tensor) for tensor in _tensors(model)})
    own, copies = named_parts(model), named_parts(copied)
    if lost := own.keys() ^ copies.keys():
        yield f"{min(lost)} is missing, or new"
        return
    for path, part in walk(copied, code=False, classes=False):
        if (found := _known_by(part, names)) is not None:
            yield f"{in_words(path)} knows the original's {found} by its identity or address"
    for place in differences(model, copied):
        if str(place) in own or code.may_name(f"{place.attribute}{place.rest}"):
            yield f"{place} is another: its class leaves it out of copies"


def _variables(code: Code) -> Iterator[tuple[str, Any]]:
    """The values of class attributes and global variables that calls may read."""
    own = ((label, vars(kind), name) for label, kind, name in code.class_attributes())
    for label, mapping, name in (*own, *code.global_variables()):
        if can_be_looked_at(value := mapping[name]):
            yield label, value


def _is_told_by_identity(value: Any) -> bool:
    if isinstance(value, (nn.Module, Tensor, *ATOMS, *CODE)):
        return False
    return all("__eq__" not in vars(kind) for kind in type(value).__mro__ if kind is not object)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _same(tensor: Tensor) -> Tensor:
    """Another tensor of the same memory, so that comparing models copies no weights."""
    if is_lazy(tensor):
        return tensor
    same = tensor.detach()
    return nn.Parameter(same, tensor.requires_grad) if type(tensor) is nn.Parameter else same


def _names_of(model: nn.Module) -> dict[int, str]:
    """The names of a model's parts by their identities, hashes, and the addresses of their memory."""
    kind, found = type(model).__name__, dict[int, str]()
    for name, module in model.named_modules():
        found[id(module)] = found[object.__hash__(module)] = name or kind
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[id(tensor)] = found[_address_of(tensor)] = name
    return {number: name for number, name in found.items() if number >= LEAST_ADDRESS}


def _address_of(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):  # it has no numbers, or not yet
        return 0


def _known_by(value: Any, names: Mapping[int, str]) -> str | None:
    """The name of a part of the original of which a value is the number, or which is a key in it."""
    found = _numbers_of(value)
    if isinstance(value, dict):
        found = [number for key in dict.keys(value) for number in (id(key), *_numbers_of(key))]
    return next((names[number] for number in found if number in names), None)


def _numbers_of(value: object) -> list[int]:
    if type(value) is int:
        return [value]
    return [int(digits) for digits in re.findall(r"\d{6,20}", value)] if type(value) is str else []
