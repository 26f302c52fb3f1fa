"""Finds the submodules of a model that can be captured, and optimizes each as a model of its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import AmpoptError, CaptureError, LackError
from ampopt.ir.aliases import Layout, layout_of
from ampopt.ir.capture import Captured, capture
from ampopt.ir.model_copy import private_copy, untouched_rng, working_copy
from ampopt.ir.settings import Settings
from ampopt.ir.signature import (
    CallKey,
    call_key,
    exactly_copied,
    flatten_call,
    flatten_outputs,
    map_tensors,
    tensors_of,
)
from ampopt.search.optimizer import Optimizer
from ampopt.search.options import Options
from ampopt.search.part_calls import Call, PartCalls, calls_of_parts
from ampopt.search.rehearsal import Sandbox
from ampopt.search.served_part import weights_of
from ampopt.search.trials import Progress
from ampopt.system.interrupts import interruptible

MOST_CALLS = 8
"""Number of different calls of a submodule, in a call of the model, for which programs are made."""


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A submodule that can be optimized, with its different calls in a call of the model."""

    name: str
    original: nn.Module
    captured: Captured
    calls: list[Call]
    layouts: Mapping[CallKey, Layout] = dataclasses.field(default_factory=dict)
    """How the results of each of them lie in memory; empty where all are contiguous, and no views."""


def _drop_hooks(module: nn.Module) -> None:
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        hooks.clear()


def find_regions(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    notes: list[str],
    is_over: Callable[[], bool],
) -> Iterator[Region]:
    """The largest submodules that can be captured, level by level; why others cannot goes to `notes`.

    One that has several names is looked at once. None is looked at any more once `is_over`.
    """
    known = set[int]()
    level = _children("", model, known)
    while level:
        if is_over():
            notes += [f"submodule {name} was not looked at: the time budget was spent" for name in level]
            return
        try:
            seen, inside = calls_of_parts(model, list(level), args, kwargs), dict[str, nn.Module]()
        except CaptureError as error:
            notes.append(f"no submodule is optimized: {error}")
            return
        for name, module in level.items():
            if is_over():
                notes.append(f"submodule {name} was not looked at: the time budget was spent")
                continue
            if name in seen:
                try:
                    yield _region(name, module, seen[name], device)
                    continue
                except LackError as error:
                    notes.append(f"submodule {name} runs as it was: {error}")
                except AmpoptError as error:
                    notes.append(f"submodule {name} is not one graph: {error}")
            inside |= _children(name, module, known)
        level = inside


def _children(prefix: str, module: nn.Module, known: set[int]) -> dict[str, nn.Module]:
    """The submodules with weights, by their full names; none of TorchScript, whose parts cannot be called.

    `known` are the identities of those that have come before.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    found = {
        f"{prefix}.{name}".removeprefix("."): child
        for name, child in module.named_children()
        if id(child) not in known and next(child.parameters(), None) is not None
    }
    known.update(map(id, found.values()))
    return found


def _region(name: str, module: nn.Module, seen: PartCalls, device: torch.device) -> Region:
    if seen.why_not is not None:
        raise CaptureError(seen.why_not)
    args, kwargs = seen.calls[0]
    original = private_copy(module)
    _drop_hooks(original)  # the submodule that calls it runs them
    captured = capture(original, args, kwargs, device, lift_state=False)
    return Region(name, original, captured, seen.calls, _layouts(original, seen.calls, device))


def _layouts(original: nn.Module, calls: list[Call], device: torch.device) -> dict[CallKey, Layout]:
    """Raises CaptureError where a program's results cannot be given as the submodule's are."""
    found = dict[CallKey, Layout]()
    for call in calls[:MOST_CALLS]:
        model, (args, kwargs) = working_copy(original), map_tensors(exactly_copied, *call)
        leaves, spec = flatten_call(args, kwargs)
        with torch.no_grad(), untouched_rng(device), Settings().scope(device):
            outputs = flatten_outputs(model(*args, **kwargs))[0]
        found[call_key(leaves, spec)] = layout_of([*tensors_of(leaves), *weights_of(model)], outputs)
    return {} if all(layout.is_plain for layout in found.values()) else found


def optimize_region(
    region: Region,
    options: Options,
    progress: Progress,
    sandbox: Sandbox,
    rival: Callable[[], object] | None = None,
    *,
    call_s: float | None = None,
) -> tuple[OptimizedModule, bool]:
    """The optimized submodule, also for its other calls, and whether Ctrl-C has ended the work on it.

    `rival` and `call_s`: see `Optimizer`.
    """
    own = region.original, region.captured
    module, was_cut_off = optimize_captured(
        *own, options, region.name, progress, sandbox, rival, call_s=call_s
    )
    module.layouts = region.layouts
    if not was_cut_off:
        with interruptible():
            for call_args, call_kwargs in region.calls[1:MOST_CALLS]:
                module.prepare_call(call_args, call_kwargs)
    return module, was_cut_off


def optimize_captured(
    original: nn.Module,
    captured: Captured,
    options: Options,
    name: str,
    progress: Progress,
    sandbox: Sandbox,
    rival: Callable[[], object] | None = None,
    *,
    is_part: bool = True,
    call_s: float | None = None,
) -> tuple[OptimizedModule, bool]:
    """Optimize a part of a model, for the captured call alone; also whether Ctrl-C has ended the work.

    `rival`, `is_part` and `call_s`: see `Optimizer`.
    """
    with interruptible():
        optimizer = Optimizer(
            original,
            captured,
            options,
            name=name,
            started=time.perf_counter(),
            progress=progress,
            sandbox=sandbox,
            max_captures=0,
            is_part=is_part,
            call_s=call_s,
            rival=rival,
        )
    return optimizer.run(), optimizer.interrupted
