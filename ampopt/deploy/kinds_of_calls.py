"""Whether programs for calls of several kinds can serve one model: none may leave out what another reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.errors import KindError, VerificationError
from ampopt.ir.calls_of_copies import read_first, rewritten
from ampopt.ir.capture import Captured
from ampopt.ir.lifted_state import Attribute, LiftedState, attributes
from ampopt.ir.model_copy import untouched_rng, working_copy
from ampopt.ir.model_differences import Place, differences
from ampopt.ir.normal_form import true_copy
from ampopt.ir.numerics import relative_error
from ampopt.ir.outside import variables_kept
from ampopt.ir.signature import flatten_call, flatten_outputs, map_tensors
from ampopt.system.interrupts import check_interrupted

SAME = 1e-4
"""Largest relative error of an answer that counts as the same."""

MOST_CACHES = 2
"""Number of earlier kinds that a new one is tried with where neither has a state, but makes a table or so."""

MOST_REFUSED = 16
"""Number of kinds that are kept which the original answers, and which change nothing."""

_ADVICE = "optimize the model with a call of this kind as the example"

_MESSAGE = (
    "a call of this kind and one of another kind, for which there is a program, change each other's answers, "
    f"and not by tensors that both programs keep: {_ADVICE}"
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Kind:
    """A call, and its capture; None where the original answers it.

    `changes`: a first call changes something in the model; `state`: what each further one does.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    captured: Captured | None
    changes: bool = False
    state: frozenset[Attribute] = frozenset()

    @property
    def lifted(self) -> LiftedState | None:
        return None if self.captured is None else self.captured.lifted


class KindsOfCalls:
    """The kinds of calls for which programs were made, such as those of one shape, or with `reset=True`.

    A program keeps the state that its own kind of calls reads and writes, and that of the kinds before it. It
    leaves out what its calls only write, and has as a constant what they only read.
    """

    def __init__(self, original: nn.Module, device: torch.device) -> None:
        """`original`, on a device, is never called itself."""
        self._original, self._device = original, device
        self._known: list[_Kind] = []
        self._harmless: set[str] = set()
        """Calls that the original answers and that change nothing, but for the sizes of their tensors."""

    @property
    def state(self) -> frozenset[Attribute]:
        """Where all kinds so far keep their state."""
        lifted = [kind.lifted for kind in self._known if kind.lifted is not None]
        return frozenset((slot.module, slot.attribute) for state in lifted for slot in state.slots)

    def check_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise KindError where a call reads what calls of another kind write, and programs leave out."""
        left_out = frozenset(
            place for kind in self._known if kind.captured for place in kind.captured.ignored
        )
        with torch.inference_mode(mode=False):
            read = self._reads(_Kind(args, kwargs, None), left_out)
        if read:
            raise KindError(
                f"a call of this kind reads the attribute {Place(*min(read))}, which calls of another kind "
                f"write, and whose program leaves it out: {_ADVICE}"
            )

    def check_failed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise KindError where a call that the original refuses is one that it answers after others.

        A tracker answers a search after it was given a template, for which there is a program.
        """
        new = _Kind(args, kwargs, None)
        with torch.inference_mode(mode=False), variables_kept(self._original):
            for other in self._known:
                if not other.changes:
                    continue
                called = working_copy(self._original)
                if self._answer_or_none(called, other) is None or self._answer_or_none(called, new) is None:
                    continue
                if self._answer_or_none(working_copy(self._original), new) is not None:
                    return  # what it failed for has passed
                raise KindError(
                    "the model answers a call of this kind only after one of another kind, for which there "
                    "is a program, and reads what that leaves in it: call the model so, and then optimize it "
                    "with a call of this kind as the example"
                )

    def add(self, captured: Captured) -> None:
        """Take up a kind. Raises KindError where its calls and those of another kind have an effect on each
        other that its program, or the other's, leaves out.

        Raises VerificationError where the original can answer it, and its program cannot: calls of one kind
        leave tensors in the same memory, to which those of another write in place. A program's never share.
        """
        args, kwargs = _call_of(captured)
        with torch.inference_mode(mode=False):
            self._add(self._kind(args, kwargs, captured))

    def _add(self, new: _Kind) -> None:
        for other in self._known:
            for one, two in ((new.lifted, other.lifted), (other.lifted, new.lifted)):
                if one is not None and two is not None and one.writes and two.shares:
                    raise VerificationError(
                        f"calls of one kind write in place to the model's {one.named}, and calls of another "
                        "leave several of its tensors in the same memory"
                    )
        self._take_up(new)

    def check_refused(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take up a kind that the original answers.

        Raises KindError where it changes a constant of a program, or where it writes in place to state of
        which several tensors may share memory. Where no call has changed anything, one that differs in sizes
        alone from one before is not tried: such calls may come all the time.
        """
        if (form := _but_for_sizes(args, kwargs)) in self._harmless and not self._is_changed:
            return
        with torch.inference_mode(mode=False):
            self._take_up(self._kind(args, kwargs, None))
        if not self._is_changed and len(self._harmless) < MOST_REFUSED:
            self._harmless.add(form)
        refused = [kind for kind in self._known if kind.captured is None and not kind.changes]
        for oldest in refused[:-MOST_REFUSED]:
            self._known.remove(oldest)

    @property
    def _is_changed(self) -> bool:
        return any(kind.changes for kind in self._known)

    def _take_up(self, new: _Kind) -> None:
        self._check_with_known(new)
        self._check_memory([*self._known, new])
        self._known.append(new)

    def _kind(self, args: Sequence[Any], kwargs: Mapping[str, Any], captured: Captured | None) -> _Kind:
        kind, called = _Kind(args, kwargs, captured), working_copy(self._original)
        written = rewritten(called, lambda model: self._answer(model, kind))
        if not written and not differences(self._original, called):
            return kind
        once = working_copy(called)
        state = rewritten(called, lambda model: self._answer(model, kind))
        state |= attributes(differences(once, called))
        return dataclasses.replace(kind, changes=True, state=frozenset(state))

    def _check_with_known(self, new: _Kind) -> None:
        """Raise KindError where calls of a new kind and of those before would be answered wrongly."""
        without_state = 0
        for other in reversed(self._known):
            if not new.changes and not other.changes:
                continue
            without_state += not (new.state or other.state)
            if without_state <= MOST_CACHES or new.state or other.state:
                self._check_together(new, other)

    def _check_together(self, one: _Kind, two: _Kind) -> None:
        """Raise KindError where calls of two kinds would not be answered as the original answers them."""
        for kind, other in ((one, two), (two, one)):
            if kind.captured and kind.lifted is None and self._reads(kind, other.state):
                raise KindError(_MESSAGE)
        plain, served = working_copy(self._original), working_copy(self._original)
        for kind in (two, one, two, one, *((one, two, two, one) if one.state or two.state else ())):
            expected = self._answer_or_none(plain, kind)
            try:
                answer, served = self._served(served, kind)
            except Exception as error:
                check_interrupted(error)
                if expected is None:  # the original's own error, in this order of calls
                    return
                raise KindError(_MESSAGE) from error
            if expected is None or len(answer) != len(expected) or not all(map(_is_close, answer, expected)):
                raise KindError(_MESSAGE)

    def _reads(self, kind: _Kind, places: Collection[Attribute]) -> set[Attribute]:
        """The places that a call reads before it sets them."""
        return (
            read_first(self._original, places, lambda model: self._answer(model, kind)) if places else set()
        )

    def _served(self, model: nn.Module, kind: _Kind) -> tuple[list[Tensor], nn.Module]:
        """The answer that a call gets in the state that `model` holds, and a model in the next state.

        A program has everything but its state as it was captured. The original answers where there is none,
        or where the state has another form.
        """
        lifted = kind.lifted
        if kind.captured is None or (lifted is not None and not lifted.fits(model)):
            return self._answer(model, kind), model
        if lifted is None:
            return self._answer(working_copy(self._original), kind), model
        called, left = working_copy(lifted.model), working_copy(lifted.model)
        lifted.write(called, [tensor.clone() for tensor in lifted.read(model)])
        answer = self._answer(called, kind)
        lifted.write(left, [tensor.clone() for tensor in lifted.read(called)])
        return answer, left

    def _answer_or_none(self, model: nn.Module, kind: _Kind) -> list[Tensor] | None:
        """The same; None where the model refuses the call in this state."""
        try:
            return self._answer(model, kind)
        except Exception as error:
            check_interrupted(error)
            return None

    def _answer(self, model: nn.Module, kind: _Kind) -> list[Tensor]:
        """Copies of the tensors that a call returns."""
        args, kwargs = map_tensors(true_copy, kind.args, kind.kwargs)
        with torch.no_grad(), untouched_rng(self._device):
            return [tensor.clone() for tensor in flatten_outputs(model(*args, **kwargs))[0]]

    def _check_memory(self, kinds: Sequence[_Kind]) -> None:
        """Raise KindError where memory that the state shares may be lost, as the last kind shows.

        Programs have each tensor in memory of its own. Once one of them writes in place, `State` leaves state
        that shares memory to the original; before, it takes that apart. What programs alone do: see `add`.
        """
        states = [kind.lifted for kind in kinds if kind.lifted is not None]
        others = [kind for kind in kinds if kind.captured is None and kind.changes]
        latest = kinds[-1].lifted
        begins = latest is not None and latest.writes and not any(each.writes for each in states[:-1])
        for state in states if others or (begins and len(states) > 1) else ():
            done = [self._done_to(state, kind) for kind in others]
            writes, shares = any(w for w, _ in done), any(s for _, s in done)
            shares |= any(map(state.shared_memory, (self._original, state.model)))
            if (writes and (shares or state.shares)) or (begins and len(states) > 1 and shares):
                raise KindError(_MESSAGE)

    def _done_to(self, lifted: LiftedState, kind: _Kind) -> tuple[bool, bool]:
        """Whether the original's calls write to a state in place, and whether they let it share memory."""
        called, given = working_copy(lifted.model), lifted.initial
        lifted.write(called, given)
        writes = shares = False
        for _ in range(2):  # the second finds what the first has left
            try:
                self._answer(called, kind)
            except Exception:  # the original's own error, in this order of calls
                break
            writes |= any(tensor._version > 0 for tensor in given)
            shares |= lifted.shared_memory(called) is not None
        return writes, shares


def _call_of(captured: Captured) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a captured call, and its keyword arguments."""
    return pytree.tree_unflatten(list(captured.leaves), captured.spec)  # type: ignore[no-any-return]


def _but_for_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A call without the sizes and the values of its tensors."""
    leaves, spec = flatten_call(args, kwargs)
    return repr((spec, [leaf.dtype if isinstance(leaf, Tensor) else leaf for leaf in leaves]))


def _is_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and relative_error(a, b) <= SAME
