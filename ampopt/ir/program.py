"""The Program: an ATen graph with the dtypes and formats at its border, its run settings and its recipe.

A program is immutable: a pass returns a new one. Graphs of several programs share weight tensors, so a
pass registers new tensors and never writes into one. The *recipe* is the list of passes that made the
program from its capture, with every measured choice written into the pass's fields; replaying it on
another capture (another input shape, or only the portable passes) gives the same rewrites again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.own_autocast import as_under_autocast
from ampopt.ir.settings import Settings
from ampopt.ir.size_range import Sizes
from ampopt.system import flags

if TYPE_CHECKING:
    from ampopt.ir.transform import Pass

FlatFunction = Callable[..., Sequence[Tensor]]


@dataclasses.dataclass(frozen=True)
class Border:
    """The dtype and memory format of one flat tensor at the program's border.

    Conversions at the border are not nodes of the graph, so passes may change the border alone; a CUDA graph
    includes them.
    """

    dtype: torch.dtype
    memory_format: torch.memory_format = torch.contiguous_format

    def convert(self, tensor: Tensor) -> Tensor:
        """Convert `tensor` to this dtype and format; returns it unchanged if it already has them.

        What is negated or conjugated by a bit alone is written out: an engine reads memory. Volumes of one
        channel with the strides of channels_last_3d are contiguous, too, and get plain strides: with those,
        bfloat16 convolutions of PyTorch 2.14 on a CPU read memory that nothing has written.
        """
        if tensor.is_neg() or tensor.is_conj():  # to ask takes half as long
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor.dim() == 5 and tensor.shape[1] == 1 and tensor.stride(1) == 1 and tensor.is_contiguous():
            tensor = tensor.flatten().view(tensor.shape)
        if self.memory_format is torch.contiguous_format and tensor.dtype is self.dtype:
            return tensor.contiguous()
        if tensor.dim() in CHANNELS_LAST and self.memory_format is CHANNELS_LAST[tensor.dim()]:
            return tensor.to(dtype=self.dtype, memory_format=self.memory_format)
        return tensor.to(dtype=self.dtype).contiguous()


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels-last memory format for each number of dimensions."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A captured model, with its engine and run settings.

    `graph` takes the tensors of `examples`, converted by the `entry` borders, and returns a flat tuple of
    tensors, converted by `exit` for the caller. `engine` (TorchScript, inductor), if set, runs instead of the
    graph. `under_autocast`: autocast makes the lane's casts in every call, as in eager; False: the graph
    contains all casts.
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
    sizes: Sizes = ()
    """Which sizes of its inputs may vary; none: the graph holds for those of `examples` alone."""
    recipe: tuple[Pass, ...] = ()

    def with_graph(self, graph: fx.GraphModule) -> Program:
        """This program with another graph; an engine built from the old graph is removed."""
        return dataclasses.replace(self, graph=graph, engine=None)

    @functools.cached_property
    def function(self) -> FlatFunction:
        """The function from converted inputs to outputs: the engine if there is one, else the graph.

        Under autocast, the graph's calls for which the model switches it off run without.
        """
        if self.engine is not None:
            return self.engine
        return as_under_autocast(self.graph, self.device) if self.under_autocast else self.graph

    def replace(self, **changes: object) -> Program:
        """`dataclasses.replace` as a method."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """The settings of the program as a context manager; see `Settings.scope`."""
        if self.settings.search_algorithms:
            flags.searched.dtypes.add(self.lane.dtype)
        return self.settings.scope(self.device, self.lane.autocast if self.under_autocast else None)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run once, without a CUDA graph: flat tensors in and out, with the caller's dtypes and formats."""
        with self.scope():
            entered = [border.convert(t) for border, t in zip(self.entry, tensors, strict=True)]
            outputs = self.function(*entered)
            return tuple([border.convert(t) for border, t in zip(self.exit, outputs, strict=True)])
