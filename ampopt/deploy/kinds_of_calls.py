"""Whether programs for calls of several kinds can serve one model: none may leave out what another reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.errors import KindError
from ampopt.ir.calls_of_copies import read_first, rewritten
from ampopt.ir.capture import Captured
from ampopt.ir.lifted_state import Attribute, LiftedState, attributes
from ampopt.ir.model_copy import untouched_rng, working_copy
from ampopt.ir.model_differences import Place, differences
from ampopt.ir.numerics import relative_error
from ampopt.ir.signature import flatten_outputs

SAME = 1e-4
"""Largest relative error of an answer that counts as the same."""

_ADVICE = "optimize the model with a call of this kind as the example"

_MESSAGE = (
    "a call of this kind and one of another kind, for which there is a program, change each other's answers, "
    f"and not by tensors that both programs keep: {_ADVICE}"
)


class KindsOfCalls:
    """The kinds of calls for which programs were made, such as those of one shape, or with `reset=True`.

    A program keeps the state that its own kind of calls reads and writes, and that of the kinds before it. It
    leaves out what its calls only write, and has as a constant what they only read.
    """

    def __init__(self, original: nn.Module, device: torch.device) -> None:
        """`original`, on a device, is never called itself."""
        self._original, self._device = original, device
        self._known: list[Captured] = []
        self._changing: list[Captured] = []

    @property
    def state(self) -> frozenset[Attribute]:
        """Where all kinds so far keep their state."""
        lifted = [captured.lifted for captured in self._known if captured.lifted is not None]
        return frozenset((slot.module, slot.attribute) for state in lifted for slot in state.slots)

    def check_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise KindError where a call reads what calls of another kind write, and programs leave out."""
        left_out = frozenset(place for captured in self._known for place in captured.ignored)
        if not left_out:
            return
        if read := read_first(self._original, left_out, lambda model: self._call(model, args, kwargs)):
            raise KindError(
                f"a call of this kind reads the attribute {Place(*min(read))}, which calls of another kind "
                f"write, and whose program leaves it out: {_ADVICE}"
            )

    def add(self, captured: Captured) -> None:
        """Take up a kind. Raises KindError where its calls and those of another kind have an effect on each
        other that its program, or the other's, leaves out."""
        if self._changes(*_call_of(captured)):
            self._changing.append(captured)
        for other in self._known:
            for one, two in ((captured, other), (other, captured)):
                if one in self._changing:
                    args, kwargs = _call_of(one)
                    if self._has_effect(args, kwargs, two, _left_by(one, self._original)):
                        raise KindError(_MESSAGE)
        self._known.append(captured)

    def check_refused(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise KindError where a call that the original answers changes a constant of another program.

        Also where it writes in place to state of which several tensors may share memory: those of a program
        never do.
        """
        if not self._changes(args, kwargs):
            return
        for other in self._known:
            if self._has_effect(args, kwargs, other, lambda called: called):
                raise KindError(_MESSAGE)
            if other.lifted is not None and self._writes(args, kwargs, other.lifted):
                raise KindError(_MESSAGE)

    def _changes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call changes anything in a copy of the model."""
        called = working_copy(self._original)
        written = rewritten(called, lambda model: self._call(model, args, kwargs))
        return bool(written or differences(self._original, called))

    def _writes(self, args: Sequence[Any], kwargs: Mapping[str, Any], lifted: LiftedState) -> bool:
        """Whether a call writes in place to a state that may share memory, before the call or after it."""
        called, given = working_copy(lifted.model), lifted.initial
        lifted.write(called, given)
        self._call(called, args, kwargs)
        shares = lifted.shares or any(map(lifted.shared_memory, (self._original, lifted.model, called)))
        return shares and any(tensor._version > 0 for tensor in given)

    def _has_effect(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        other: Captured,
        left: Callable[[nn.Module], nn.Module],
    ) -> bool:
        """Whether a call changes what another kind's call answers, other than by the state of its program.

        `left` makes of a called model what its program would leave. Where that is a state of another form
        than the other program takes, the original answers.
        """
        lifted, called = other.lifted, working_copy(self._original)
        self._call(called, args, kwargs)
        once = working_copy(called)
        state = rewritten(called, lambda model: self._call(model, args, kwargs))
        state |= attributes(differences(once, called))
        if lifted is None and state:
            other_args, other_kwargs = _call_of(other)
            if read_first(self._original, state, lambda model: self._call(model, other_args, other_kwargs)):
                return True
        models = [called, working_copy(left(called))]
        if lifted is None:
            models.append(working_copy(self._original))
        elif lifted.fits(models[1]):
            models.append(working_copy(lifted.model))
            lifted.write(models[2], [tensor.clone() for tensor in lifted.read(models[1])])
        first, *others = [self._answer(model, other) for model in models]
        return any(len(each) != len(first) or not all(map(_is_close, each, first)) for each in others)

    def _answer(self, model: nn.Module, captured: Captured) -> list[Tensor]:
        """The tensors of the captured call's results, and of the state that it leaves."""
        results = flatten_outputs(self._call(model, *_call_of(captured)))[0]
        return results if captured.lifted is None else [*results, *captured.lifted.read(model)]

    def _call(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        own_args, own_kwargs = pytree.tree_map(_copied, (tuple(args), dict(kwargs)))
        with torch.no_grad(), untouched_rng(self._device):
            return model(*own_args, **own_kwargs)


def _call_of(captured: Captured) -> tuple[Any, ...]:
    """The arguments of a captured call, and its keyword arguments."""
    return pytree.tree_unflatten(list(captured.leaves), captured.spec)  # type: ignore[no-any-return]


def _left_by(captured: Captured, original: nn.Module) -> Callable[[nn.Module], nn.Module]:
    """What the program of a captured call leaves of a model that was called."""
    lifted = captured.lifted

    def left(called: nn.Module) -> nn.Module:
        if lifted is None:
            return original
        model = working_copy(lifted.model)
        lifted.write(model, lifted.read(called))
        return model

    return left


def _is_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and relative_error(a, b) <= SAME


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
