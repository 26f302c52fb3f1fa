"""The original model that serves calls, and its state: the contents of its buffers between two calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.ir.model_copy import working_copy
from ampopt.ir.model_state import set_buffer

Run = Callable[..., tuple[Tensor, ...]]


class State:
    """Buffers that every call reads and writes, in whichever program; one call at a time.

    Its addresses never change, because a captured graph uses them. A call that fails does not change it.
    """

    def __init__(self, original: nn.Module, names: Sequence[str], initial: Sequence[Tensor]) -> None:
        """`original` is never called itself; `names` are the buffers' dotted names, `initial` what they hold
        before the first call."""
        self._original, self._serving = original, working_copy(original)
        self._names, self._lock = tuple(names), threading.RLock()
        self._initial = [tensor.detach().clone() for tensor in initial]
        self._tensors = [tensor.clone() for tensor in self._initial]

    def reset(self) -> None:
        """Reset the state to its value before the first call."""
        with self._lock:
            self._serving = working_copy(self._original)
            self._set(self._initial)

    def take(self, other: State) -> None:
        """Copy the state of another module."""
        with other._lock:
            self._serving = working_copy(other._serving)
            self._set(other._tensors)

    def _set(self, values: Sequence[Tensor]) -> None:
        with self._lock, torch.no_grad():
            for tensor, value in zip(self._tensors, values, strict=True):
                tensor.copy_(value)

    def bound(self, run: Run) -> Run:
        """A program with this state: flat tensors in, flat tensors out, both without it."""
        if not self._names:
            return run

        def step(*tensors: Tensor) -> tuple[Tensor, ...]:
            with self._lock:
                outputs = run(*tensors, *self._tensors)
                count = len(outputs) - len(self._names)
                self._set(outputs[count:])
            return outputs[:count]

        return step

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a copy of the original, from this state to the next."""
        model = self._serving
        if not self._names:
            return model(*args, **kwargs)
        with self._lock:
            for name, tensor in zip(self._names, self._tensors, strict=True):
                set_buffer(model, name, tensor.clone())
            result = model(*args, **kwargs)
            self._set([model.get_buffer(name) for name in self._names])
        return result
