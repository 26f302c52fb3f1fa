"""Runs a program on a CPU with an ONNX Runtime session."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ampopt.ort.session import Array, OnnxRunner

MOST_KNOWN = 8
"""Input addresses that are remembered: those of a loop's tensors take turns in few."""


class OnnxEngine:
    """A session as a function of CPU tensors; no copies: arrays and tensors share their memory."""

    def __init__(self, runner: OnnxRunner) -> None:
        self._runner = runner
        self.dtypes = tuple(torch.from_numpy(np.empty(0, info.dtype)).dtype for info in runner.outputs)

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Flat tensors in, flat tensors out."""
        arrays = self._runner(*[tensor.resolve_neg().numpy() for tensor in tensors])
        return tuple([torch.from_numpy(array) for array in arrays])

    def quick(
        self, example: Tensor, otherwise: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """The same for a model's only input, on tensors that are like `example`, see `executable.quick`.

        Whoever calls has looked. What comes before and
        after a run finds the caches full of the network and takes ten times as long as in a loop of its own
        (on two cores 0.3 ms of MobileNetV3-small's 2.5, with everything that a call looks at): hence as
        little as there can be. An input's address is remembered with an array at it that owns nothing, and
        that is used only while a tensor is there. `otherwise` takes what cannot be read in its place.
        """
        if self._runner.options.io_binding or not example.is_contiguous() or example.numel() == 0:
            return otherwise
        (info,) = self._runner.inputs
        shape, size, run = tuple(example.shape), example.nbytes, self._runner.run
        known: dict[int, dict[str, Array]] = {}

        def call(tensor: Tensor) -> tuple[Tensor, ...]:
            address = tensor.data_ptr()
            feeds = known.get(address)
            if feeds is None:
                if len(known) >= MOST_KNOWN:
                    known.clear()
                memory = memoryview((ctypes.c_byte * size).from_address(address))
                feeds = known[address] = {info.name: np.ndarray(shape, info.dtype, memory)}
            return tuple([torch.from_numpy(array) for array in run(feeds)])

        return call

    def __deepcopy__(self, memo: object) -> OnnxEngine:
        return self  # a session never changes
