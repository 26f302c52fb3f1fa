"""Runs a model on one frame: inputs in host memory, a call on the device, outputs in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampopt.ir.capture import Captured
from ampopt.ir.signature import flatten_outputs
from ampopt.measure.clocks import synchronize


def frame_call(
    model: Callable[..., Any], captured: Captured, frame: Sequence[Tensor], device: torch.device
) -> Callable[[], list[Tensor]]:
    """A function that copies the flat host tensors `frame` to the device, calls `model`, copies outputs back.

    With a GPU, host buffers on both sides are page-locked, as a camera driver's should be. The function owns
    the outputs: the next call overwrites them.
    """
    on_gpu = device.type == "cuda"
    held = [t.cpu().pin_memory() if on_gpu else t.cpu() for t in frame]
    buffers: list[Tensor] = []

    def call() -> list[Tensor]:
        remaining = iter(held)
        leaves = [
            next(remaining).to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf
            for leaf in captured.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, captured.spec)
        outputs = flatten_outputs(model(*args, **kwargs))[0]
        if not on_gpu:
            return outputs
        if not buffers:
            buffers.extend(torch.empty_like(t, device="cpu", pin_memory=True) for t in outputs)
        for buffer, output in zip(buffers, outputs, strict=True):
            buffer.copy_(output, non_blocking=True)
        synchronize(device)
        return buffers

    return call
