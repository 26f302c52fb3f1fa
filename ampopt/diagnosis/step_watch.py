"""A few watched training steps of the user's own: what updates the weights, with which gradients, and where.

GradScaler's arithmetic is seen as the operators that it calls, whoever calls it; an update as the optimizer's
hooks tell it, or as weights that have moved without one. Nothing of PyTorch's is replaced.
"""

from __future__ import annotations

import contextlib
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
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from ampopt.diagnosis.host_reads import HostReads, is_inside
from ampopt.diagnosis.step_seen import Clip, Update, WatchedSteps
from ampopt.diagnosis.step_state import (
    StepState,
    current_pass,
    distance,
    has_gradient,
    host_copy,
    learning_of,
    moved_since,
    values_of,
)
from ampopt.errors import first_line
from ampopt.ir.eager_mode import EagerMode
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
_READ = torch.ops.aten._local_scalar_dense.default
"""GradScaler divides gradients, in `unscale_` or in `step`, and `step` reads whether they overflow."""


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
            if state.call >= CALLS and _is_enough(seen):
                break
            state.begin_call()
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
                seen.evaluated += state.evaluates
            _note_moved(seen, state, moved_since(before, model))
    seen.unused = [name for name, weight in state.trained.items() if id(weight) not in state.ever]
    seen.is_learning = len(seen.unused) < len(state.trained)
    seen.has_gradients = bool(state.ever)
    updated = set[int]().union(*(update.weights for update in seen.updates if not update.by_hand))
    seen.reset = [place for weights, place in state.reset.items() if updated.isdisjoint(weights)]
    seen.adds_up = state.adds_up
    seen.refused_at = next(iter(state.refused.values()), "")
    return seen


def _is_enough(seen: WatchedSteps) -> bool:
    """Whether more calls tell nothing new.

    They do where weights were moved by hand alone, as averages are, and gradients add up: an optimizer's
    update may come.
    """
    updates = seen.updates
    may_come = all(update.by_hand for update in updates) and any(update.is_stale for update in updates)
    return (seen.moves or bool(seen.idle) or seen.is_functional) and not may_come


def _note_moved(seen: WatchedSteps, state: StepState, moved: Mapping[int, float]) -> None:
    """Note which weights a call has moved; those that no optimizer's step is of were moved by hand."""
    seen.moves = seen.moves or bool(moved)
    by_hand = frozenset(moved.keys() - state.stepped)
    if by_hand:
        is_stale, far = bool(state.by_hand.stale & by_hand), sum(moved[each] ** 2 for each in by_hand) ** 0.5
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
                by_hand=True,
            )
        )
        state.by_hand.applied(by_hand)


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
        if module is not model or not torch.is_grad_enabled():
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
        def hook(gradient: Tensor) -> None:
            state.evaluates |= not model.training  # now, as it may be validated at the step's end
            state.comes(weight, gradient)

        return hook

    def begins(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if own.isdisjoint(map(id, weights_of(optimizer))):
            return
        state.inside += 1
        if state.inside == 1:  # an optimizer may be made of others
            state.before = [host_copy(weight) for weight in trained.values()]
            mine = [weight for weight in weights_of(optimizer) if id(weight) in own]
            state.has_gradients = any(map(has_gradient, mine))

    def ends(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weights = frozenset(own.intersection(map(id, weights_of(optimizer))))
        state.inside -= 1 if weights else 0
        if not weights or state.inside:
            return
        state.stepped |= weights
        if bool(getattr(optimizer, "found_inf", 0)):  # a fused one leaves out itself what GradScaler refuses
            state.refused |= dict.fromkeys(weights, user_line())
            return
        pairs = zip(trained.values(), state.before, strict=True)
        moved = [distance(host_copy(now), then) for now, then in pairs]
        if not state.has_gradients:
            seen.idle += 1
            has_zeros = any(w.grad is not None for w in weights_of(optimizer) if id(w) in weights)
            if (has_zeros or not any(moved)) and state.were_reset(weights):
                state.reset.setdefault(weights, user_line())
            return
        rates = [(group.get("lr"), group.get("initial_lr")) for group in optimizer.param_groups]
        seen.warms_up |= any(not rate and first for rate, first in rates)
        by_scaler = _inside(_STEPS)
        seen.updates.append(
            Update(
                place=user_line(),
                call=state.call,
                by_scaler=by_scaler,
                is_fresh=not weights & state.watched or bool(state.by_optimizers.fresh & weights),
                is_stale=bool(state.by_optimizers.stale & weights),
                is_scaled=bool(state.scaled & weights) and not by_scaler,
                refused_by="" if by_scaler else next(filter(None, map(state.refused.get, weights)), ""),
                moved=sum(each**2 for each in moved) ** 0.5,
                weights=weights,
                rate=max((float(rate) for rate, _ in rates if rate is not None), default=None),
            )
        )
        state.applied(weights)

    handles: list[Any] = [
        register_module_forward_pre_hook(called),  # the model's own would be its copies', too, and saved
        register_optimizer_step_pre_hook(unseen(begins)),
        register_optimizer_step_post_hook(unseen(ends)),
        *(weight.register_hook(unseen(comes(weight))) for weight in learning.values()),
        *(weight.register_post_accumulate_grad_hook(unseen(state.added)) for weight in learning.values()),
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


class _Scaling(EagerMode):
    """Notes where a loss is scaled, its backward pass, and where its gradients are limited or divided."""

    supports_higher_order_operators = True

    def __init__(self, seen: WatchedSteps, state: StepState) -> None:
        super().__init__()
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
            state.unscaled(args[0])
            state.note_overflow(args[1], args[0])
        elif func is _READ and state.overflows and args[0].data_ptr() in state.overflows and _inside(_STEPS):
            state.refuse(args[0], user_line())
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
            self._state.unscaled(gradients)


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
