"""A small network to train, steps of it, and cases of a training step."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.diagnosis.finding import Finding
from ampopt.diagnosis.step_copy import copied_step
from ampopt.diagnosis.step_findings import STEP_FINDINGS
from ampopt.diagnosis.step_watch import watch_steps
from ampopt.diagnosis.training import YOURS, StepTimes, TrainingCase, ways_of
from ampopt.diagnosis.training_step import PARTS, Subject, sgd
from ampopt.diagnosis.watch import Watched
from ampopt.ir.lanes import LANES
from ampopt.system.budget import Budget
from tests.support.cases import CPU, taking

TARGET = torch.arange(4)
Optimizer = torch.optim.Optimizer


def loss_of(result: Tensor) -> Tensor:
    return F.cross_entropy(result.float(), TARGET.to(result.device))


def net() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


def batch() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


SCALER = torch.amp.GradScaler("cpu")


def clean(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    SCALER.scale(loss_of(model(x))).backward()
    SCALER.step(optimizer)
    SCALER.update()


def again_after_scaler(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    clean(model, optimizer, x)
    optimizer.step()


def line_of(step: Callable[..., object], text: str, *, last: bool = False) -> str:
    """`training.py:27`, the line of a step that holds the text."""
    lines, first = inspect.getsourcelines(step)
    found = [first + at for at, line in enumerate(lines) if text in line]
    return f"{Path(inspect.getfile(step)).name}:{found[-1 if last else 0]}"


def case_of(
    model: nn.Module | None = None, step: Any = None, optimizer: Any = sgd, seconds: float = 1e6
) -> TrainingCase:
    subject = Subject(net() if model is None else model, (batch(),), loss_of, optimizer)
    called = Watched((), {"1": 'net.py:3, "norm"'})
    budget = Budget(time.perf_counter(), seconds)
    return TrainingCase(subject, CPU, LANES["amp"]["cpu"], budget, called, step)


def watched(step: Any, model: nn.Module | None = None) -> TrainingCase:
    """A case whose step was watched, with times that are made up: what is new takes 1 ms, the rest 2."""
    case = case_of(model, step)
    with_parts = dict(zip(PARTS, (0.1e-3, 0.6e-3, 1.0e-3, 0.3e-3), strict=True))
    if step is not None:
        own, training = copied_step(step, case.subject)
        case.steps = watch_steps(own, training.model, training.optimizer, training.args, {})
    for name in ways_of(case):
        parts = {} if name.startswith("yours") else with_parts
        case.times[name] = StepTimes(taking(2 if name in ("fp32", YOURS) else 1), parts)
    return case


def seen(step: Any, model: nn.Module | None = None, optimizer: Any = torch.optim.SGD) -> TrainingCase:
    """A case whose step was watched, without times."""
    case = case_of(model, step, optimizer)
    own, training = copied_step(step, case.subject)
    case.steps = watch_steps(own, training.model, training.optimizer, training.args, {})
    return case


def step_faults(case: TrainingCase) -> dict[str, Finding]:
    """What is wrong in a step, by name."""
    return {each.name: each for find in STEP_FINDINGS for each in find(case) if each.is_fault}
