"""Copies the user's training step with all that it holds: model, optimizer and scaler stay as they are.

The remedy for repeated updates is made of such a copy.

What a closure holds is copied: a scaler, a scheduler, an average of weights. A global variable cannot be: a
`GradScaler`, an average, numbers and gradients among them are put back, and a step that names the model, its
weights or an optimizer so is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampopt.diagnosis.named_objects import named_kept, refuse_own
from ampopt.diagnosis.step_watch import UserStep
from ampopt.diagnosis.training_step import Subject, Training
from ampopt.ir.deep_copy import deep_copy


def copied_step(step: UserStep, subject: Subject) -> tuple[UserStep, Training]:
    """A copy of a step, and one of what it trains. Raises InputError if it would train the user's model."""
    memo: dict[int, Any] = {}
    training = subject.copied(memo)
    own: UserStep = deep_copy(step, memo)
    instead = "write it as step(model, optimizer, *example_inputs) and use these"
    refuse_own("step", own, subject.model, subject.optimizer, instead)
    return own, training


@contextlib.contextmanager
def variables_of_step_kept(subject: Subject, step: UserStep | None) -> Iterator[None]:
    """Put back after the block what the step and the loss change that no copy of them has."""
    with contextlib.ExitStack() as stack:
        for function in (subject.loss, step):
            if function is not None:
                stack.enter_context(named_kept(function))
        yield


def update_once(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    """From now on, an update without a new gradient of `weight` does nothing: the remedy, to be executed.

    One with a closure computes them anew.
    """
    given, fresh = optimizer.step, [False]

    def once(*args: Any, **kwargs: Any) -> Any:
        if not (fresh[0] or args or kwargs):
            return None
        fresh[0] = False
        return given(*args, **kwargs)

    def renewed(_: Tensor) -> None:
        fresh[0] = True

    weight.register_hook(renewed)
    optimizer.step = once  # type: ignore[method-assign]
