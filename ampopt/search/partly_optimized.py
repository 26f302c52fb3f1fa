"""The result for a model that is not one graph: the model's code, with optimized parts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from ampopt.deploy.deployable import Deployable, DeployableGraph
from ampopt.deploy.health import Callback, Event, Health, Monitor
from ampopt.deploy.new_calls import call_to_prepare, check_answered
from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import InputError
from ampopt.ir.lane_io import original_of
from ampopt.ir.model_copy import device_of, working_copy
from ampopt.ir.plain_tensors import check_caller, is_surrounded, without_derivatives
from ampopt.ir.settings import Settings, autocast_now
from ampopt.ir.signature import describe, flatten_call, tensors_of
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.ledger import Ledger
from ampopt.search.between import Between
from ampopt.search.served_part import ServedPart
from ampopt.system.environment import environment
from ampopt.system.wording import argument

SHORT_S = 2e-3
"""Time in seconds of a call up to which a submodule that is not faster is captured with what is around it."""


class PartlyOptimizedModule(Deployable):
    """A model of which some parts are optimized; calls, results and dtypes are the original's.

    Parts are submodules, and graphs of the code between them. A submodule called with shapes that it was not
    captured for runs its original code, or raises StrictError with `strict`; so does the code between them
    run as it was. `report.regions` has the ledger of each optimized part, `report.notes` says why the others
    are not. `health` and `on_health` are those of all optimized submodules together.
    `save` and `export_onnx` write one of the optimized submodules, `part=`, as a model of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        optimized: Mapping[str, OptimizedModule],
        between: Between | None,
        report: Ledger,
        device: torch.device,
        *,
        is_copy: bool = True,
        was_tried: bool = True,
        example: Sequence[Tensor] = (),
    ) -> None:
        """`model` is a private copy, which is not called; `optimized` are its submodules' replacements.

        `between`: the optimized code between them, if that is faster. Without `is_copy` the model is the
        user's own, and is called itself. Without `was_tried` the report's first note is why.
        `example`: the tensors of the example call; `prepare` makes those of a shape like the first.
        """
        super().__init__()
        self._between = between
        self.report, self._device = report, device
        self._why = report.notes[0] if report.notes else "nothing of it was tried"
        self._original, self._optimized = [model], dict(optimized)  # in a list: `.to()` leaves it alone
        self._monitor, self._strict = Monitor(chose_original=report.chosen == ORIGINAL), False
        self._was_not_tried = not was_tried
        self._example = _without_elements(example[0]) if example else torch.empty(0, device=device)
        self._is_copy, self._answer = is_copy, list[Callable[..., Any]]([model])
        if is_copy:
            self.reset_state()
        self._is_complete = True

    def reset_state(self) -> None:
        """Reset the state of the model to what it was when the model was optimized."""
        if not self._is_copy:
            raise InputError("your own model answers, because it cannot be copied: its state is yours")
        model = patched(self._original[0], self._optimized)
        self._answer = [self._between.serve(model) if self._between else model]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer one call, in the caller's autocast, and in inference mode if the caller is in it.

        Inference tensors can only be written in inference mode. Code that is not optimized computes in the
        caller's settings of TF32; where graphs of code between submodules serve, all is called as those were
        captured. Raises InputError if the call is traced, or a derivative is requested.
        """
        is_traced = type(kwargs) is not dict  # torch.fx traces this module itself
        if is_surrounded() or is_traced or any(isinstance(e, fx.Proxy) for e in (*args, *kwargs.values())):
            try:
                check_caller([kwargs] if is_traced else flatten_call(args, kwargs)[0])
            except InputError as error:
                self._monitor.note(Event("refusal", str(error), "a transformed tensor"))
                raise
        if self._between is None and not torch.is_grad_enabled():
            return self._answer[0](*args, **kwargs)  # there is nothing to switch, and no derivative
        with contextlib.ExitStack() as stack:
            is_inference = torch.is_inference_mode_enabled()
            if self._between is None:
                stack.enter_context(torch.no_grad())
            else:
                stack.enter_context(Settings().scope(self._device, autocast_now(self._device)))
            if is_inference:
                stack.enter_context(torch.inference_mode())
            result = self._answer[0](*args, **kwargs)
        if not torch.is_grad_enabled():
            return result
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

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Empty: no program of it is for a range of sizes."""
        return {}

    def _private_original(self) -> nn.Module:
        return self._original[0]

    def prepare(self, *calls: object) -> None:
        """Where the original answers, it is tried on the calls; parts are prepared by a call of the whole.

        Calls are those of `OptimizedModule.prepare`. A model of the user's own is not tried. Raises
        InputError where the original fails, and where parts are optimized.
        """
        if self.report.chosen != ORIGINAL:
            raise InputError(
                "prepare takes models that are one graph: call this one once with inputs of these sizes, "
                "before they are needed"
            )
        for call in calls if self._is_copy else ():
            args = call_to_prepare(call, self._example)
            check_answered(self._original[0], args, {}, self._device)

    def _deployed(self, part: str | None, what: str) -> DeployableGraph:
        if part is not None and part in self._optimized:
            return self._optimized[part]
        names = ", ".join(map(repr, self._optimized))
        if self._was_not_tried:
            raise InputError(f"{what} holds an optimized model, and nothing of this one was: {self._why}")
        if part is None:
            alone = f"{argument('part=')} writes one of its parts alone: {names}" if names else self._no_part
            raise InputError(
                f"{what} holds a model that is optimized as one graph, and this one is not: {self._why}; "
                f"{alone}"
            )
        if names and part in self.report.regions:
            raise InputError(
                f"{argument('part', part)} is code between submodules, which is no model of its own; the "
                f"submodules that can be written alone are {names}"
            )
        raise InputError(f"{argument('part', part)}: {f'choose from {names}' if names else self._no_part}")

    @property
    def _no_part(self) -> str:
        """Why no part can be written."""
        is_original = self.report.chosen == ORIGINAL and self.report.notes
        why = self.report.notes[-1] if is_original else self._why
        return (
            f"no submodule of it is optimized ({why}); one that is one graph can be optimized by itself, and "
            "then saved: ampopt.optimize(model.backbone, features)"
        )

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "an optimized module cannot be pickled, as torch.save does, or copied: its programs live in this "
            'process, and .save("robot.ampopt") takes models that are one graph. Keep the original\'s '
            "state_dict() and optimize it again where it is used, which is quicker then"
        )


def patched(original: nn.Module, optimized: Mapping[str, OptimizedModule]) -> nn.Module:
    """A copy of the model in which some submodules are optimized, in the state of the original.

    A short one for which nothing was faster stays as it was, so that the code around it can be captured with
    it: launches may be what takes its time.
    """
    model, parts = working_copy(original), list[ServedPart]()
    for name, module in optimized.items():
        before = module.report.baseline
        if module.report.chosen != ORIGINAL or (before is not None and before.median > SHORT_S):
            if module.layouts is None:
                module.layouts = {}
            parts.append(ServedPart(model.get_submodule(name), module))
    for part in parts:
        part.install()
    for part in parts:
        part.begin()
    return model


def as_it_was(
    original: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    reason: str,
    *,
    started: float,
    is_copy: bool = True,
) -> PartlyOptimizedModule:
    """A private copy with the interface of an optimized module, not optimized for the reason.

    Without `is_copy` it is the user's own model, and answers itself.
    """
    leaves = flatten_call(args, kwargs)[0]
    device = device_of(original, leaves)
    notes = [reason, "the original answers every call: nothing was tried"]
    tensors = tensors_of(leaves)
    inputs = tuple(map(describe, tensors))
    name = type(original_of(original)).__name__
    ledger = Ledger(name, environment(device), inputs, notes=notes, chosen=ORIGINAL)
    ledger.seconds = time.perf_counter() - started
    return PartlyOptimizedModule(
        original, {}, None, ledger, device, is_copy=is_copy, was_tried=False, example=tensors
    )


def _without_elements(example: Tensor) -> Tensor:
    """A dense tensor without elements, of an example's dtype and on its device; sparse rows have no such."""
    if example.layout is torch.strided:
        return example.new_empty(0)
    return torch.empty(0, dtype=example.dtype, device=example.device)
