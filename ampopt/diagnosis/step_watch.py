"""A few watched training steps of the user's own: what updates the weights, with which gradients, and where.

GradScaler's arithmetic is seen as the operators that it calls, whoever calls it; an update as the optimizer's
hooks tell it. Nothing of PyTorch's is replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampopt.diagnosis.host_reads import HostRead, HostReads, is_inside
from ampopt.errors import first_line
from ampopt.ir.parts import walk
from ampopt.ir.place_in_code import place_in_code, place_of_call
from ampopt.system.interrupts import check_interrupted

CALLS, MOST_CALLS = 3, 12
"""Watched steps: gradients that are never reset show in the second one; more until one updates the weights.

GradScaler begins with a scale with which gradients may overflow, and halves it each time.
"""

UserStep = Callable[..., object]
"""A training step of the user's, called as `step(model, optimizer, *args, **kwargs)`."""

_SCALES: CodeType = torch.amp.GradScaler.scale.__code__
_STEPS: CodeType = torch.amp.GradScaler.step.__code__
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@dataclasses.dataclass(frozen=True)
class Update:
    """One call of an optimizer's step.

    `place` is the user's line, `call` the number of the watched step from 0 on, `weights` the identities of
    those that it has. `by_scaler`: GradScaler called it. `is_fresh`: a backward pass has added to their
    gradients since the update of them before it. `is_stale`: that pass added to those of an earlier update.
    `is_scaled`: gradients of these weights are those of a scaled loss. `refused_by`: the line of a
    `scaler.step` that has left out these gradients. `moved` is ‖Δw‖ of all weights.
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


@dataclasses.dataclass
class WatchedSteps:
    """What was seen of a few steps.

    `idle` counts updates whose weights have no gradients, as of a head that a batch does not use. `forwards`
    counts calls of the model with gradients, `evaluated` those in evaluation mode, and `evaluated_at` is the
    line of one. `unused` are the names of the optimizer's weights that never got a gradient. `reads` are what
    the host waits for in the last step. `error`, `failed_at`: why and where a step failed.
    """

    updates: list[Update] = dataclasses.field(default_factory=list)
    idle: int = 0
    forwards: int = 0
    evaluated: int = 0
    evaluated_at: str = ""
    unused: list[str] = dataclasses.field(default_factory=list)
    reads: tuple[HostRead, ...] = ()
    error: str | None = None
    failed_at: str | None = None


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
        stack.enter_context(_Scaling(state))
        for state.call in range(MOST_CALLS):
            if state.call >= CALLS and (seen.updates or seen.idle):
                break
            state.inside = 0
            reads = HostReads(watch_steps.__code__, is_own=lambda: state.inside > 0 or _inside(_STEPS))
            try:
                with reads.watching():
                    step(model, optimizer, *args, **kwargs)
            except Exception as raised:
                check_interrupted(raised)
                seen.error, seen.failed_at = first_line(raised), place_in_code(raised)
                break
            seen.reads = reads.reads
    seen.unused = [name for name, weight in state.trained.items() if id(weight) not in state.ever]
    return seen


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


@dataclasses.dataclass
class _State:
    """What has happened since the last update; weights by identity. `inside`: how many updates now run.

    `scales` are GradScaler's by address, and `scaled_pass` is the last backward pass of a loss that has one.
    `refused` has the line of the `scaler.step` that has looked at a weight's gradient, until it applies it.
    """

    trained: dict[str, nn.Parameter]
    call: int = 0
    fresh: set[int] = dataclasses.field(default_factory=set)
    ever: set[int] = dataclasses.field(default_factory=set)
    stale: set[int] = dataclasses.field(default_factory=set)
    scales: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    scaled_pass: int | None = None
    scaled: set[int] = dataclasses.field(default_factory=set)
    refused: dict[int, str] = dataclasses.field(default_factory=dict)
    inside: int = 0
    has_gradients: bool = False
    before: list[Tensor] = dataclasses.field(default_factory=list)

    def comes(self, weight: Tensor, *, is_updated: bool) -> None:
        """A backward pass is about to add to a weight's gradient; `is_updated`: there was an update."""
        own = id(weight)
        if not _has_gradient(weight):
            self.stale.discard(own)
            self.scaled.discard(own)
            self.refused.pop(own, None)
        elif is_updated and own not in self.fresh:
            self.stale.add(own)
        if _current_pass() == self.scaled_pass:
            self.scaled.add(own)
        self.fresh.add(own)
        self.ever.add(own)

    def unscaled(self, gradients: Iterable[Tensor], place: str | None) -> None:
        """GradScaler has divided gradients by its scale; `place`: where it decides now whether to update."""
        places = {gradient.data_ptr() for gradient in gradients if gradient.numel()}
        for weight in self.trained.values():
            if (own := _gradient(weight)) is not None and own.data_ptr() in places:
                self.scaled.discard(id(weight))
                if place is not None:
                    self.refused[id(weight)] = place

    def applied(self, weights: frozenset[int]) -> None:
        """The gradients of weights are used up."""
        self.fresh, self.stale, self.scaled = (
            self.fresh - weights,
            self.stale - weights,
            self.scaled - weights,
        )
        self.refused = {weight: place for weight, place in self.refused.items() if weight not in weights}
        self.before = []


_current_pass = torch._C._current_graph_task_id
"""The number of the backward pass that calls this."""


def _gradient(weight: Tensor) -> Tensor | None:
    """The numbers of a weight's gradient."""
    gradient = weight.grad
    return gradient._values() if gradient is not None and gradient.is_sparse else gradient


def _has_gradient(weight: Tensor) -> bool:
    """Whether a weight has a gradient other than zeros, to which gradients are reset, too."""
    gradient = _gradient(weight)
    return gradient is not None and bool(gradient.any())


@contextlib.contextmanager
def _watching(
    seen: WatchedSteps, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[_State]:
    """Note forward passes, gradients and updates in the block."""
    own = {id(weight) for optimizer in optimizers for weight in weights_of(optimizer)}
    trained = {n: w for n, w in model.named_parameters() if id(w) in own and w.requires_grad}
    state = _State(trained)

    def called(module: nn.Module, _: object) -> None:
        if not torch.is_grad_enabled():
            return
        seen.forwards += 1
        if not module.training:
            seen.evaluated += 1
            seen.evaluated_at = seen.evaluated_at or user_line()

    def unseen(hook: Callable[..., None]) -> Callable[..., None]:
        """The hook, whose own operators are nobody's."""

        def called_unseen(*given: Any) -> None:
            with _disable_current_modes():
                hook(*given)

        return called_unseen

    def comes(weight: Tensor) -> Callable[[Tensor], None]:
        return lambda _: state.comes(weight, is_updated=bool(seen.updates))

    def begins(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if own.isdisjoint(map(id, weights_of(optimizer))):
            return
        state.inside += 1
        if state.inside == 1:  # an optimizer may be made of others
            state.before = [weight.detach().clone() for weight in trained.values()]
            mine = [weight for weight in weights_of(optimizer) if id(weight) in own]
            state.has_gradients = any(map(_has_gradient, mine))

    def ends(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weights = frozenset(own.intersection(map(id, weights_of(optimizer))))
        state.inside -= 1 if weights else 0
        if not weights or state.inside:
            return
        if not (state.has_gradients or state.fresh & weights):
            seen.idle += 1
            return
        pairs = zip(trained.values(), state.before, strict=True)
        moved = [torch.linalg.vector_norm((now.detach() - then).float()).item() for now, then in pairs]
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
            )
        )
        state.applied(weights)

    handles: list[Any] = [
        model.register_forward_pre_hook(called),
        register_optimizer_step_pre_hook(unseen(begins)),
        register_optimizer_step_post_hook(unseen(ends)),
        *(weight.register_hook(unseen(comes(weight))) for weight in trained.values()),
    ]
    try:
        yield state
    finally:
        for handle in handles:
            handle.remove()


class _Scaling(TorchDispatchMode):
    """Notes where a loss is scaled, its backward pass, and where gradients are no longer scaled."""

    def __init__(self, state: _State) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See the class."""
        result, state = func(*args, **(kwargs or {})), self._state
        if func is torch.ops.aten.mul.Tensor and _inside(_SCALES):
            state.scales[args[1].data_ptr()] = args[1]  # kept, so that nothing else has its address
        elif func is torch.ops.aten.mul.Tensor and state.scales and _current_pass() >= 0:
            if any(isinstance(each, Tensor) and each.data_ptr() in state.scales for each in args):
                state.scaled_pass = _current_pass()
        elif func is _UNSCALE:
            state.unscaled(args[0], user_line() if _inside(_STEPS) else None)
        return result


_inside = functools.partial(is_inside, within=watch_steps.__code__)
"""Whether a function of PyTorch has led here, from a watched step."""


def update_once(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    """From now on, an update without a new gradient of `weight` does nothing: the remedy, to be executed."""
    given, fresh = optimizer.step, [False]

    def once(*args: Any, **kwargs: Any) -> Any:
        if not fresh[0]:
            return None
        fresh[0] = False
        return given(*args, **kwargs)

    def renewed(_: Tensor) -> None:
        fresh[0] = True

    weight.register_hook(renewed)
    optimizer.step = once  # type: ignore[method-assign]
