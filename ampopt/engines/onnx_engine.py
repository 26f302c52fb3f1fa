"""Runs a program on a CPU with an ONNX Runtime session."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ampopt.ir.choices import Choice, SeenChoices
from ampopt.ir.unmarked import array_of
from ampopt.ort.session import Array, OnnxRunner

MOST_KNOWN = 8
"""Largest number of input addresses that are stored: the tensors of a loop use few."""


TellsChoices = Callable[[Sequence[Tensor]], list[Choice]]


class OnnxEngine:
    """A session as a function of CPU tensors, without copies: arrays and tensors share their memory."""

    def __init__(self, runner: OnnxRunner, choices: TellsChoices | None = None) -> None:
        """`choices` tells who watches a call what the session chooses for inputs."""
        self._runner, self._choices = runner, choices
        self.dtypes = tuple(torch.from_numpy(np.empty(0, info.dtype)).dtype for info in runner.outputs)

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Flat tensors in, which a program's entry has made contiguous, flat tensors out."""
        if self._choices is not None and (watching := SeenChoices.watching()) is not None:
            watching.add(functools.partial(self._choices, tensors))
        arrays = self._runner(*[array_of(tensor) for tensor in tensors])
        return tuple([torch.from_numpy(array) for array in arrays])

    def telling(self, choices: TellsChoices) -> OnnxEngine:
        """The same engine, whose choices are told so."""
        return OnnxEngine(self._runner, choices)

    def quick(
        self, example: Tensor, otherwise: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """A fast path for a model's only input, for tensors that are like `example`, see `executable.quick`.

        The caller has checked the tensor. After a run the CPU caches hold the network's data, so that the
        code before and after it takes ten times as long as in its own loop (on two cores 0.3 ms of
        MobileNetV3-small's 2.5 ms, including all checks of a call): hence this path does as little as
        possible. An input's address is stored with an array at this address that owns no memory, and that is
        used only while a tensor is there. `otherwise` handles tensors that cannot be read in place.
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
