"""What calls of a model leave where no attribute of it is: in closures, in classes, in global variables.

A graph leaves it out, and the results of a few calls need not show it: every tenth frame is another, or a
command that no example gives replaces what a tensor holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.ir.calls_of_copies import apart
from ampopt.ir.lifted_state import Attribute, memory_of, value_at
from ampopt.ir.model_copy import working_copy
from ampopt.ir.model_differences import differences, hidden_difference
from ampopt.ir.moments import Moment, in_words
from ampopt.ir.numerics import is_rounded
from ampopt.ir.outside import Code, variables_kept
from ampopt.ir.parts import walk
from ampopt.system.interrupts import check_interrupted

_COUNTED = (int, str, bytes)
"""Values that tell of earlier calls if they differ after equal ones; a time differs anyway."""


class Outside:
    """The class attributes and global variables that a model's code names, at one moment.

    With them is what functions keep that are not copied with the model: attributes, and lists as defaults.
    """

    def __init__(self, model: nn.Module) -> None:
        code = Code(model)
        self._functions, self._variables = code.functions, code.variables()
        self._before = self._now()

    def change(self) -> str | None:
        """The first that is another now, or holds something else."""
        changed = self._before.change_until(self._now(), by_value=True)
        return None if changed is None else changed.removeprefix("['").replace("']", "", 1)

    def held(self) -> dict[str, object]:
        """What each variable holds now, and each function, by what to call it in a message."""
        now: dict[str, object] = {label: own.get(name) for label, own, name in self._variables.values()}
        return now | {
            f"what {function.__module__}.{function.__qualname__} keeps: ": function
            for function in self._functions
        }

    def _now(self) -> Moment:
        return Moment(self.held(), lambda part: isinstance(part, nn.Module), code=False)


def why_hidden(
    one: nn.Module,
    other: nn.Module,
    ignored: Collection[Attribute],
    outside: Outside,
    call: Callable[[nn.Module], list[Any]],
) -> str | None:
    """That calls leave something where no attribute of the model is, or in one that they do not seem to read.

    The copies were called in different ways, and last with the same inputs: what only tells of the last call,
    such as the features that a hook notes, is the same in both. `ignored` are attributes that calls are seen
    to set before they read them; `outside` was taken after the first calls. `call` answers for a copy as it
    did last.
    """
    for place in differences(one, other) if ignored else ():
        attribute = place.module, place.attribute
        if attribute in ignored and isinstance(value_at(one, *attribute), _COUNTED):
            return f"it keeps a state from call to call in its attribute {place}"
    if (hidden := hidden_difference(one, other)) is not None:
        return f"it keeps a state from call to call in its {hidden}"
    if (changed := outside.change()) is not None:
        return f"it changes {changed} when it is called"
    replaced = _read_and_rewritten(one, outside, call)
    return None if replaced is None else f"it keeps a state from call to call in {replaced}"


def _read_and_rewritten(
    model: nn.Module, outside: Outside, call: Callable[[nn.Module], list[Any]]
) -> str | None:
    """The first hidden tensor that calls read, and write to or replace, by equal numbers, too.

    What decides whether the numbers change may be in no example. A call reads it if it answers otherwise, or
    fails, where the tensor holds other numbers before it.
    """
    if not _hidden_tensors(model, outside):
        return None
    called = working_copy(model)
    before = _hidden_tensors(called, outside)
    versions = {place: _version(tensor) for place, tensor in before.items()}
    call(called)
    after = _hidden_tensors(called, outside)
    places = [
        place
        for place, tensor in before.items()
        if place in after and not _is_left(tensor, versions[place], after[place])
    ]
    return next((place for place in places if _reads(model, outside, place, call)), None)


def _hidden_tensors(model: nn.Module, outside: Outside) -> dict[str, Tensor]:
    """Tensors that a model reaches in other ways than by its modules' attributes, by where they are."""
    known = {id(tensor) for _, tensor in memory_of(model)}
    found: dict[str, Tensor] = {}
    for label, root in (*outside.held().items(), ("its ", model)):
        for path, value in walk(root, classes=False):
            is_hidden = isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0
            if is_hidden and id(value) not in known:
                known.add(id(value))
                found[label + in_words(path)] = value
    return found


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_left(before: Tensor, version: int | None, now: Tensor) -> bool:
    """Whether a tensor is what it was: itself, or a view of its memory, and not written to."""
    if _version(now) != version and now is before:
        return False
    return now.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()


def _reads(model: nn.Module, outside: Outside, place: str, call: Callable[[nn.Module], list[Any]]) -> bool:
    with variables_kept(model):
        expected = call(working_copy(model))
    with variables_kept(model):
        disturbed = working_copy(model)
        with contextlib.suppress(RuntimeError):  # a tensor whose elements share memory
            _disturb(_hidden_tensors(disturbed, outside)[place])
        try:
            return apart(expected, call(disturbed)) > 1.0
        except Exception as error:
            check_interrupted(error)
            return True


@torch.no_grad()
def _disturb(tensor: Tensor) -> None:
    """Give a tensor other numbers."""
    if tensor.dtype is torch.bool:
        tensor.logical_not_()
    elif is_rounded(tensor):
        tensor.nan_to_num_(0.0, 0.0, 0.0).mul_(1.5).add_(1.0)
    else:
        tensor.add_(1)
