"""The original model that serves calls, and the state that it and the programs keep between two calls."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.ir.lifted_state import LiftedState
from ampopt.ir.model_copy import working_copy

Run = Callable[..., tuple[Tensor, ...]]

Step = Callable[..., tuple[Tensor, ...] | None]
"""Takes and returns flat tensors; None: the state is of another form than the program takes."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Form:
    """A form of state that a program takes, with tensors for it.

    Their addresses never change, because a captured graph uses them.
    """

    lifted: LiftedState
    tensors: tuple[Tensor, ...]

    def set(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(self.tensors, values, strict=True):
                tensor.copy_(value)


class State:
    """What every call reads and writes, in whichever program; one call at a time.

    It lies in the tensors of a form, which programs and the original take and set, or in the original where
    it has no such form: before the first call has made it, or after one that has changed its structure. The
    tensors are its own: what a caller does to inputs and results does not change the state.
    """

    def __init__(self, original: nn.Module, *, one_at_a_time: bool) -> None:
        """`original` is never called itself; `one_at_a_time`: it has a state, and calls must not overlap."""
        self._original, self._serving = original, working_copy(original)
        self._one_at_a_time, self._lock = one_at_a_time, threading.RLock()
        self._forms: list[_Form] = []
        self._now: _Form | None = None
        self._served_as: LiftedState | None = None
        self._writes = False

    def reset(self) -> None:
        """Reset the state to what it was before the first call."""
        with self._lock:
            self._serving = working_copy(self._original)
            self._find()

    def take(self, other: State) -> None:
        """Copy the state of another module."""
        with other._lock, self._lock:
            self._serving, self._now = working_copy(other._serving), None
            if other._now is None:
                self._find()
            else:
                form = self._form_of(other._now.lifted)
                form.set(other._now.tensors)
                self._now, self._served_as = form, None

    def bound(self, lifted: LiftedState | None, run: Run) -> Step:
        """A program with this state: flat tensors in, flat tensors out, both without it.

        `lifted` is the state that the program takes. A call that fails does not change the state.
        """
        if lifted is None:
            return run
        with self._lock:
            self._one_at_a_time = True
            self._writes |= lifted.writes
            form = self._form_of(lifted)

        def step(*tensors: Tensor) -> tuple[Tensor, ...] | None:
            with self._lock:
                if self._now is not form:
                    return None
                outputs = run(*tensors, *form.tensors)
                count = len(outputs) - len(form.tensors)
                form.set(outputs[count:])
            return outputs[:count]

        return step

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a copy of the original, from this state to the next."""
        if not self._one_at_a_time:
            return self._serving(*args, **kwargs)
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            if (form := self._now) is not None:
                if self._served_as is not form.lifted:
                    self._serving = working_copy(form.lifted.model)
                form.lifted.write(self._serving, [tensor.clone() for tensor in form.tensors])
            self._served_as = None  # until the call has succeeded
            result = self._serving(*args, **kwargs)
            self._find()
        return result

    def _form_of(self, lifted: LiftedState) -> _Form:
        """The form for a state; a new one where none is like it, in which the present state may be."""
        for form in self._forms:
            if form.lifted is lifted or form.lifted.is_like(lifted):
                return form
        form = _Form(lifted, tuple(lifted.initial))
        self._forms.append(form)
        if self._now is None:
            self._find()
        return form

    def _find(self) -> None:
        """Take the state from the original into the form that it has, if it has one.

        It has none if tensors share memory and any program writes in place, perhaps to only one of them.
        """
        with torch.inference_mode(mode=False):
            self._now = next((form for form in self._forms if self._fits(form.lifted)), None)
            if self._now is not None:
                self._now.set(self._now.lifted.read(self._serving))
                self._served_as = self._now.lifted

    def _fits(self, lifted: LiftedState) -> bool:
        apart = not self._writes or lifted.shared_memory(self._serving) is None
        return apart and lifted.fits(self._serving)
