"""Captures a model once more, with symbolic sizes in the place of the example's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import SymIntArgument
from torch.utils import _pytree as pytree

from ampopt.errors import CaptureError
from ampopt.ir.capture import Captured
from ampopt.ir.capturing import capturing
from ampopt.ir.export_repairs import masks_as_given
from ampopt.ir.graph import aten, calls, finish
from ampopt.ir.lane_io import original_call
from ampopt.ir.lowering import lower
from ampopt.ir.model_copy import untouched_rng, working_copy
from ampopt.ir.model_stacks import stacks_within_models
from ampopt.ir.plain_sizes import write_sizes_plainly
from ampopt.ir.settings import plain_world
from ampopt.ir.signature import flatten_call, tensors_of
from ampopt.ir.size_range import Sizes, ranges_of
from ampopt.ir.size_ranges import now, resized, with_tensors

LEAST = 2
"""Smallest size that stands for all: `torch.export` takes sizes of 0 and 1 for constants."""


def capture_symbolic(
    model: nn.Module, captured: Captured, tensors: Sequence[Tensor], dims: Sequence[Mapping[int, Any]]
) -> Captured:
    """Capture a private copy of a model on these tensors, with `torch.export`'s symbols as sizes.

    `dims`: for each tensor, the symbol of each dimension that has one. Raises CaptureError, or PyTorch's own
    error, if the model makes a symbol a constant or decides by it, and for numbers in the model's result.
    """
    leaves = with_tensors(captured.leaves, tensors)
    args, kwargs = pytree.tree_unflatten(list(leaves), captured.spec)
    model, args, kwargs = original_call(working_copy(model), args, kwargs)  # the borders stay
    shapes = torch.export.ShapesCollection()
    for tensor, named in zip(tensors_of(flatten_call(args, kwargs)[0]), dims, strict=True):
        shapes[tensor] = dict(named)
    device = captured.program.device
    with capturing(), plain_world(device), untouched_rng(device):
        specification = shapes.dynamic_shapes(model, args, kwargs)
        with stacks_within_models(), masks_as_given(model):
            exported = torch.export.export(model, args, kwargs, dynamic_shapes=specification, strict=False)
        if any(isinstance(spec.arg, SymIntArgument) for spec in exported.graph_signature.output_specs):
            raise CaptureError("its result holds a number that depends on the sizes")
        write_sizes_plainly(exported.graph_module)
        graph = lower(exported)
    for node in calls(graph, [aten._assert_scalar.default]):
        graph.graph.erase_node(node)
    program = captured.program.replace(graph=finish(graph), examples=tuple(tensors))
    return dataclasses.replace(captured, program=program, leaves=leaves)


def capture_ranges(model: nn.Module, captured: Captured, sizes: Sizes) -> Captured:
    """Capture a model for all sizes in ranges; the capture's examples have sizes of at least `LEAST`.

    Raises as `capture_symbolic`.
    """
    ranges = ranges_of(sizes)
    varying = [each for each in ranges if each.low < each.high]
    symbols = {each.name: torch.export.Dim(each.name, min=each.low, max=each.high) for each in varying}
    tensors = [t.clone() for t in standing_for_all(captured.program.examples, sizes)]
    dims = [
        {index: symbols[each.name] for index, each in named.items() if each.name in symbols}
        for named in sizes
    ]
    return capture_symbolic(model, captured, tensors, dims)


def standing_for_all(examples: Sequence[Tensor], sizes: Sizes) -> tuple[Tensor, ...]:
    """Tensors like the examples whose sizes in ranges are `LEAST` or more, where the range has that."""
    present = now(sizes, examples)
    highest = {each.name: each.high for each in ranges_of(sizes)}
    wanted = {name: max(size, min(LEAST, highest[name])) for name, size in present.items()}
    return resized(examples, sizes, wanted)


def at_sizes(captured: Captured, sizes: Sizes, wanted: Mapping[str, int]) -> Captured:
    """A capture of symbolic sizes with examples of other ones."""
    tensors = resized(captured.program.examples, sizes, wanted)
    program = captured.program.replace(examples=tensors)
    return dataclasses.replace(captured, program=program, leaves=with_tensors(captured.leaves, tensors))
