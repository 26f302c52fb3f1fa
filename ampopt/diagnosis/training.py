"""Examines a training step: every way to run it, sampled in turn, its parts, and the user's own step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from ampopt.diagnosis.case import LEAST, timed_call
from ampopt.diagnosis.finding import Counterfactual
from ampopt.diagnosis.operators import Kernel, kernels_of, recording
from ampopt.diagnosis.step_copy import copied_step, update_once, variables_of_step_kept
from ampopt.diagnosis.step_seen import WatchedSteps
from ampopt.diagnosis.step_watch import UserStep, optimizers_of, watch_steps, weights_of
from ampopt.diagnosis.training_step import (
    LEAST_PARTS,
    Optimizer,
    Step,
    Subject,
    Training,
    amp,
    fp32,
    graphed,
    in_channels_last,
    made,
    mean_square,
    parts_of,
)
from ampopt.diagnosis.watch import Watched
from ampopt.errors import InputError, first_line
from ampopt.ir.lanes import Lane
from ampopt.measure.clocks import settled_latency, synchronize
from ampopt.measure.headline import Load
from ampopt.measure.sampling import Measurement, Sampler, gain, interleave
from ampopt.search.trials import Progress
from ampopt.system.budget import Budget
from ampopt.system.interrupts import check_interrupted

STEPS_S, MOST = 8.0, 200
"""Seconds for the samples of all ways, and their most rounds."""

PARTS_S = 0.5
"""Seconds for the parts of a way's step."""

ROUNDS = 2 + LEAST + LEAST_PARTS
"""Steps that a way takes at least: two to make it, its samples, and those whose parts are timed."""

YOURS, ONCE = "yours", "yours, updating once"
"""The names of the user's own step, and of it without repeated updates."""

Way = Callable[[], Step]


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """A way to run a training step: its samples, the seconds of its parts, and the peak of bytes on a GPU.

    `parts` is empty where they cannot be told apart: in a CUDA graph, and in the user's own step. `loss` is
    "its own" or "mean square" where the user's step has one that the other ways were not given, else empty.
    """

    step: Measurement
    parts: dict[str, float]
    peak: int | None = None
    loss: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON: milliseconds and MiB."""
        parts = {f"{name}_ms": round(1e3 * seconds, 6) for name, seconds in self.parts.items()}
        mib = None if self.peak is None else round(self.peak / 2**20, 1)
        return {**self.step.to_dict(), "parts": parts, "peak_mib": mib, "loss": self.loss}


@dataclasses.dataclass
class TrainingCase:
    """What the findings of a training step read. `subject` is on `device`, and is never called itself.

    `lane` is the mixed one; `times` are by the name of the way. `called` tells the lines that call modules,
    `spare` are the names of weights that get gradients and that the optimizer lacks; none with a step, which
    may have other optimizers, and freeze weights. `load` is that of other work on the machine, as it was
    before anything was measured.
    """

    subject: Subject
    device: torch.device
    lane: Lane
    budget: Budget
    called: Watched
    step: UserStep | None = None
    load: Load | None = None
    steps: WatchedSteps | None = None
    times: dict[str, StepTimes] = dataclasses.field(default_factory=dict)
    kernels: dict[str, list[Kernel]] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    untried: list[str] = dataclasses.field(default_factory=list)
    spare: list[str] = dataclasses.field(default_factory=list)

    def loss_of(self, way: str) -> str:
        """What a way's `StepTimes.loss` is."""
        if self.step is None or self.subject.loss is not mean_square:
            return ""
        return "its own" if way in (YOURS, ONCE) else "mean square"

    def compared(self, change: str, before: str, after: str) -> Counterfactual | None:
        """Two ways, which were sampled in turn; None where one was not."""
        if before not in self.times or after not in self.times:
            return None
        a, b = self.times[before].step, self.times[after].step
        return Counterfactual(change, a, b, gain(a, b), "a step")


def ways_of(case: TrainingCase) -> dict[str, Way]:
    """The ways of a device by name, those that tell most first."""
    subject, low = case.subject, case.lane.name
    mixed = functools.partial(amp, subject, case.lane.dtype)
    found: dict[str, Way] = {"fp32": functools.partial(fp32, subject), low: mixed}
    if case.step is not None:
        found[YOURS] = lambda: own_step(case)
        if repeats(case.steps):
            found[ONCE] = lambda: own_step(case, once=True)
    found[f"{low} + channels_last"] = lambda: in_channels_last(mixed())
    if case.device.type == "cuda":
        found["fp32 + CUDA graph"] = lambda: graphed(fp32(subject))
        found[f"{low} + CUDA graph"] = lambda: graphed(mixed())
        found[f"{low} + channels_last + CUDA graph"] = lambda: graphed(in_channels_last(mixed()))
    optimizer = subject.optimizer if isinstance(subject.optimizer, Optimizer) else subject.copied().optimizer
    for flag in ("fused", "foreach"):
        if _lacks(optimizer, flag, case.device):
            found[f"fp32 + {flag}"] = functools.partial(_with_flag, subject, flag)
    return found


def measure_training(case: TrainingCase, tell: Progress) -> None:
    """Fill a case: the user's step watched, and the times of all ways for which there is time."""
    with variables_of_step_kept(case.subject, case.step):
        _measure(case, tell)


def _measure(case: TrainingCase, tell: Progress) -> None:
    if case.step is not None:
        tell("all", "watched steps")
        case.steps = _watched(case, case.step)
    steps, peaks = dict[str, Step](), dict[str, int | None]()
    samplers, each_s = dict[str, Sampler](), dict[str, float]()
    for name, make in ways_of(case).items():
        tell(name, "training step")
        if each_s and ROUNDS * (sum(each_s.values()) + max(each_s.values())) > case.budget.left_s:
            case.untried.append(f"a step in {name}")
            continue
        try:
            steps[name], peaks[name] = made(make, case.device)
            each_s[name] = timed_call(steps[name], case.device)
        except Exception as error:
            check_interrupted(error)
            if name == "fp32" and isinstance(error, InputError):
                raise
            if name == "fp32":
                raise InputError(f"a training step fails: {first_line(error)}") from error
            case.notes.append(f"a step in {name} was not timed: {first_line(error)}")
            continue
        if name == "fp32" and case.step is None and isinstance(trained := steps[name], Training):
            case.spare = _spare(trained)
        samplers[name] = settled_latency(steps[name], case.device, last_s=each_s[name])
    tell("all", "training steps")
    seconds = min(STEPS_S, max(case.budget.left_s / 2, 0.0))
    found = interleave(samplers, seconds=seconds, least=LEAST, most=MOST)
    for name, measured in found.items():
        step = steps[name]
        parts = parts_of(step, min(PARTS_S, seconds)) if isinstance(step, Training) else {}
        case.times[name] = StepTimes(measured, parts, peaks[name], case.loss_of(name))
        if case.device.type == "cuda" and isinstance(step, Training):
            case.kernels[name] = _kernels(step, case.device)


def repeats(steps: WatchedSteps | None) -> bool:
    """Whether a watched step has used the same gradients twice."""
    return steps is not None and any(not u.is_fresh or u.refused_by for u in steps.updates)


def own_step(case: TrainingCase, *, once: bool = False) -> Step:
    """The user's step on copies of all that it holds; with `once`, an update for each backward pass only."""
    assert case.step is not None
    step, trained = copied_step(case.step, case.subject)
    if once:
        assert case.steps is not None
        named = {id(weight): name for name, weight in trained.model.named_parameters()}
        for optimizer in optimizers_of(step, trained.model, trained.optimizer):
            names = ((named.get(id(weight)), weight) for weight in weights_of(optimizer))
            used = [w for name, w in names if w.requires_grad and name and name not in case.steps.unused]
            if used:
                update_once(optimizer, used[0])

    def call() -> None:
        step(trained.model, trained.optimizer, *trained.args, **trained.kwargs)

    return call


def _watched(case: TrainingCase, step: UserStep) -> WatchedSteps:
    own, trained = copied_step(step, case.subject)
    seen = watch_steps(own, trained.model, trained.optimizer, trained.args, trained.kwargs)
    if seen.error is not None and not seen.lacks_scaler_update:
        where = f" at {seen.failed_at}" if seen.failed_at else ""
        raise InputError(
            f"the step fails{where}: {seen.error.rstrip('.')}. It is called as step(model, optimizer, "
            "*example_inputs)"
        )
    if not (seen.forwards or seen.updates):
        raise InputError(
            "the step does not call the model that it is given with gradients, and brings its weights none: "
            "write it as a function step(model, optimizer, *example_inputs) that uses these, so that yours "
            "stay as they are"
        )
    return seen


def _lacks(optimizer: Optimizer, flag: str, device: torch.device) -> bool:
    """Whether the optimizer knows an implementation and does not use it; foreach is a GPU's default."""
    if flag not in optimizer.defaults or optimizer.defaults.get("fused"):
        return False
    usual = flag == "foreach" and device.type == "cuda"
    return not optimizer.defaults[flag] and not (usual and optimizer.defaults[flag] is None)


def _spare(step: Training) -> list[str]:
    """The names of weights that got gradients in the last step, and that the optimizer lacks."""
    own = set(map(id, weights_of(step.optimizer)))
    return [n for n, w in step.model.named_parameters() if w.grad is not None and id(w) not in own]


def _with_flag(subject: Subject, flag: str) -> Training:
    return fp32(subject).with_optimizer(**{flag: True})


def _kernels(step: Training, device: torch.device) -> list[Kernel]:
    """The kernels of one step, in no order."""
    with recording(device) as recorded:
        step()
        synchronize(device)
    return [
        kernel
        for event in recorded.events() or ()
        if event.cpu_parent is None
        for kernel in kernels_of(event)
    ]
