"""What was seen of a few calls of a training step: updates, limits for gradients, calls of the model."""

from __future__ import annotations

import dataclasses

from ampopt.diagnosis.host_reads import HostRead


@dataclasses.dataclass(frozen=True)
class Update:
    """One call of an optimizer's step, or what moved weights in a call of the user's without one.

    `place` is the user's line, empty where it is not known, `call` the number of the watched step from 0 on,
    `weights` the identities of those that it has. `by_scaler`: GradScaler called it, `by_hand`: no optimizer.
    `is_fresh`: a backward pass has added to their gradients since the update of them before it. `is_stale`:
    that pass added to those of an earlier update.
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
    by_hand: bool = False


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
    a batch does not use, and `reset` are the lines of those that had some after the last backward pass, and
    were not updated in any call.
    A backward pass `adds_up` where it adds to the gradients of an earlier call.
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
    adds_up: bool = False
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
