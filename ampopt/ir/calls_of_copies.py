"""Calls copies of a model, to see what a call reads and leaves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.errors import CaptureError
from ampopt.ir.device_asserts import asserts_raised
from ampopt.ir.lifted_state import Attribute, attributes, kind_of, memory_of, value_at
from ampopt.ir.model_copy import same_tensor, seed_all, untouched_rng, working_copy
from ampopt.ir.model_differences import differences
from ampopt.ir.numerics import fresh_draw, least_error, relative_error
from ampopt.ir.outer_world import OuterWorld
from ampopt.ir.run_code import RunCode
from ampopt.ir.signature import copied, flatten_call, flatten_outputs, map_tensors
from ampopt.ir.unread_contents import used_contents

MOST_FIRST_CALLS = 32
"""Largest number of calls after which a state has to have the structure that it keeps."""


class Calls:
    """Calls with the example inputs, `leaves`, and with `others` like them.

    `outer` is what the model's code does beside its results in calls within `noted()`, and `run` what runs.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> None:
        self.leaves, self._spec = flatten_call(args, kwargs)
        generator = torch.Generator().manual_seed(7)
        self.others = [*map_tensors(lambda x: fresh_draw(x, generator), self.leaves, {})[0]]
        self.device = device
        self.outer, self.run = OuterWorld(), RunCode()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Within the block, note what the model's code does, and which it is."""
        with self.outer.noted(), self.run.noted():
            yield

    def answer(self, model: nn.Module, values: Sequence[Any], seed: int) -> list[Any]:
        """The results of a call, with this random seed: the tensors, then a list of all else."""
        return self.answer_and_given(model, values, seed)[0]

    def answer_and_given(
        self, model: nn.Module, values: Sequence[Any], seed: int
    ) -> tuple[list[Any], list[Any]]:
        """The same, and the copies of the values that the model was given."""
        given = [*map_tensors(copied, values, {})[0]]
        args, kwargs = pytree.tree_unflatten(given, self._spec)
        scope = contextlib.nullcontext() if values is self.leaves else asserts_raised(self.device)
        with untouched_rng(self.device), scope:
            seed_all(seed, self.device)
            tensors, layout = flatten_outputs(model(*args, **kwargs))
        check_unchanged(values, given, "when it is called")
        rest = [leaf for leaf in layout.template if leaf is not layout.TENSOR]
        return [*(tensor.detach().clone() for tensor in tensors), rest], given

    def in_turn(self, number: int) -> Sequence[Any]:
        """The inputs of the call of this number in a succession of different ones."""
        return self.others if number % 2 else self.leaves


def check_unchanged(values: Sequence[Any], given: Sequence[Any], when: str) -> None:
    """Raise CaptureError where a model has written to the inputs that it was given."""
    for place, (value, now) in enumerate(zip(values, given, strict=True)):
        if isinstance(value, Tensor) and not same_tensor(value, now):
            raise CaptureError(f"the model changes its input {place} {when}")


def rewritten(model: nn.Module, call: Callable[[nn.Module], Any]) -> set[Attribute]:
    """The attributes and buffers whose tensors a call replaces or writes to, by others of equal values, too.

    Values alone do not tell what a call does to state: two states of zeros may have changed places.
    """
    before = {place: (tensor, _version(tensor)) for place, tensor in memory_of(model)}
    call(model)
    after = {place: (tensor, _version(tensor)) for place, tensor in memory_of(model)}
    same = {
        place
        for place, (tensor, version) in before.items()
        if place in after and after[place][0] is tensor and after[place][1] == version
    }
    return attributes((before.keys() | after.keys()) - same)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def read_first(
    model: nn.Module, places: Collection[Attribute], call: Callable[[nn.Module], Any]
) -> set[Attribute]:
    """The attributes that a call reads before it sets them, and so what an earlier one has left there.

    Of a container that is read, the tensors in it count: those that an earlier call has left.
    """
    duplicate = working_copy(model)
    first: dict[Attribute, str] = {}
    try:
        for name in {module for module, _ in places}:
            module = duplicate.get_submodule(name)
            module.__class__ = _watched(module, name, first)
        call(duplicate)
        read = {place for place in places if first.get(place) != "written"}
        return used_contents(duplicate, read, call) if read else read
    except Exception:  # a class that cannot be watched
        return set(places)


def _watched(module: nn.Module, name: str, first: dict[Attribute, str]) -> type[nn.Module]:
    """A module's class, but it notes whether the first access to an attribute reads or writes it."""

    class Watched(type(module)):  # type: ignore[misc]
        def __getattribute__(self, attribute: str) -> Any:
            first.setdefault((name, attribute), "read")
            return super().__getattribute__(attribute)

        def __setattr__(self, attribute: str, value: Any) -> None:
            first.setdefault((name, attribute), "written")
            super().__setattr__(attribute, value)

    return Watched


def after_first_calls(model: nn.Module, calls: Calls) -> tuple[nn.Module, nn.Module] | None:
    """Copies of a model whose first calls, with the inputs and with others, have made their state.

    That is so after the first call that leaves every attribute, as far as calls read it, with the structure
    and the constants that it had before. None where that takes more than `MOST_FIRST_CALLS`, or where
    constants go on changing in the same structure.
    """
    called, twin = working_copy(model), working_copy(model)
    known, read = set[Attribute](), set[Attribute]()
    before: dict[Attribute, tuple[Any, Any]] | None = None
    restless = 0
    for _ in range(MOST_FIRST_CALLS):
        calls.answer(called, calls.leaves, 41)
        calls.answer(twin, calls.others, 42)
        new = attributes(differences(model, called)) - known
        known |= new
        read |= (
            read_first(model, new, lambda copied: calls.answer(copied, calls.leaves, 43)) if new else set()
        )
        now = {place: _form(called, place) for place in read}
        if now == before:
            return called, twin
        if before is not None and _structures(now) == _structures(before):
            restless += 1
            if restless > 1:
                return None
        before = now
    return None


def _form(model: nn.Module, place: Attribute) -> tuple[Any, Any]:
    """The structure of what an attribute holds, and the constants in it."""
    leaves, spec = pytree.tree_flatten(value_at(model, *place))
    structure = [kind_of(leaf) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
    return (spec, structure), [None if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]


def _structures(forms: Mapping[Attribute, tuple[Any, Any]]) -> dict[Attribute, Any]:
    return {place: structure for place, (structure, _) in forms.items()}


def apart(first: Sequence[Any], second: Sequence[Any]) -> float:
    """How far two answers are apart, in units of what one rounding may do to an output.

    An answer is a model's output tensors, and last whatever else is in its result.
    """
    if len(first) != len(second) or repr(first[-1]) != repr(second[-1]):
        return math.inf
    worst = 0.0
    for a, b in zip(first[:-1], second[:-1], strict=True):
        floor = max(least_error(a.dtype), least_error(torch.float32))
        worst = max(worst, relative_error(b, a) / floor)
    return worst
