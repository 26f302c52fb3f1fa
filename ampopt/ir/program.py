"""The Program: an ATen graph with the dtypes and formats at its border, its run settings and its recipe.

A program is immutable: a pass returns a new one. Graphs of several programs share weight tensors, so a
pass registers new tensors and never writes into one. The *recipe* is the list of passes that made the
program from its capture, with every measured choice written into the pass's fields; replaying it on
another capture (another input shape, or only the portable passes) gives the same rewrites again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.settings import Settings

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
class Program:
    """A captured model and how it is to be run.

    `graph` takes the tensors of `examples` (each as its `entry` border says) and returns a flat tuple of
    tensors, which the caller sees as `exit` says. `engine` runs in the graph's place where a way to run
    (TorchScript, inductor) was applied. `under_autocast`: the lane's casts are made by autocast in every
    call, as eager's are; False: the graph computes as it stands.
    """

    graph: fx.GraphModule
    examples: tuple[Tensor, ...]
    entry: tuple[Border, ...]
    exit: tuple[Border, ...]
    device: torch.device
    lane: Lane = FP32
    under_autocast: bool = False
    settings: Settings = dataclasses.field(default_factory=Settings)
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

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """The world that the program is run in, for a `with` block; see `Settings.scope`."""
        return self.settings.scope(self.device, self.lane.autocast if self.under_autocast else None)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run once, without a CUDA graph: flat tensors in, flat tensors out, as the caller is promised."""
        with self.scope():
            entered = [border.convert(t) for border, t in zip(self.entry, tensors, strict=True)]
            outputs = self.function(*entered)
            return tuple([border.convert(t) for border, t in zip(self.exit, outputs, strict=True)])
