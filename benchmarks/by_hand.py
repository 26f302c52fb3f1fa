"""What a user would write by hand: the contestants that ampopt is measured against.

Each takes a model in evaluation mode with its inputs and returns a function of those inputs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.optimization import fuse
from torch.utils import _pytree as pytree

Call = Callable[..., object]

Inputs = tuple[Any, ...]
"""The positional arguments of a call: tensors, or lists, tuples and dicts with tensors in them."""


def device_of(inputs: Inputs) -> torch.device:
    """The device of a call's first tensor."""
    found: torch.device = next(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)).device
    return found


def eager(model: nn.Module, _: Inputs) -> Call:
    """The model as it is, TF32 off."""
    return model


def autocast(dtype: torch.dtype) -> Callable[[nn.Module, Inputs], Call]:
    """The model under `torch.autocast`."""

    def contestant(model: nn.Module, inputs: Inputs) -> Call:
        device = device_of(inputs).type

        def call(*given: Any) -> object:
            with torch.autocast(device, dtype):
                return as_float(model(*given))

        return call

    return contestant


def cuda_graph(model: Call, inputs: Inputs, *, copied: bool = False) -> Call:
    """A plain CUDA graph around a function of such inputs: they are copied (and cast) into its own.

    Results are in buffers that the next call overwrites; with `copied`, each call's are its caller's, and in
    float32 in place of float16.
    """
    leaves, spec = pytree.tree_flatten(inputs)
    buffers = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    static = pytree.tree_unflatten(buffers, spec)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_CALLS):
            model(*static)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = model(*static)
    return _Replayed(model, buffers, graph, outputs, copied)


WARM_CALLS = 4
"""Before a capture: compilers, TorchScript's profiles and cuDNN's searches are done after so many."""


@dataclasses.dataclass(frozen=True)
class _Replayed:
    """A captured function. It keeps the model alive, because the graph reads its weights."""

    model: Call
    static: list[Any]
    graph: torch.cuda.CUDAGraph
    outputs: object
    copied: bool

    def __call__(self, *inputs: Any) -> object:
        for buffer, leaf in zip(self.static, pytree.tree_leaves(inputs), strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(leaf)
        self.graph.replay()
        return pytree.tree_map_only(Tensor, _copied_out, self.outputs) if self.copied else self.outputs


def _copied_out(output: Tensor) -> Tensor:
    return output.float() if output.dtype is torch.float16 else output.clone()


def as_float(outputs: object) -> object:
    """Outputs with float32 in the place of lower precision."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t, outputs
    )


def fold(model: nn.Module) -> nn.Module:
    """Conv–BN folding with PyTorch's own `torch.fx` example optimizer; the model itself where it cannot."""
    try:
        folded: nn.Module = fuse(fx.symbolic_trace(copy.deepcopy(model)))
    except Exception as error:
        print(f"by hand: {type(model).__name__} is not folded: {error}")
        return copy.deepcopy(model)
    return folded


def half_channels_last_fold_graph(model: nn.Module, inputs: Inputs) -> Call:
    """FP16 weights and activations, channels_last, BN folded, a plain CUDA graph, cuDNN's search on.

    It takes and gives float32; results are the caller's.
    """
    folded = fold(model).half().to(memory_format=torch.channels_last)
    entered = pytree.tree_map_only(Tensor, as_half_channels_last, inputs)
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = True
        return cuda_graph(folded, entered, copied=True)  # the graph keeps what the search found
    finally:
        torch.backends.cudnn.benchmark = before


def channels_last_fold(model: nn.Module, _: Inputs) -> Call:
    """BN folded and channels_last, in float32."""
    folded = fold(model).to(memory_format=torch.channels_last)
    return lambda *given: folded(*pytree.tree_map_only(Tensor, as_channels_last, given))


def as_channels_last(tensor: Tensor) -> Tensor:
    """An image in channels_last; other tensors as they are."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def as_half_channels_last(tensor: Tensor) -> Tensor:
    """A floating-point tensor in float16, an image in channels_last, too."""
    return as_channels_last(tensor.half() if tensor.is_floating_point() else tensor)
