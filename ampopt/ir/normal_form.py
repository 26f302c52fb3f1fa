"""The normal form of a call: every tensor in it is a plain `torch.Tensor`, and no tensor or list comes twice.

Programs are made for calls in normal form. Python code can tell more: whether two arguments are the same
tensor, list or dict (`a is b`), and of which class a tensor is (`isinstance(x, nn.Parameter)`). Whether a
model's does is seen by calling it both ways.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.errors import first_line
from ampopt.ir.calls_of_copies import apart
from ampopt.ir.lifted_state import attributes, memory_of
from ampopt.ir.model_copy import seed_all, untouched_rng, working_copy
from ampopt.ir.model_differences import differences
from ampopt.ir.model_state import IN_SUCCESSION, moved_by_rounding
from ampopt.ir.numerics import fresh_draw
from ampopt.ir.signature import (
    copied,
    flatten_call,
    flatten_outputs,
    map_tensors,
    one_level,
    tensor_key,
    tensors_of,
)
from ampopt.system.interrupts import check_interrupted

logger = logging.getLogger("ampopt")


def is_normal(leaves: Sequence[Any], spec: pytree.TreeSpec) -> bool:
    """Whether every tensor of a call is a plain one, and neither a tensor nor a container is given twice."""
    tensors = tensors_of(leaves)
    if len(set(map(id, tensors))) < len(tensors) or not all(map(_is_plain, tensors)):
        return False
    return _flattened(leaves, spec)[1] == spec


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has no class of its own, and no attributes that a user has set."""
    return type(tensor) is Tensor and not vars(tensor)


def normal_form(leaves: Sequence[Any], spec: pytree.TreeSpec) -> tuple[list[Any], pytree.TreeSpec]:
    """The normal form of a call: with a plain copy of each tensor that is none, and of what came before."""
    seen, found = set[int](), list[Any]()
    for leaf in leaves:
        is_fine = not isinstance(leaf, Tensor) or (_is_plain(leaf) and id(leaf) not in seen)
        seen.add(id(leaf))
        found.append(leaf if is_fine else _plain_copy(leaf))
    return _flattened(found, spec)


def _flattened(leaves: Sequence[Any], spec: pytree.TreeSpec) -> tuple[list[Any], pytree.TreeSpec]:
    """A call that is built of these, with separate containers, flattened again."""
    args, kwargs = pytree.tree_unflatten(list(leaves), spec)
    return flatten_call(args, kwargs)


def true_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor with its class and attributes; a parameter is one, with or without gradients."""
    return _of_class(_plain_copy(tensor), tensor)


def without_gradients(tensor: Tensor) -> Tensor:
    """A tensor in the same memory that requires no gradients, with the class and attributes of this."""
    if not tensor.requires_grad:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach()
    made = _of_class(plain, tensor)
    made.requires_grad = False
    return made


def _of_class(plain: Tensor, tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        made: Tensor = nn.Parameter(plain, requires_grad=tensor.requires_grad)
    else:  # a sparse tensor, which has no memory of its own, would be no subclass of its own class
        made = plain if type(plain) is type(tensor) else plain.as_subclass(type(tensor))
    vars(made).update(vars(tensor))
    return made


def _plain_copy(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():  # which would give it its class again
        return copied(tensor)


def why_not_normal(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> str | None:
    """Why a model does not answer a call as it answers the normal form; None if it does.

    Copies of the model are called, with the call's tensors and with fresh draws of them; draws that it
    refuses are left out. Results, and what calls leave in the model for the next, must have the same classes,
    and agree within the rounding of an output, or what rounding the weights anew changes: attention
    multiplies by one matrix or by three.
    """
    generator = torch.Generator().manual_seed(11)
    if _answers_alike(model, args, kwargs, device):
        try:
            drawn = map_tensors(lambda tensor: _like(tensor, generator), args, kwargs)
            if _answers_alike(model, *drawn, device):
                return None
        except Exception:  # indices or offsets cannot be drawn
            return None
    tensors = tensors_of(flatten_call(args, kwargs)[0])
    if kinds := sorted({type(tensor).__name__ for tensor in tensors if type(tensor) is not Tensor}):
        return f"its results depend on the class of its arguments ({', '.join(kinds)})"
    if names := sorted({name for tensor in tensors for name in vars(tensor)}):
        return f"its results depend on attributes of its arguments ({', '.join(names)})"
    return "its results depend on which of its arguments are the same tensor or container"


def tells_equal_from_same(
    model: nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec, device: torch.device
) -> bool:
    """Whether a model answers otherwise where one tensor or container is given wherever it could be.

    Tensors of equal shapes, dtypes and strides could be one, and so could containers of these. A model that
    refuses such a call tells them apart, too.
    """
    first: dict[object, Tensor] = {}
    same = [first.setdefault(tensor_key(leaf), leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    try:
        args, kwargs = _one_of_each(pytree.tree_unflatten(same, spec), [])
        if is_normal(*flatten_call(args, kwargs)):
            return False
        return why_not_normal(model, args, kwargs, device) is not None
    except Exception as error:
        check_interrupted(error)
        logger.debug("ampopt: a call in which tensors are one is refused: %s", first_line(error))
        return True


def _one_of_each(value: Any, known: list[tuple[Any, list[Any], pytree.TreeSpec]]) -> Any:
    """A nested value in which containers that hold the same are the same."""
    parts, spec = one_level(value)
    if spec.is_leaf():
        return value
    parts = [_one_of_each(part, known) for part in parts]
    for other, held, structure in known:
        if structure == spec and all(map(_is_same, parts, held)):
            return other
    made = pytree.tree_unflatten(parts, spec)
    known.append((made, parts, spec))
    return made


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and type(one) is type(other) and bool(one == other))


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A fresh draw of the tensor's class."""
    with torch._C.DisableTorchFunctionSubclass():
        drawn = fresh_draw(tensor.detach(), generator)
    return _of_class(drawn, tensor)


def _answers_alike(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> bool:
    leaves, spec = flatten_call(args, kwargs)
    normal_args, normal_kwargs = pytree.tree_unflatten(*normal_form(leaves, spec))
    first = _answer(model, args, kwargs, device)
    worst = apart(first, _answer(model, normal_args, normal_kwargs, device))
    if worst <= 1.0:
        return True
    return worst <= moved_by_rounding(model, first, lambda moved: _answer(moved, args, kwargs, device))


def _answer(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> list[Any]:
    """The tensors of a copy's result, and last what else tells results apart: classes and other leaves.

    A copy that a call changes is called `IN_SUCCESSION` times; what each call leaves in it is in the answer.
    """
    called, answer, rest = working_copy(model), list[Tensor](), list[Any]()
    for number in range(IN_SUCCESSION):
        given_args, given_kwargs = map_tensors(true_copy, args, kwargs)
        try:
            with torch.no_grad(), untouched_rng(device):
                seed_all(1, device)
                tensors, layout = flatten_outputs(called(*given_args, **given_kwargs))
        except Exception as error:
            if number == 0:
                raise
            return [*answer, [*rest, type(error)]]
        changed = attributes(differences(model, called))
        left = {place: t for place, t in memory_of(called) if (place.module, place.attribute) in changed}
        answer += map(_plain_copy, (*tensors, *left.values()))
        rest += [layout.spec, [leaf for leaf in layout.template if leaf is not layout.TENSOR]]
        rest += [[type(tensor).__name__ for tensor in tensors], sorted(changed), [*left]]
        memory = [tensor.untyped_storage().data_ptr() for tensor in left.values()]
        rest += [[memory.index(address) for address in memory]]  # which of them a write would change together
        if not changed:
            break
    return [*answer, rest]
