"""`ampopt.diagnose(…, train=True)`: why a training step is slow, what is wrong in it, and what would help."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ampopt.diagnosis.case import own_tensors
from ampopt.diagnosis.ceilings import ceilings_of
from ampopt.diagnosis.examine import untried_note
from ampopt.diagnosis.finding import ranked
from ampopt.diagnosis.result import Diagnosis
from ampopt.diagnosis.step_watch import UserStep
from ampopt.diagnosis.training import TrainingCase, measure_training
from ampopt.diagnosis.training_findings import find_in_training, verdict_of
from ampopt.diagnosis.training_step import Loss, MakeOptimizer, Optimizer, Subject, mean_square, sgd
from ampopt.diagnosis.watch import watch
from ampopt.errors import InputError
from ampopt.ir.lanes import Lane
from ampopt.ir.model_copy import exact_copy, is_training, untouched_rng
from ampopt.ir.signature import describe, flatten_call, tensors_of
from ampopt.measure.headline import Load
from ampopt.search.example_call import prepare_call
from ampopt.search.progress import progress_line
from ampopt.system.budget import Budget
from ampopt.system.environment import environment
from ampopt.system.memory import release
from ampopt.system.wording import argument


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a training step is made of, as it was given."""

    loss: Loss | None = None
    optimizer: Optimizer | MakeOptimizer | None = None
    step: UserStep | None = None

    def refuse_without_train(self) -> None:
        """Raise InputError for anything that only a training step has."""
        given = [name for name in ("loss", "optimizer", "step") if getattr(self, name) is not None]
        if given:
            what, train = argument(f"{given[0]}="), argument("train", True)
            raise InputError(f"{what} is of a training step: give {train}, too")


def refuse_with_train(**given: Any) -> None:
    """Raise InputError for options that a training step does not have."""
    for name, value in given.items():
        if value:
            what, train = argument(f"{name}="), argument("train", True)
            raise InputError(f"{what} is of a call, not of a training step: leave it out with {train}")


def diagnose_training(
    model: nn.Module,
    call: tuple[Any, dict[str, Any]],
    device: torch.device,
    lane: Lane,
    asked: Asked,
    budget: Budget,
    progress: bool | None,
    note: str | None,
    load: Load | None,
) -> Diagnosis:
    """The diagnosis of a training step in FP32 and in a mixed `lane`; see `ampopt.diagnose`.

    `call` are the example inputs and keyword arguments as they were given, `note` is one on the model, `load`
    that of other work on the machine. Raises InputError.
    """
    _, args, kwargs, told = prepare_call(model, call[0], call[1], device)
    subject = _subject(model, args, kwargs, asked)
    with (
        progress_line(progress, budget.started, budget.seconds) as tell,
        untouched_rng(device),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
    ):
        tell("all", "watched call")
        called = watch(exact_copy(subject.model).to(device), *own_tensors(args, kwargs), device)
        tell("all", "ceilings")
        ceilings = ceilings_of(device, lane.dtype)
        case = TrainingCase(subject, device, lane, budget, called, asked.step, load)
        measure_training(case, tell)
        findings = ranked(find_in_training(case))
    release(device)
    notes = [each for each in (note, told, *_notes(model, asked, case.spare)) if each]
    return Diagnosis(
        model=type(model).__name__,
        environment=environment(device),
        inputs=tuple(describe(tensor) for tensor in tensors_of(flatten_call(args, kwargs)[0])),
        verdict=verdict_of(case, findings),
        findings=findings,
        latency={name: times.step for name, times in case.times.items()},
        device_time={},
        ceilings=ceilings,
        layers=(),
        accuracy={},
        sweep=(),
        notes=(*notes, *case.notes, *untried_note(case.untried, budget)),
        seconds=time.perf_counter() - budget.started,
        training=case.times,
    )


def _subject(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked) -> Subject:
    """The model with its call, a loss and an optimizer."""
    if not tensors_of(flatten_call(args, kwargs)[0]):
        raise InputError("a training step needs a tensor among the example inputs")
    if not any(weight.requires_grad for weight in model.parameters()):
        raise InputError("no parameter of the model requires a gradient: there is nothing to train")
    optimizer = asked.optimizer or sgd
    for name, given in (("optimizer", asked.optimizer), ("loss", asked.loss), ("step", asked.step)):
        if given is not None and not callable(given) and not isinstance(given, Optimizer):
            raise InputError(f"{name}={given!r} cannot be called: give a function or a class")
    if isinstance(optimizer, Optimizer) and not _optimized(model, optimizer):
        raise InputError(
            "the optimizer has none of the model's parameters: make it of this model's, or pass what makes "
            "it, as optimizer=torch.optim.AdamW"
        )
    return Subject(model, args, asked.loss or mean_square, optimizer, kwargs)


def _optimized(model: nn.Module, optimizer: Optimizer) -> set[int]:
    """The identities of the model's parameters that an optimizer has."""
    own = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    return own & {id(weight) for weight in model.parameters()}


def _notes(model: nn.Module, asked: Asked, spare: Sequence[str]) -> Iterator[str]:
    if not is_training(model) and asked.step is None:
        yield "the model is in evaluation mode: what was timed is training mode"
    if asked.loss is None and asked.step is None:
        yield "no loss was given: it is the mean square of the outputs"
    elif asked.loss is None:
        yield (
            "no loss was given: it is the mean square of the outputs in all ways but your step, which they "
            f"are not comparable with; give {argument('loss=')}, too"
        )
    if spare:
        yield (
            f"{len(spare)} weights get gradients, and the optimizer has none of them: {_few(spare)}; "
            "requires_grad_(False) saves their time"
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
