"""PyTorch settings during a call: autocast, gradients, TF32 and cuDNN's algorithm search."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ampopt.system import flags


@dataclasses.dataclass(frozen=True)
class Settings:
    """Switches of PyTorch that a program is run with; set for the call, put back after it."""

    tf32: bool = False
    """Let CUDA's matrix products and convolutions round FP32 inputs to TF32."""
    search_algorithms: bool = False
    """Let cuDNN time its algorithms for every new convolution and keep the fastest."""

    def scope(
        self, device: torch.device, autocast: torch.dtype | None = None
    ) -> contextlib.AbstractContextManager[object]:
        """Set everything for a `with` block on `device`, under autocast to a dtype; gradients are off inside.

        What is so already is left alone, because on a CPU each context takes tens of microseconds after the
        call of an engine, whose work has taken the caches. So it is to be entered at once, and once.
        """
        contexts: list[contextlib.AbstractContextManager[object]] = []  # a generic made here takes 1 µs
        if is_inference := torch.is_inference_mode_enabled():
            contexts.append(torch.inference_mode(mode=False))
        if is_inference or torch.is_grad_enabled():  # the end of inference mode brings gradients back
            contexts.append(torch.no_grad())
        if device.type == "cuda":
            contexts.append(flags.cuda_math(tf32=self.tf32, search=self.search_algorithms))
        if autocast is not None or torch.is_autocast_enabled(device.type):
            contexts.append(autocast_scope(device, autocast))
        if len(contexts) > 1:
            return _all(contexts)
        return contexts[0] if contexts else contextlib.nullcontext()


@contextlib.contextmanager
def _all(contexts: Sequence[contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def autocast_now(device: torch.device) -> torch.dtype | None:
    """The dtype of the autocast that surrounds this on `device`; None where none does."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def autocast_scope(
    device: torch.device, dtype: torch.dtype | None
) -> contextlib.AbstractContextManager[object]:
    """`torch.autocast` for `dtype` on `device`; for None, autocast off, whatever surrounds the call."""
    if dtype is None:
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)
