"""The result for a model that is not one graph: the model's code, with optimized parts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from ampopt.deploy.health import Callback, Event, Health, Monitor
from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import InputError
from ampopt.ir.lane_io import original_of
from ampopt.ir.model_copy import device_of, working_copy
from ampopt.ir.plain_tensors import check_no_derivatives, is_surrounded, without_derivatives
from ampopt.ir.settings import Settings, autocast_now
from ampopt.ir.signature import describe, flatten_call, tensors_of
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.ledger import Ledger
from ampopt.search.between import Between
from ampopt.system.environment import environment


class PartlyOptimizedModule(nn.Module):
    """A model of which some parts are optimized; calls, results and dtypes are the original's.

    Parts are submodules, and graphs of the code between them. A submodule called with shapes that it was not
    captured for runs its original code, or raises StrictError with `strict`; so does the code between them
    run as it was. `report.regions` has the ledger of each optimized part, `report.notes` says why the others
    are not. `health` and `on_health` are those of all optimized submodules together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimized: Mapping[str, OptimizedModule],
        between: Between | None,
        report: Ledger,
        device: torch.device,
    ) -> None:
        """`model` is a private copy, which is not called; `optimized` are its submodules' replacements.

        `between`: the optimized code between them, if that is faster.
        """
        super().__init__()
        self._between = between
        self.report, self._device = report, device
        self._original, self._optimized = [model], dict(optimized)  # in a list: `.to()` leaves it alone
        self._monitor, self._strict = Monitor(chose_original=report.chosen == ORIGINAL), False
        self.reset_state()
        self.training = False

    def reset_state(self) -> None:
        """Reset the model's state to what it was when the model was optimized."""
        model = patched(self._original[0], self._optimized)
        self._answer: list[Callable[..., Any]] = [self._between.serve(model) if self._between else model]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer one call, in the caller's autocast, and in inference mode if the caller is in it.

        Inference tensors can only be written in inference mode. Raises InputError if a derivative is
        requested.
        """
        if is_surrounded():
            try:
                check_no_derivatives(flatten_call(args, kwargs)[0])
            except InputError as error:
                self._monitor.note(Event("refusal", str(error), "a transformed tensor"))
                raise
        with contextlib.ExitStack() as stack:
            is_inference = torch.is_inference_mode_enabled()
            stack.enter_context(Settings().scope(self._device, autocast_now(self._device)))
            if is_inference:
                stack.enter_context(torch.inference_mode())
            result = self._answer[0](*args, **kwargs)
        return without_derivatives(result, flatten_call(args, kwargs)[0])

    @property
    def strict(self) -> bool:
        """Whether a submodule raises StrictError instead of running its original; see `ampopt.optimize`."""
        return self._strict

    @strict.setter
    def strict(self, strict: bool) -> None:
        self._strict = strict
        for module in self._optimized.values():
            module.strict = strict

    @property
    def health(self) -> Health:
        """Counts of how optimized submodules answered calls so far; see `ampopt.deploy.health.Health`."""
        own = self._monitor.health()
        healths = [module.health for module in self._optimized.values()]
        together = functools.reduce(operator.add, healths, own)
        return dataclasses.replace(together, chose_original=own.chose_original)

    def on_health(self, callback: Callback) -> Callable[[], None]:
        """`OptimizedModule.on_health` for all optimized submodules."""
        stops = [self._monitor.tell(callback), *(m.on_health(callback) for m in self._optimized.values())]

        def stop() -> None:
            for each in stops:
                each()

        return stop

    def train(self, mode: bool = True) -> PartlyOptimizedModule:
        """Refuse training mode, as `OptimizedModule` does."""
        if mode:
            raise InputError(
                "an optimized module cannot be trained: train the original and optimize it again"
            )
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise InputError(
            "an optimized module stays where it was made: optimize the original again, "
            "with device= for another device"
        )

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "an optimized module cannot be pickled, as torch.save does, or copied: its programs live in this "
            'process, and .save("robot.ampopt") takes models that are one graph. Keep the original\'s '
            "state_dict() and optimize it again where it is used, which is quicker then"
        )


def patched(original: nn.Module, optimized: Mapping[str, OptimizedModule]) -> nn.Module:
    """A copy of the model in which some submodules are optimized, in the state of the original."""
    model = working_copy(original)
    for name, module in optimized.items():
        model.get_submodule(name).forward = module.__call__
    return model


def as_it_was(
    original: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str, *, started: float
) -> PartlyOptimizedModule:
    """A private copy with the interface of an optimized module, not optimized for the reason."""
    leaves = flatten_call(args, kwargs)[0]
    device = device_of(original, leaves)
    notes = [reason, "the original answers every call: nothing was tried"]
    inputs = tuple(describe(t) for t in tensors_of(leaves))
    name = type(original_of(original)).__name__
    ledger = Ledger(name, environment(device), inputs, notes=notes, chosen=ORIGINAL)
    ledger.seconds = time.perf_counter() - started
    return PartlyOptimizedModule(original, {}, None, ledger, device)
