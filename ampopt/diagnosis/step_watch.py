"""A few watched training steps of the user's own: what updates the weights, with which gradients, and where.

GradScaler's arithmetic is seen as the operators that it calls, whoever calls it; an update as the optimizer's
hooks tell it, or as weights that have moved without one. Nothing of PyTorch's is replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampopt.diagnosis.host_reads import HostRead, HostReads, is_inside
from ampopt.diagnosis.step_state import (
    StepState,
    current_pass,
    distance,
    has_gradient,
    learning_of,
    moved_since,
    values_of,
)
from ampopt.errors import first_line
from ampopt.ir.parts import walk
from ampopt.ir.place_in_code import place_in_code, place_of_call
from ampopt.system.interrupts import check_interrupted

CALLS, MOST_CALLS = 3, 12
"""Watched steps: gradients that are never reset show in the second one; more until one moves the weights.

GradScaler begins with a scale with which gradients may overflow, and halves it each time.
"""

UserStep = Callable[..., object]
"""A training step of the user's, called as `step(model, optimizer, *args, **kwargs)`."""

_SCALES: CodeType = torch.amp.GradScaler.scale.__code__
_STEPS: CodeType = torch.amp.GradScaler.step.__code__
_CLIPS: dict[CodeType, str] = {
    inspect.unwrap(nn.utils.clip_grad_norm_).__code__: "max_norm",
    inspect.unwrap(nn.utils.clip_grad_value_).__code__: "clip_value",
    inspect.unwrap(nn.utils.clip_grads_with_norm_).__code__: "max_norm",
}
"""The functions that limit gradients, with the names of their limits."""

_ATEN = torch.ops.aten
_DIVIDES: dict[Any, int] = {
    **dict.fromkeys((_ATEN.div, _ATEN.div_, _ATEN._foreach_div, _ATEN._foreach_div_), 1),
    **dict.fromkeys((_ATEN.mul, _ATEN.mul_, _ATEN._foreach_mul, _ATEN._foreach_mul_), -1),
}
"""What divides gradients by the scale, and with which power of it."""

_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@dataclasses.dataclass(frozen=True)
class Update:
    """One call of an optimizer's step, or what moved weights in a call of the user's without one.

    `place` is the user's line, empty where it is not known, `call` the number of the watched step from 0 on,
    `weights` the identities of those that it has. `by_scaler`: GradScaler called it. `is_fresh`: a backward
    pass has added to their gradients since the update of them before it. `is_stale`: that pass added to those
    of an earlier update.
    `is_scaled`: gradients of these weights are those of a scaled loss. `refused_by`: the line of a
    `scaler.step` that has left out these gradients. `moved` is ‖Δw‖ of all weights. `rate` is the largest
    learning rate of its weights, None where there is none.
    """

    place: str
    call: int
    by_scaler: bool
    is_fresh: bool
    is_stale: bool
    is_scaled: bool
    refused_by: str
    moved: float
    weights: frozenset[int]
    rate: float | None = None


@dataclasses.dataclass(frozen=True)
class Clip:
    """A limit for gradients that are `scale` times the true ones, and the user's line."""

    place: str
    limit: float
    scale: float


@dataclasses.dataclass
class WatchedSteps:
    """What was seen of `calls` of a step.

    `moves`: a call has moved the weights. `is_functional`: the model is called with others than its own, as
    by `torch.func.functional_call`. `idle` counts updates whose weights have no gradients, as of a head that
    a batch does not use, and `reset` are the lines of those that had some after the last backward pass.
    `refused_at` is the line of a `scaler.step` that has left out the last gradients, `clipped` the first
    limit for gradients of a scaled loss. `warms_up`: a schedule has set a rate of 0. `forwards` counts calls
    of the model with gradients, `evaluated` those in evaluation mode; `evaluated_at` is the line of one, and
    `eval_at` that which has set the mode. `unused` are the names of the optimizer's weights that never got a
    gradient. `has_gradients`: a weight of the model got one, `is_learning`: one of the optimizer's. `reads`
    are what the host waits for in the last step. `error`, `failed_at`: why and where a step failed.
    """

    calls: int = 0
    moves: bool = False
    is_functional: bool = False
    updates: list[Update] = dataclasses.field(default_factory=list)
    idle: int = 0
    reset: list[str] = dataclasses.field(default_factory=list)
    refused_at: str = ""
    warms_up: bool = False
    clipped: Clip | None = None
    forwards: int = 0
    evaluated: int = 0
    evaluated_at: str = ""
    eval_at: str = ""
    unused: list[str] = dataclasses.field(default_factory=list)
    has_gradients: bool = False
    is_learning: bool = False
    reads: tuple[HostRead, ...] = ()
    error: str | None = None
    failed_at: str | None = None

    @property
    def lacks_scaler_update(self) -> bool:
        """Whether a second call failed because none of `scaler.update()` came before it."""
        return self.calls > 1 and "since the last update()" in (self.error or "")


def watch_steps(
    step: UserStep,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> WatchedSteps:
    """Watch a few steps, on a model and an optimizer over its parameters that nothing else uses.

    Updates are those by any optimizer of the model's weights: a step may have one of its own.
    """
    seen = WatchedSteps()
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(_watching(seen, model, optimizers_of(step, model, optimizer)))
        stack.enter_context(_Scaling(seen, state))
        for state.call in range(MOST_CALLS):
            if state.call >= CALLS and (seen.moves or seen.idle or seen.is_functional):
                break
            state.inside, state.stepped = 0, set()
            forwards, passes, before = seen.forwards, state.last_pass, values_of(model)
            reads = HostReads(watch_steps.__code__, is_own=lambda: state.inside > 0 or _inside(_STEPS))
            seen.calls += 1
            try:
                with reads.watching():
                    step(model, optimizer, *args, **kwargs)
            except Exception as raised:
                check_interrupted(raised)
                seen.error, seen.failed_at = first_line(raised), place_in_code(raised)
                break
            seen.reads = reads.reads
            if seen.forwards == forwards and state.last_pass != passes:  # by methods, or by its submodules
                seen.forwards += 1
                seen.evaluated += not model.training
            _note_moved(seen, state, moved_since(before, model))
    seen.unused = [name for name, weight in state.trained.items() if id(weight) not in state.ever]
    seen.is_learning = len(seen.unused) < len(state.trained)
    seen.has_gradients = bool(state.ever)
    seen.refused_at = next(iter(state.refused.values()), "")
    return seen


def _note_moved(seen: WatchedSteps, state: StepState, moved: Mapping[int, float]) -> None:
    """Note which weights a call has moved; those that no optimizer's step is of were moved by hand."""
    seen.moves = seen.moves or bool(moved)
    by_hand = frozenset(moved.keys() - state.stepped)
    if by_hand:
        is_stale, far = bool(state.stale & by_hand), sum(moved[each] ** 2 for each in by_hand) ** 0.5
        seen.updates.append(
            Update(
                place="",
                call=state.call,
                by_scaler=False,
                is_fresh=True,
                is_stale=is_stale,
                is_scaled=False,
                refused_by="",
                moved=far,
                weights=by_hand,
            )
        )
        state.applied(by_hand)


def optimizers_of(
    step: UserStep, model: nn.Module, given: torch.optim.Optimizer
) -> list[torch.optim.Optimizer]:
    """The optimizer that a step is given, and those of the model's weights that it holds."""
    own = set(map(id, model.parameters()))
    held = [
        v for _, v in walk(step, classes=False) if isinstance(v, torch.optim.Optimizer) and v is not given
    ]
    return [given, *(each for each in held if own & set(map(id, weights_of(each))))]


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The weights of all groups of an optimizer."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def user_line() -> str:
    """The innermost line of the user's code that has led here from a watched step; empty if there is none."""
    return place_of_call(watch_steps.__code__) or ""


@contextlib.contextmanager
def _watching(
    seen: WatchedSteps, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[StepState]:
    """Note forward passes, gradients and updates in the block."""
    own = {id(weight) for optimizer in optimizers for weight in weights_of(optimizer)}
    learning, models = learning_of(model), set(map(id, model.parameters()))
    trained = {name: weight for name, weight in learning.items() if id(weight) in own}
    state = StepState(learning, trained)

    def called(module: nn.Module, _: object) -> None:
        if not torch.is_grad_enabled():
            return
        seen.forwards += 1
        seen.is_functional |= set(map(id, module.parameters())) != models
        if not module.training:
            seen.evaluated += 1
            seen.evaluated_at = seen.evaluated_at or user_line()

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        if self is model and not mode:
            seen.eval_at = seen.eval_at or user_line()
        return type(self).train(self, mode)

    def unseen(hook: Callable[..., None]) -> Callable[..., None]:
        """The hook, whose own operators are nobody's."""

        def called_unseen(*given: Any) -> None:
            with _disable_current_modes():
                hook(*given)

        return called_unseen

    def comes(weight: Tensor) -> Callable[[Tensor], None]:
        return lambda gradient: state.comes(weight, gradient, is_updated=bool(seen.updates))

    def begins(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if own.isdisjoint(map(id, weights_of(optimizer))):
            return
        state.inside += 1
        if state.inside == 1:  # an optimizer may be made of others
            state.before = [weight.detach().clone() for weight in trained.values()]
            mine = [weight for weight in weights_of(optimizer) if id(weight) in own]
            state.has_gradients = any(map(has_gradient, mine))

    def ends(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weights = frozenset(own.intersection(map(id, weights_of(optimizer))))
        state.inside -= 1 if weights else 0
        if not weights or state.inside:
            return
        state.stepped |= weights
        if bool(getattr(optimizer, "found_inf", 0)):  # a fused one leaves out itself what GradScaler refuses
            return
        pairs = zip(trained.values(), state.before, strict=True)
        moved = [distance(now.detach(), then) for now, then in pairs]
        if not state.has_gradients:
            seen.idle += 1
            has_zeros = any(w.grad is not None for w in weights_of(optimizer) if id(w) in weights)
            if (has_zeros or not any(moved)) and state.were_reset(weights):
                seen.reset.append(user_line())
            return
        rates = [(group.get("lr"), group.get("initial_lr")) for group in optimizer.param_groups]
        seen.warms_up |= any(not rate and first for rate, first in rates)
        by_scaler = _inside(_STEPS)
        seen.updates.append(
            Update(
                place=user_line(),
                call=state.call,
                by_scaler=by_scaler,
                is_fresh=bool(state.fresh & weights),
                is_stale=bool(state.stale & weights),
                is_scaled=bool(state.scaled & weights) and not by_scaler,
                refused_by="" if by_scaler else next(filter(None, map(state.refused.get, weights)), ""),
                moved=sum(each**2 for each in moved) ** 0.5,
                weights=weights,
                rate=max((float(rate) for rate, _ in rates if rate is not None), default=None),
            )
        )
        state.applied(weights)

    handles: list[Any] = [
        model.register_forward_pre_hook(called),
        register_optimizer_step_pre_hook(unseen(begins)),
        register_optimizer_step_post_hook(unseen(ends)),
        *(weight.register_hook(unseen(comes(weight))) for weight in learning.values()),
    ]
    has_own_mode = "train" in vars(model)
    if not has_own_mode:  # a bound method is one of a copy's in its copies
        vars(model)["train"] = types.MethodType(train, model)
    try:
        yield state
    finally:
        for handle in handles:
            handle.remove()
        if not has_own_mode:
            del vars(model)["train"]


class _Scaling(TorchDispatchMode):
    """Notes where a loss is scaled, its backward pass, and where its gradients are limited or divided."""

    def __init__(self, seen: WatchedSteps, state: StepState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._state = seen, state

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See the class."""
        result, state = func(*args, **(kwargs or {})), self._state
        if func is torch.ops.aten.mul.Tensor and _inside(_SCALES):
            state.scales[args[1].data_ptr()] = args[1]  # kept, so that nothing else has its address
        elif func is torch.ops.aten.mul.Tensor and state.scales and current_pass() >= 0:
            if any(isinstance(each, Tensor) and each.data_ptr() in state.scales for each in args):
                state.scaled_pass = current_pass()
        elif func is _UNSCALE:
            state.unscaled(args[0], user_line() if _inside(_STEPS) else None)
        elif state.scaled and args and current_pass() < 0:
            given = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            gradients = [each for each in given if isinstance(each, Tensor)]
            if state.has_scaled(gradients):
                self._handles(func, gradients, args[1:])
        return result

    def _handles(self, func: Any, gradients: list[Tensor], others: tuple[Any, ...]) -> None:
        """The user divides gradients by the scale, or limits them; a limit above it may be scaled, too."""
        scale, limit = float(next(reversed(self._state.scales.values()))), _limit_of_clip()
        if limit is not None:
            if 1 < scale > limit and self._seen.clipped is None:
                self._seen.clipped = Clip(user_line(), limit, scale)
            return
        power = _DIVIDES.get(func.overloadpacket)
        if power and _is_number(others) and math.isclose(float(others[0]), scale**power, rel_tol=1e-3):
            self._state.unscaled(gradients, None)


def _is_number(others: tuple[Any, ...]) -> bool:
    """Whether the first of these is one."""
    other = others[0] if others else None
    return isinstance(other, (int, float)) or (isinstance(other, Tensor) and other.numel() == 1)


def _limit_of_clip() -> float | None:
    """The limit of the function that clips gradients, and has led here from a watched step."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not watch_steps.__code__:
        if frame.f_code in _CLIPS:
            return float(frame.f_locals[_CLIPS[frame.f_code]])
        frame = frame.f_back
    return None


_inside = functools.partial(is_inside, within=watch_steps.__code__)
"""Whether a function of PyTorch has led here, from a watched step."""
