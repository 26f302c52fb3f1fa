"""Runs a program on a CPU with a model that OpenVINO compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampopt.engines.onnx_engine import MOST_KNOWN
from ampopt.engines.onnx_program import place_of_input
from ampopt.ir.unmarked import array_of
from ampopt.ort.openvino_session import OpenVinoRunner


class OpenVinoEngine:
    """A compiled model as a function of CPU tensors, whose memory it reads and returns without copies.

    Its inputs are those of `plain_model`, but for those that nothing reads: OpenVINO drops them.
    """

    def __init__(self, runner: OpenVinoRunner) -> None:
        self._runner = runner
        self._read = [place_of_input(info.name) for info in runner.inputs]
        self.dtypes = tuple(torch.from_numpy(np.empty(0, info.dtype)).dtype for info in runner.outputs)

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Flat tensors in, which a program's entry has made contiguous, flat tensors out."""
        arrays = self._runner(*[array_of(tensors[place]) for place in self._read])
        return tuple([torch.from_numpy(array) for array in arrays])

    def quick(
        self, example: Tensor, otherwise: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """A fast path for a model's only input, for tensors that are like `example`, see `executable.quick`.

        An input's address is stored with OpenVINO's tensor at this address, as `OnnxEngine.quick` does it.
        """
        if not example.is_contiguous() or example.numel() == 0 or not self._read:
            return otherwise
        (info,) = self._runner.inputs
        shape, size, bound, run = tuple(example.shape), example.nbytes, self._runner.bound, self._runner.run
        known: dict[int, list[Any]] = {}

        def call(tensor: Tensor) -> tuple[Tensor, ...]:
            address = tensor.data_ptr()
            entered = known.get(address)
            if entered is None:
                if len(known) >= MOST_KNOWN:
                    known.clear()
                memory = memoryview((ctypes.c_byte * size).from_address(address))
                entered = known[address] = [bound(np.ndarray(shape, info.dtype, memory))]
            return tuple([torch.from_numpy(array) for array in run(entered)])

        return call

    def __deepcopy__(self, memo: object) -> OpenVinoEngine:
        return self  # a compiled model never changes
