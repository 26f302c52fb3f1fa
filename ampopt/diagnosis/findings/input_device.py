"""input-on-another-device: inputs that are not where the model is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.diagnosis.case import Case, trial_s
from ampopt.diagnosis.finding import Counterfactual, Finding, saved
from ampopt.ir.lanes import FP32
from ampopt.ir.signature import flatten_call, map_tensors, tensors_of


def find(case: Case) -> Iterator[Finding]:
    """Which inputs are elsewhere, and the line that fails or copies; executed: a call with them in place."""
    args, kwargs = case.given
    tensors = tensors_of(flatten_call(args, kwargs)[0])
    if not (left := left_behind(tensors, case.device)):
        return
    places = tuple(read.place for read in case.watched.reads if read.is_copy and read.place)
    failed = case.watched.failed_at
    ends = f", and the call fails: {case.watched.error}" if case.watched.error else ""
    needed_s = trial_s(case.latency["fp32"].median)
    ran = _in_place(case) if case.has_time("a call with its inputs on the device", needed_s) else None
    yield Finding(
        "input-on-another-device",
        f"{left} while the model is on {case.device}{ends}",
        places=places if failed is None else (failed,),
        advice="keep inputs on the model's device; from a camera, copy pinned memory with non_blocking=True",
        share=0.0 if ran is None else saved(ran),
        is_fault=bool(case.watched.error),
        counterfactual=ran,
    )


def left_behind(tensors: Sequence[Tensor], device: torch.device) -> str:
    """`input 0 (float32[1, 3, 8, 8], 0.8 MB) is on cpu`; empty if every tensor is on the device."""
    told = []
    for place, tensor in enumerate(tensors):
        if tensor.device != device:
            kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            told.append(f"input {place} ({kind}, {tensor.nbytes / 1e6:.3g} MB) is on {tensor.device}")
    return ", ".join(told)


def moved_along(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call whose tensors are moved to a device with the model, as far as they are where its weights are."""
    home = next((weight.device for weight in (*model.parameters(), *model.buffers())), device)
    return map_tensors(lambda tensor: tensor.to(device) if tensor.device == home else tensor, args, kwargs)


def _in_place(case: Case) -> Counterfactual:
    """A call that copies its inputs to the device first against one that has them there."""

    def copying() -> object:
        args, kwargs = map_tensors(lambda tensor: tensor.to(case.device), *case.given)
        with FP32.scope(case.device):
            return case.original(*args, **kwargs)

    return case.counterfactual("with its inputs on the device", copying, case.eager())
