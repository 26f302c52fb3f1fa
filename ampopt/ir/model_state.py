"""Finds the state that a model keeps between calls, so that no state is captured as a constant.

A graph computes results from inputs alone. A model gives other results in the next call if it reads a value
that an earlier call wrote to a buffer, an attribute, a list, an object, an iterator or a global, or if it
draws random numbers. Tensors in buffers, attributes and containers can be inputs and outputs of the graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from ampopt.ir.calls_of_copies import (
    Calls,
    after_first_calls,
    apart,
    check_unchanged,
    read_first,
    rewritten,
)
from ampopt.ir.eager_mode import EagerMode
from ampopt.ir.hidden_state import Outside, why_hidden
from ampopt.ir.lanes import FP32
from ampopt.ir.lifted_state import (
    Attribute,
    LiftedState,
    Slot,
    attributes,
    change,
    submodule_of,
    value_at,
)
from ampopt.ir.model_copy import device_of, exact_copy, private_copy, same_tensor, working_copy
from ampopt.ir.model_differences import Place, differences
from ampopt.ir.numerics import relative_error, rounded_anew
from ampopt.ir.obstacles import HigherOrderError
from ampopt.ir.unknown_containers import unknown_container

ROUNDINGS = 3
"""Number of runs with other rounding if a model's results for equal inputs differ by more than usual."""

IN_SUCCESSION = 8
"""Number of successive calls in which a state is looked for, and shown to be all that a call needs."""

_ADDRESS = r"\b0x[0-9a-fA-F]+"

_NESTED = (
    "it makes nested tensors of what its padding mask leaves, if that is aligned, and torch.export another "
    "graph: build nn.TransformerEncoder with enable_nested_tensor=False, or leave src_key_padding_mask out"
)


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """How a model's results depend on earlier calls.

    `reason` says why a graph cannot represent the model, and is None if it can. `state` is what can be inputs
    and outputs of the graph; None if a call leaves nothing for the next. What a call writes to the `ignored`
    attributes, no call like it reads. `told` is what it prints, logs and warns of, which no graph repeats.
    """

    reason: str | None
    state: LiftedState | None = None
    ignored: frozenset[Attribute] = frozenset()
    told: str | None = None


def behaviour_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    also: Collection[Attribute] = (),
) -> Behaviour:
    """Call copies of a model to find whether the graph of one call represents all calls.

    The model, a private copy, is not called itself. What a call changes, and reads before it sets it, is
    state, unless it is the same after any calls (a table that the first call makes). If all of that is
    tensors in a structure that stays as it is, every one of several successive calls is repeated by a copy in
    which that state alone is set, and with another random seed: results and state must agree within the FP32
    rounding of an output. If they do not, the same is tried from where the first calls bring the model (a
    state that is None before the first). What calls of another kind keep, in `also`, is state in any case.
    """
    calls = Calls(args, kwargs, device)
    found = _examined(model, calls, also, {})
    if calls.outer.reason is not None:
        return Behaviour(calls.outer.reason)
    if found.reason is not None and (made := after_first_calls(model, calls)) is not None:
        called, twin = made
        began, depends = differences(model, called), attributes(differences(called, twin))
        depending = {place: (place.module, place.attribute) in depends for place in began}
        found = _examined(called, calls, also, depending)
    return dataclasses.replace(found, told=calls.outer.told)


def _examined(
    model: nn.Module, calls: Calls, also: Collection[Attribute], began: Mapping[Place, bool]
) -> Behaviour:
    """The behaviour of a model; `began`: what its first calls, if any, changed, and if by their inputs."""
    one, other, third = exact_copy(model), working_copy(model), working_copy(model)
    with _Noting() as noted:
        first = calls.answer(one, calls.leaves, 1)
    if noted.makes_nested:
        return Behaviour(_NESTED)
    found = {*began, *differences(model, one)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if weights := sorted(place for place in found if str(place) in parameters):
        return Behaviour(f"it changes its parameter {weights[0]} when it is called")
    written, elsewhere = set[Attribute](), list[list[Any]]()

    def once_more(copied: nn.Module) -> list[Any]:
        with calls.noted():
            return calls.answer(copied, calls.others, 2)

    try:
        written |= rewritten(one, lambda copied: elsewhere.append(once_more(copied)))
    except Exception:  # indices or offsets cannot be drawn
        calls.others = calls.leaves
        written |= rewritten(one, once_more)
    found.update(differences(model, one))
    found.update(Place(*attribute) for attribute in written - attributes(found))
    outside = Outside(model, calls.run)  # what first calls set, and later ones leave, is no state

    def again(copied: nn.Module) -> list[Any]:
        return calls.answer(copied, calls.leaves, 8)

    pairs = [(first, calls.answer(other, calls.leaves, 3))]
    if found:
        calls.answer(third, calls.others, 4)
    depending = attributes(place for place in began if began[place])
    kept, ignored = _kept(model, calls, found, (one, other, third), {*depending, *written}, also)
    if not kept:
        pairs += [
            (first, calls.answer(copied, calls.leaves, seed)) for copied, seed in ((one, 5), (other, 6))
        ]
        later = {*differences(model, one), *differences(model, other)}
        if attributes(later) <= attributes(found):
            if hidden := why_hidden(one, other, ignored, outside, again):
                return Behaviour(hidden)
            reason = _why_apart(model, calls, pairs, _without(found, ignored), noted.operator)
            return Behaviour(reason or _why_other([first, *elsewhere]), None, ignored)
    succession = _Succession.of(model, calls)
    found |= succession.found
    depending |= written | succession.written
    found.update(Place(*attribute) for attribute in succession.written - attributes(found))
    kept, ignored = _kept(model, calls, found, (succession.held[-1], other, third), depending, also)
    slots: list[Slot] = []
    for place in kept:
        slot = Slot.of(model, *place)
        for copied in (*succession.held, other, third):
            if slot is None or Slot.of(copied, *place) != slot:
                return Behaviour(_why_not_lifted(model, copied, place, found))
        assert slot is not None
        if stray := [kind for kind in slot.kinds if kind[2] != calls.device]:
            return Behaviour(
                f"it keeps a state in its {slot.name} on {stray[0][2]}, and not on {calls.device}"
            )
        slots.append(slot)
    state = LiftedState(tuple(slots), model, succession.held[-1], ignored, from_start=not began)
    if ways := next(filter(None, map(state.shared_container, (model, succession.held[-1]))), None):
        return Behaviour(f"it keeps a state in a container that is both its {ways[0]} and its {ways[1]}")
    pairs, writes = succession.repeated(state, calls)
    reason = _why_apart(model, calls, pairs, _without(found, ignored), noted.operator)
    reason = reason or _why_other([first, *elsewhere, *succession.answers])
    reason = reason or why_hidden(succession.held[2], other, ignored, outside, again)
    shared = _why_shared(state, succession.held if reason is None else [model, *succession.held])
    if reason is not None or (shared is not None and writes):
        return Behaviour(shared or reason)
    found_state = dataclasses.replace(state, writes=writes, shares=shared is not None)
    return Behaviour(None, found_state if slots else None, ignored)


def _kept(
    model: nn.Module,
    calls: Calls,
    found: Collection[Place],
    called: Sequence[nn.Module],
    depending: Collection[Attribute],
    also: Collection[Attribute],
) -> tuple[list[Attribute], frozenset[Attribute]]:
    """What is state of all that calls change: buffers, and what they read and have left in different ways.

    `called` are copies that were called in different ways, `depending` is what every call writes or first
    calls have set by their inputs, and `also` is state in any case. Also returns what calls change, and do
    not read before.
    """
    changed = _in_order(model, attributes(found).union(also))
    certain = {each for each in changed if each[1] in submodule_of(model, each[0])._buffers}.union(also)
    if not (rest := set(changed) - certain):
        return changed, frozenset()
    pairs = itertools.combinations(called, 2)
    drifting = attributes(place for pair in pairs for place in differences(*pair)).union(depending)
    read = read_first(model, rest, lambda copied: calls.answer(copied, calls.leaves, 7))
    return [each for each in changed if each in certain | (read & drifting)], frozenset(rest - read)


def _without(places: Iterable[Place], ignored: Collection[Attribute]) -> list[Place]:
    return sorted(place for place in places if (place.module, place.attribute) not in ignored)


@dataclasses.dataclass(frozen=True)
class _Succession:
    """Successive calls of one copy of a model: their results, copies of it after each, what they change."""

    model: nn.Module
    answers: list[list[Any]]
    held: list[nn.Module]
    found: set[Place]
    written: set[Attribute]
    """What calls after the first write, see `rewritten`."""

    @classmethod
    def of(cls, model: nn.Module, calls: Calls) -> _Succession:
        copied, inputs = exact_copy(model), list[list[Any]]()
        answers, held = list[list[Any]](), list[nn.Module]()
        found, written = set[Place](), set[Attribute]()

        def call(called: nn.Module) -> None:
            with calls.noted() if number else contextlib.nullcontext():
                answer, given = calls.answer_and_given(called, calls.in_turn(number), 11 + number)
            answers.append(answer)
            inputs.append(given)

        for number in range(IN_SUCCESSION):
            changed = rewritten(copied, call)
            written |= changed if number else set()
            held.append(working_copy(copied))
            found.update(differences(model, copied))
        for number, given in enumerate(inputs):
            check_unchanged(calls.in_turn(number), given, "in a later call")
        return cls(model, answers, held, found, written)

    def repeated(self, state: LiftedState, calls: Calls) -> tuple[list[tuple[list[Any], list[Any]]], bool]:
        """For every call, its results and the state it leaves: those of the succession, and those of another
        copy, in which only this state is set. The first call is also repeated by a copy that was called.

        Also whether a call writes to the tensors of its state in place.
        """
        pairs, writes = [], False
        numbers = [*range(IN_SUCCESSION), 0, 0]
        copies = [*(working_copy(self.model) for _ in self.held), working_copy(self.held[-1])]
        for index, number in enumerate(numbers):
            copied = copies[min(index, len(copies) - 1)]
            before = self.held[number - 1] if number else self.model
            given = [tensor.detach().clone() for tensor in state.read(before)]
            state.write(copied, given)
            answer = calls.answer(copied, calls.in_turn(number), 101 + index)
            left = [tensor.detach().clone() for tensor in state.read(copied)]
            expected = [*state.read(self.held[number]), *self.answers[number]]
            pairs.append((expected, [*left, *answer]))
            writes |= any(tensor._version > 0 for tensor in given)
            writes |= not all(map(same_tensor, given, state.read(before)))
        return pairs, writes


def _in_order(model: nn.Module, places: Collection[Attribute]) -> list[Attribute]:
    """Places in the order in which the model has them, each submodule under its first name alone."""
    own = (
        (name, attribute)
        for name, module in model.named_modules()
        for attribute in (*module._buffers.keys(), *vars(module))  # a TorchScript's are no dict
    )
    known = [place for place in own if place in places]
    first = dict(model.named_modules())
    return [*known, *sorted(place for place in places if place not in known and place[0] in first)]


def _why_not_lifted(model: nn.Module, called: nn.Module, place: Attribute, found: Iterable[Place]) -> str:
    """Why an attribute that calls change and read cannot be lifted."""
    before, after = value_at(model, *place), value_at(called, *place)
    shown = next((each for each in sorted(found) if (each.module, each.attribute) == place), Place(*place))
    holder = submodule_of(model, place[0])
    if isinstance(holder, torch.jit.ScriptModule):
        return f"it changes {shown}, which its TorchScript holds, when it is called"
    if place[1] in holder._buffers and isinstance(before, Tensor):
        changes = change(before, after) if isinstance(after, Tensor) else "to nothing"
        return f"it changes its buffer {shown} {changes} when it is called"
    return f"it changes its attribute {shown} when it is called, and reads it"


def _why_shared(state: LiftedState, models: Iterable[nn.Module]) -> str | None:
    """That a tensor of the state has its memory in common with another one in the model; None: it has not."""
    pair = next(filter(None, map(state.shared_memory, models)), None)
    return None if pair is None else f"it changes its {pair[0]}, also the memory of {pair[1]}"


def _why_apart(
    model: nn.Module,
    calls: Calls,
    pairs: Sequence[tuple[list[Any], list[Any]]],
    places: Sequence[Place],
    operator: str | None,
) -> str | None:
    """Why results are not those of the same call with the same state; None where they are."""
    worst = max(apart(*pair) for pair in pairs)
    if worst <= 1.0:
        return None
    first = calls.answer(working_copy(model), calls.leaves, 1)
    if worst <= moved_by_rounding(model, first, lambda moved: calls.answer(moved, calls.leaves, 1)):
        return None
    return _accuse(pairs, places, operator)


def _why_other(answers: Sequence[list[Any]]) -> str | None:
    """That a result holds what is no tensor, and is another for other inputs or in a later call."""
    if (held := unknown_container(leaf for answer in answers for leaf in answer[-1])) is not None:
        return f"its result holds {held}"
    if len({repr(answer[-1]) for answer in answers}) > 1:
        return "its result holds what is no tensor and depends on the inputs' values"
    return None


_FROM_MASKS = {
    torch.ops.aten._nested_tensor_from_mask.default,
    torch.ops.aten._nested_tensor_from_mask_left_aligned.default,
}


class _Noting(EagerMode):
    """Notes the first operator that draws from PyTorch's generators, and if masks make tensors nested.

    Raises HigherOrderError where the model calls an operator that runs functions.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.operator: str | None = None
        self.makes_nested = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise HigherOrderError(func.__name__)
        if self.operator is None and torch.Tag.nondeterministic_seeded in func.tags:
            self.operator = str(func)
        self.makes_nested |= func in _FROM_MASKS
        return func(*args, **(kwargs or {}))


def moved_by_rounding(
    model: nn.Module, first: Sequence[Any], answer: Callable[[nn.Module], list[Any]]
) -> float:
    """How far an answer moves where the weights are rounded anew, in the same units, at most 2 % of it."""
    worst = 0.0
    for seed in range(ROUNDINGS):
        moved = private_copy(model)
        generator = torch.Generator(device_of(moved, ())).manual_seed(seed)
        with torch.no_grad():
            for tensor in moved.parameters():
                tensor.copy_(rounded_anew(tensor, torch.float32, generator))
        worst = max(worst, apart(first, answer(moved)))
    return min(worst, FP32.limits.largest / FP32.limits.always)


def _accuse(
    pairs: Sequence[tuple[list[Any], list[Any]]], places: Sequence[Place], operator: str | None
) -> str:
    if (held := unknown_container(leaf for a, b in pairs for leaf in (*a[-1], *b[-1]))) is not None:
        return f"its result holds {held}"
    if kind := next(filter(None, (_incomparable(a[-1], b[-1]) for a, b in pairs)), None):
        return f"its result holds a value of type {kind}, which cannot be compared"
    tensors = [both for a, b in pairs for both in zip(a[:-1], b[:-1], strict=False)]
    error = max((relative_error(b, a) for a, b in tensors), default=0.0)
    what = f"equal inputs get other answers (relative error {error:.2g})"
    if operator is not None:
        return f"it draws random numbers ({operator}): {what}"
    if places:
        names = ", ".join(map(str, places[:3]))
        return f"it keeps a state from call to call: {what}, and calls change its attribute {names}"
    return f"{what}: it draws random numbers, or keeps a state outside of its attributes"


def _incomparable(first: Sequence[Any], second: Sequence[Any]) -> str | None:
    """The type of a value that differs in its address alone, as generators do, and objects without a repr."""
    for both in zip(first, second, strict=False):
        one, other = map(repr, both)
        if one != other and re.sub(_ADDRESS, "", one) == re.sub(_ADDRESS, "", other):
            return type(both[0]).__name__
    return None
