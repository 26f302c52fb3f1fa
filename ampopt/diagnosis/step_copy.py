"""Copies the user's training step with all that it holds: model, optimizer and scaler stay as they are.

What a closure holds is copied: a scaler, a scheduler, an average of weights. A global variable cannot be; a
`GradScaler` among them is put back, and a step that names the model or its optimizer so is refused.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.diagnosis.step_watch import UserStep
from ampopt.diagnosis.training_step import Subject, Training
from ampopt.errors import InputError
from ampopt.ir.deep_copy import deep_copy
from ampopt.ir.parts import walk


def copied_step(step: UserStep, subject: Subject) -> tuple[UserStep, Training]:
    """A copy of a step, and one of what it trains. Raises InputError if it would train the user's model."""
    memo: dict[int, Any] = {}
    training = subject.copied(memo)
    own: UserStep = deep_copy(step, memo)
    originals = {id(module) for module in subject.model.modules()} | {id(subject.optimizer)}
    for path, value in walk(own, classes=False):
        if isinstance(value, (nn.Module, torch.optim.Optimizer)) and id(value) in originals:
            raise InputError(
                f"the step reaches your own {type(value).__name__} by {path}: write it as step(model, "
                "optimizer, *example_inputs) and use these, so that yours stay as they are"
            )
    return own, training


@contextlib.contextmanager
def scalers_kept(step: UserStep | None) -> Iterator[None]:
    """Put the scalers that a step reaches back to their state after the block."""
    found = [] if step is None else [v for _, v in walk(step, classes=False) if _is_scaler(v)]
    before = [{name: _copied(value) for name, value in vars(scaler).items()} for scaler in found]
    try:
        yield
    finally:
        for scaler, state in zip(found, before, strict=True):
            vars(scaler).update(state)


def _is_scaler(value: Any) -> bool:
    return isinstance(value, torch.amp.GradScaler)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
