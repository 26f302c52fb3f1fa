"""PyTorch settings during a call: autocast, gradients, TF32 and cuDNN's algorithm search."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ampopt.system import flags


@dataclasses.dataclass(frozen=True)
class Settings:
    """PyTorch settings of a program; set for each call and restored after it."""

    tf32: bool = False
    """Whether CUDA's matrix products and convolutions may round FP32 inputs to TF32."""
    search_algorithms: bool = False
    """Whether cuDNN times its algorithms for every new convolution and keeps the fastest."""

    def scope(
        self, device: torch.device, autocast: torch.dtype | None = None
    ) -> contextlib.AbstractContextManager[object]:
        """Apply the settings for a `with` block on `device`, under autocast to a dtype, with gradients off.

        Settings that are already in effect are skipped, because on a CPU each context takes tens of
        microseconds after an engine call has evicted the caches. Enter the returned context immediately, and
        once.
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
        return contexts[0] if contexts else _NOTHING


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _all(contexts: Sequence[contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def autocast_now(device: torch.device) -> torch.dtype | None:
    """The dtype of the active autocast on `device`; None if there is none."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def autocast_scope(
    device: torch.device, dtype: torch.dtype | None
) -> contextlib.AbstractContextManager[object]:
    """`torch.autocast` for `dtype` on `device`; for None, autocast is off, also inside an outer autocast."""
    if dtype is None:
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


@contextlib.contextmanager
def plain_world(device: torch.device) -> Iterator[None]:
    """Neither gradients nor an autocast that happens to surround the call, and flags that can be read.

    Models are exported in this one: `torch.export` reads flags that a `Settings.scope` makes unreadable.
    """
    eager = torch.inference_mode(mode=False), torch.no_grad(), autocast_scope(device, None)
    with _all([*eager, flags.older_flags_readable()]):
        yield
