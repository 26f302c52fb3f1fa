"""The Program: one ATen graph with its border, its run settings and the recipe that made it.

A program is immutable: a pass returns a new one. Graphs of several programs share weight tensors, so a
pass registers new tensors and never writes into one. The *recipe* is the list of passes that made the
program from its capture, with every measured choice written into the pass's fields; replaying it on
another capture (another input shape, or only the portable passes) gives the same rewrites again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from ampopt.system import flags

if TYPE_CHECKING:
    from ampopt.ir.transform import Pass

FlatFunction = Callable[..., Sequence[Tensor]]


@dataclasses.dataclass(frozen=True)
class Border:
    """The dtype and memory format in which one flat tensor crosses the program's border.

    Conversions at the border are not nodes of the graph, so that passes may change it without them; a CUDA
    graph holds them.
    """

    dtype: torch.dtype
    memory_format: torch.memory_format = torch.contiguous_format

    def convert(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in this dtype and format; itself where it already is."""
        if self.memory_format is torch.contiguous_format and tensor.dtype is self.dtype:
            return tensor.contiguous()
        if tensor.dim() in CHANNELS_LAST and self.memory_format is CHANNELS_LAST[tensor.dim()]:
            return tensor.to(dtype=self.dtype, memory_format=self.memory_format)
        return tensor.to(dtype=self.dtype).contiguous()


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels-last memory format for a tensor of so many dimensions."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a program wants the world around its calls; set for the call, put back after it."""

    autocast: torch.dtype | None = None
    """Run under `torch.autocast` of this dtype; None: no autocast."""
    tf32: bool = False
    """Let CUDA's matrix products and convolutions round FP32 inputs to TF32."""
    search_algorithms: bool = False
    """Let cuDNN time its algorithms for every new convolution and keep the fastest."""

    def scope(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Set everything for a `with` block on `device`; gradients are off inside.

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
        if self.autocast is not None or torch.is_autocast_enabled(device.type):
            contexts.append(autocast_scope(device, self.autocast))
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


@dataclasses.dataclass(frozen=True)
class Program:
    """A captured model and how it is to be run.

    `graph` takes the tensors of `examples` (each as its `entry` border says) and returns a flat tuple of
    tensors, which the caller sees as `exit` says. `engine` runs in the graph's place where a way to run
    (TorchScript, inductor) was applied. `lane_dtype` is the precision that the lane computes in: float32,
    or the lower dtype of an AMP lane.
    """

    graph: fx.GraphModule
    examples: tuple[Tensor, ...]
    entry: tuple[Border, ...]
    exit: tuple[Border, ...]
    device: torch.device
    lane_dtype: torch.dtype = torch.float32
    settings: Settings = Settings()
    engine: FlatFunction | None = None
    cuda_graph: bool = False
    recipe: tuple[Pass, ...] = ()

    def with_graph(self, graph: fx.GraphModule) -> Program:
        """This program with another graph; an engine built from the old graph is dropped."""
        return dataclasses.replace(self, graph=graph, engine=None)

    @property
    def function(self) -> FlatFunction:
        """What computes the outputs from entered inputs: the engine where there is one, else the graph."""
        return self.graph if self.engine is None else self.engine

    def replace(self, **changes: object) -> Program:
        """`dataclasses.replace` as a method."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run once, without a CUDA graph: flat tensors in, flat tensors out, as the caller is promised."""
        with self.settings.scope(self.device):
            entered = [border.convert(t) for border, t in zip(self.entry, tensors, strict=True)]
            outputs = self.function(*entered)
            return tuple([border.convert(t) for border, t in zip(self.exit, outputs, strict=True)])
