"""Optimizes the largest capturable submodules of a model that cannot be captured as one graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ampopt.deploy.health import Callback, Event, Health, Monitor
from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import AmpoptError, InputError, first_line
from ampopt.ir.capture import Captured, capture
from ampopt.ir.lane_io import original_call, original_of
from ampopt.ir.lanes import FP32, lanes_for
from ampopt.ir.model_copy import device_of, private_copy, untouched_rng, working_copy
from ampopt.ir.numerics import relative_error
from ampopt.ir.plain_tensors import check_no_derivatives, is_surrounded, without_derivatives
from ampopt.ir.settings import Settings, autocast_now
from ampopt.ir.signature import call_key, describe, flatten_call, flatten_outputs, tensors_of
from ampopt.measure.clocks import latency
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.headline import compare_fairly
from ampopt.measure.ledger import LaneSummary, Ledger
from ampopt.search.last_comparison import HEADLINE
from ampopt.search.optimizer import BRIEFLY_S, Optimizer
from ampopt.search.options import AUTO_TOLERANCE, Options
from ampopt.search.pass_manager import Progress
from ampopt.search.rehearsal import Sandbox
from ampopt.system.budget import Budget
from ampopt.system.environment import environment
from ampopt.system.interrupts import interruptible

MOST_REASONS = 8
"""Number of submodules whose reasons for not being captured are listed in a report."""

Call = tuple[tuple[Any, ...], dict[str, Any]]

_PLAIN = (Tensor, int, float, bool, str, type(None))
"""Arguments whose whole value stands in a call's key; a region that takes others is not captured."""


class PartlyOptimizedModule(nn.Module):
    """A model of which some submodules are optimized; calls, results and dtypes are the original's.

    A submodule called with shapes that it was not captured for runs its original code, or raises StrictError
    with `strict`. `report.regions` has the ledger of each optimized submodule, `report.notes` says why the
    others are not. `health` and `on_health` are those of all optimized submodules together.
    """

    def __init__(
        self, model: nn.Module, optimized: Mapping[str, OptimizedModule], report: Ledger, device: torch.device
    ) -> None:
        """`model` is a private copy, which is not called; `optimized` are its submodules' replacements."""
        super().__init__()
        self.report, self._device = report, device
        self._original, self._optimized = [model], dict(optimized)  # in a list: `.to()` leaves it alone
        self._monitor, self._strict = Monitor(chose_original=report.chosen == ORIGINAL), False
        self.reset_state()
        self.training = False

    def reset_state(self) -> None:
        """Reset the state in the model's buffers to its value when the model was optimized."""
        self._model = [_patched(self._original[0], self._optimized)]

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
            result = self._model[0](*args, **kwargs)
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


def _record_calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, list[Call]]:
    """The different calls that each submodule gets in one call of the model, by the submodule's name."""
    calls: dict[str, dict[object, Call]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            leaves, spec = flatten_call(args, kwargs)
            if all(isinstance(leaf, _PLAIN) for leaf in leaves):
                copied = torch.utils._pytree.tree_map(_copied, (args, kwargs))
                calls.setdefault(name, {}).setdefault(call_key(leaves, spec), copied)

        return hook

    model = working_copy(model)
    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):  # it takes no such hook
                handle = module.register_forward_pre_hook(note(name), with_kwargs=True)
                stack.callback(handle.remove)
        args, kwargs = torch.utils._pytree.tree_map(_copied, (args, dict(kwargs)))  # it may write to them
        with torch.no_grad(), untouched_rng(device_of(model, flatten_call(args, kwargs)[0])):
            model(*args, **kwargs)
    return {name: list(found.values()) for name, found in calls.items()}


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


@dataclasses.dataclass(frozen=True)
class _Region:
    name: str
    original: nn.Module
    captured: Captured
    calls: list[Call]


def _drop_hooks(module: nn.Module) -> None:
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        hooks.clear()


def _find_regions(
    model: nn.Module,
    calls: Mapping[str, list[Call]],
    device: torch.device,
    notes: list[str],
    is_over: Callable[[], bool],
) -> Iterator[_Region]:
    """The largest submodules that can be captured, from the top down; why others cannot goes to `notes`.

    None is looked at any more once `is_over`.
    """

    def visit(prefix: str, module: nn.Module) -> Iterator[_Region]:
        for child_name, child in module.named_children():
            name = f"{prefix}.{child_name}".removeprefix(".")
            if not any(True for _ in child.parameters()):
                continue
            if is_over():
                notes.append(f"submodule {name} was not looked at: the time budget was spent")
                continue
            if name in calls:
                args, kwargs = calls[name][0]
                try:
                    original = private_copy(child)
                    _drop_hooks(original)  # the submodule that calls it runs them
                    captured = capture(original, args, kwargs, device, lift_state=False)
                    yield _Region(name, original, captured, calls[name])
                    continue
                except AmpoptError as error:
                    notes.append(f"submodule {name} is not one graph: {error}")
            yield from visit(name, child)

    yield from visit("", model)


def optimize_regions(
    original: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    reason: str,
    *,
    started: float,
    progress: Progress,
    sandbox: Sandbox,
) -> PartlyOptimizedModule:
    """Optimize the largest capturable submodules of a private copy; `reason` says why it is not one graph.

    `original`, a private copy, is not called: copies of it are, so that the result starts with its state.

    Of several lanes the submodules use FP32, or else the first: an error inside does not show its effect on
    the rest of the model (thresholds, sorting). The whole model is then compared with the original; if it
    differs by more than the tolerance, or is not faster, the original is served.
    """
    device = device_of(original, flatten_call(args, kwargs)[0])
    inputs = tuple(describe(t) for t in tensors_of(flatten_call(args, kwargs)[0]))
    name = type(original_of(original)).__name__
    ledger = Ledger(name, environment(device), inputs, notes=[f"not one graph: {reason}"])
    lanes = lanes_for(options.precision, device, options.amp_dtype)
    if len(lanes) > 1:
        only = FP32 if FP32 in lanes else lanes[0]
        options = dataclasses.replace(options, precision=only.name)
        other = next(lane for lane in lanes if lane != only)
        ledger.notes.append(
            f"submodules were optimized in {only.name}; precision={other.name!r} asks for the other"
        )
    budget = Budget(started, options.budget_s)
    reasons, modules = list[str](), dict[str, OptimizedModule]()
    with interruptible():
        inside, own_args, own_kwargs = original_call(original, args, kwargs)
        calls = _record_calls(inside, own_args, own_kwargs)
        regions = list(_find_regions(inside, calls, device, reasons, lambda: budget.left_s <= 0))
    ledger.notes += reasons[:MOST_REASONS]
    if len(reasons) > MOST_REASONS:
        ledger.notes.append(f"{len(reasons) - MOST_REASONS} more submodules are no single graph either")
    for index, region in enumerate(regions):
        left = started + 0.9 * options.budget_s - time.perf_counter()
        if left <= 0 and index > 0:
            ledger.notes.append(
                f"{len(regions) - index} submodules run as they were: the time budget was spent"
            )
            break
        share = dataclasses.replace(options, budget_s=max(left / (len(regions) - index), 0.1))
        try:
            module, was_cut_off = _optimize_region(region, share, progress, sandbox)
        except KeyboardInterrupt:
            was_cut_off = True
        except Exception as error:
            ledger.notes.append(f"submodule {region.name} runs as it was: {_reason(error)}")
            continue
        else:
            ledger.regions[region.name] = module.report
            modules[region.name] = module
        if was_cut_off:
            ledger.notes.append("interrupted: this is the best so far")
            options = dataclasses.replace(options, budget_s=BRIEFLY_S)
            break
    if not regions:
        ledger.notes.append("no submodule can be captured: the model runs as it was")
    _compare_or_leave(original, modules, args, kwargs, options, ledger, device)
    ledger.seconds = time.perf_counter() - started
    return PartlyOptimizedModule(original, {} if ledger.chosen == ORIGINAL else modules, ledger, device)


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
    return PartlyOptimizedModule(original, {}, ledger, device)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, AmpoptError) else first_line(error)


def _optimize_region(
    region: _Region, options: Options, progress: Progress, sandbox: Sandbox
) -> tuple[OptimizedModule, bool]:
    """The optimized submodule, and whether Ctrl-C has ended the work on it."""
    with interruptible():
        optimizer = Optimizer(
            region.original,
            region.captured,
            options,
            name=region.name,
            started=time.perf_counter(),
            progress=progress,
            sandbox=sandbox,
            max_captures=0,
        )
    module = optimizer.run()
    if not optimizer.interrupted:
        with interruptible():
            for call_args, call_kwargs in region.calls[1:8]:
                module.prepare_call(call_args, call_kwargs)
    return module, optimizer.interrupted


def _patched(original: nn.Module, optimized: Mapping[str, OptimizedModule]) -> nn.Module:
    """A copy of the model in which some submodules are optimized, in the state of the original."""
    model = working_copy(original)
    for name, module in optimized.items():
        model.get_submodule(name).forward = module.__call__
    return model


def _compare_or_leave(
    original: nn.Module,
    modules: Mapping[str, OptimizedModule],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    ledger: Ledger,
    device: torch.device,
) -> None:
    """`_compare_whole`; where it fails or is interrupted, the original is chosen, and a note says why."""
    try:
        with interruptible():
            patched = _patched(original, modules)
            _compare_whole(original, patched, args, kwargs, options, ledger, device)
    except KeyboardInterrupt:
        reason = "the last comparison was interrupted"
    except Exception as error:
        reason = f"the last comparison failed: {first_line(error)}"
    else:
        return
    ledger.lanes.clear()
    ledger.chosen = ORIGINAL
    ledger.notes.append(f"the original runs: {reason}")


def _compare_whole(
    original: nn.Module,
    patched: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    ledger: Ledger,
    device: torch.device,
) -> None:
    """Compare and time the whole model; `ledger.chosen` becomes the lane, or `ORIGINAL`."""

    def call(model: nn.Module) -> list[Tensor]:
        with Settings().scope(device), untouched_rng(device):
            return flatten_outputs(model(*args, **kwargs))[0]

    (only,) = lanes_for(options.precision, device, options.amp_dtype)
    original = working_copy(original)
    before, after = call(original), call(patched)
    inside, own_args, own_kwargs = original_call(original, args, kwargs)
    error = (
        max(map(relative_error, after, before), default=0.0) if len(before) == len(after) else float("inf")
    )

    def serve() -> object:
        with Settings().scope(device):
            return patched(*args, **kwargs)

    with torch.no_grad(), untouched_rng(device):
        found = compare_fairly(
            latency(lambda: inside(*own_args, **own_kwargs), device),
            latency(serve, device),
            seconds=HEADLINE * options.budget_s,
        )
    limit = AUTO_TOLERANCE if options.tolerance is None else options.tolerance
    refused = None if error <= limit else f"the whole model's error {error:.2g} is over {limit:g}"
    if not ledger.regions:
        refused = "nothing was optimized"
    ledger.baseline, ledger.gain, ledger.load = found.before, found.gain, found.load
    ledger.lanes[only.name] = LaneSummary(
        only.name, "mixed" if only.is_mixed else "float32", found.before, None, found.after, error,
        tuple(ledger.regions), refused=refused, gain=found.gain,
    )  # fmt: skip
    ledger.chosen = only.name if found.gain.is_real and not refused else ORIGINAL
    if ledger.chosen == ORIGINAL:
        ledger.notes.append(f"the original runs: {refused or 'it is not faster'}")
