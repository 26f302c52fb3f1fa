"""What a training step's functions reach by the names of variables, of which no copy of them has its own."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ampopt.errors import InputError
from ampopt.ir.outside import Code, variables_kept
from ampopt.ir.parts import Part, variables_of_function, walk
from ampopt.ir.put_back import MOST_TO_COPY


class _Calling(nn.Module):
    """Holds a function as a model would."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function


def named_objects(function: object) -> Iterator[Part]:
    """Every value that the code of a function, or of an object that is called, reaches by variables.

    Each has what to call it in a message, such as `the global variable trainer.optimizer`.
    """
    code, seen = Code(_Calling(function)), set[int]()
    variables = [*itertools.chain.from_iterable(map(variables_of_function, code.functions))]
    variables += [(label, vars(kind), name) for label, kind, name in code.class_attributes()]
    for label, mapping, name in variables:
        values = walk(mapping.get(name), code=False, classes=False, leave_out=lambda part: id(part) in seen)
        for path, value in list(values):
            seen.add(id(value))
            yield f"{label}{path}", value


def refuse_own(name: str, function: object, model: nn.Module, given: object, instead: str) -> None:
    """Raise InputError if a copied function reaches what is the user's own, and so would change it.

    That is `model`, its weights, the optimizer that was `given`, and by a variable any optimizer, to which a
    scheduler leads, too. `name` and `instead` complete the message: what reaches it, and what to write.
    """
    own = {id(each) for each in (*model.modules(), *model.parameters(), *model.buffers())}
    if isinstance(given, Optimizer):
        own.add(id(given))
    for path, value in itertools.chain(walk(function, code=False, classes=False), named_objects(function)):
        if id(value) in own or (isinstance(value, Optimizer) and path.startswith("the ")):
            raise InputError(
                f"the {name} reaches your own {type(value).__name__} by {path}: {instead}, so that yours "
                "stay as they are"
            )


@contextlib.contextmanager
def named_kept(function: object) -> Iterator[None]:
    """Put back after the block what calls of a function change by variables: numbers, tensors, `GradScaler`s,
    gradients, and the values of weights, such as an average of the model's. Not tensors above 64 MiB."""
    found = {id(value): value for _, value in named_objects(function)}.values()
    scalers = [each for each in found if isinstance(each, torch.amp.GradScaler)]
    states = [{name: _copied(value) for name, value in vars(each).items()} for each in scalers]
    leaves = [each for each in found if isinstance(each, Tensor) and _may_be_a_leaf(each)]
    gradients = [(each.grad, None if each.grad is None else each.grad.clone()) for each in leaves]
    weights = [each for each in leaves if isinstance(each, nn.Parameter) and each.nbytes <= MOST_TO_COPY]
    values = [(each, each.detach().clone()) for each in weights]
    try:
        with variables_kept(_Calling(function)):
            yield
    finally:
        for scaler, state in zip(scalers, states, strict=True):
            vars(scaler).update(state)
        for leaf, (own, numbers) in zip(leaves, gradients, strict=True):
            leaf.grad = own
            if own is not None and numbers is not None:
                own.data.copy_(numbers)
        for weight, before in values:
            weight.data.copy_(before)


def _may_be_a_leaf(tensor: Tensor) -> bool:
    """Whether a tensor has numbers to which gradients may belong."""
    is_plain = not is_lazy(tensor) and tensor.layout is torch.strided
    return is_plain and tensor.is_leaf and not tensor.is_inference()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
