"""A trace of a few calls for Perfetto, with the names of the modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from ampopt.diagnosis.case import eager_call
from ampopt.diagnosis.operators import recording
from ampopt.ir.lanes import Lane
from ampopt.ir.model_copy import exact_copy
from ampopt.measure.clocks import synchronize
from ampopt.system.atomic import replacing
from ampopt.system.places import place_of

CALLS = 3
"""Calls of each lane in the trace, after one that is not in it."""


def write_trace(
    path: Path,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    lanes: Mapping[str, Lane],
) -> None:
    """Write Chrome's trace format: ranges for calls and modules, with their operators and kernels."""
    labelled = exact_copy(model)
    with _named(labelled):
        callers = {name: eager_call(labelled, args, kwargs, device, lane) for name, lane in lanes.items()}
        for call in callers.values():
            call()
        synchronize(device)
        with recording(device) as recorded:
            for name, call in callers.items():
                for _ in range(CALLS):
                    with record_function(f"call in {name}"):
                        call()
                        synchronize(device)
    with replacing(place_of(path)) as written:
        recorded.export_chrome_trace(str(written))


@contextlib.contextmanager
def _named(model: nn.Module) -> Iterator[None]:
    """In the block, every module's call is a range of the profiler with its path."""
    handles = []
    for path, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            ranges: list[Any] = []
            name = path or type(module).__name__

            def enter(*_: object, name: str = name, ranges: list[Any] = ranges) -> None:
                ranges.append(record_function(name))
                ranges[-1].__enter__()

            def leave(*_: object, ranges: list[Any] = ranges) -> None:
                ranges.pop().__exit__(None, None, None)

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
