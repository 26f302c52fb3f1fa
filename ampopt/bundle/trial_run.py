"""Runs a graph on tensors without memory, to check each call's operator schema, shapes and result size."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ampopt.bundle.size_operators import computed_size, size_operator_name
from ampopt.bundle.stored_values import refuse
from ampopt.bundle.stored_weights import StoredWeight
from ampopt.ir.graph import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from ampopt.ir.program import Border
from ampopt.system.quiet import quiet

_CONVOLUTIONS = {*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS}

LARGEST_RESULT = 2**36
"""Largest number of elements of one result, views at full size: more than any accelerator can hold."""


def try_out(
    graph: fx.Graph,
    weights: Mapping[str, StoredWeight],
    inputs: Iterable[tuple[Border, Tensor]],
    world: contextlib.AbstractContextManager[object],
    file: str,
) -> None:
    """Run the graph in a program's `world` with stand-ins for weights and inputs.

    The stand-ins have a shape, dtype, strides and a device, but no memory.

    Raises BundleError naming `file` and the first node whose call does not fit the schema of its operator
    or the shapes of its arguments, or whose result is too large or no tensor.
    """
    results: dict[fx.Node, Any] = {}
    with FakeTensorMode(), world, quiet():
        waiting = iter([border.convert(_without_memory(tensor)) for border, tensor in inputs])
        for node in graph.nodes:
            if node.op == "placeholder":
                results[node] = next(waiting)
            elif node.op == "get_attr":
                results[node] = weights[str(node.target)].without_memory()
            elif size_operator_name(node.target) is not None:
                results[node] = _number(node, results, f"{file}, node {node.name!r}")
            elif node.op == "call_function":
                results[node] = _call(node, results, f"{file}, node {node.name!r}")
        for node in graph.output_node().all_input_nodes:
            if not isinstance(results[node], Tensor):
                refuse(f"{file}, node {node.name!r}", "an output is not a tensor")


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _number(node: fx.Node, results: Mapping[fx.Node, Any], where: str) -> int | float:
    args = fx.map_arg(node.args, lambda source: results[source])
    try:
        return computed_size(node.target, args)  # type: ignore[arg-type]
    except Exception as error:  # a division by zero, or a dimension that is not there
        refuse(where, f"it cannot be computed ({str(error)[:300]})", error)


def _call(node: fx.Node, results: Mapping[fx.Node, Any], where: str) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: results[source])
    if node.target is operator.getitem:
        _check_item(args, kwargs, where)
    if node.target in _CONVOLUTIONS:
        _check_weight(args, kwargs, where)
    try:
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:  # operators raise what they like
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        refuse(where, f"it cannot be called like this ({reason[:300]})", error)
    for part in result if isinstance(result, (list, tuple)) else (result,):
        if not isinstance(part, Tensor):
            refuse(where, f"it gives a {type(part).__name__} instead of tensors")
        if part.numel() > LARGEST_RESULT:
            refuse(where, f"its result {list(part.shape)} has more than {LARGEST_RESULT} elements")
    return result


def _check_weight(args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """A convolution of floating-point numbers has a weight of such: PyTorch 2.10 tells only with memory."""
    given = [*args, *(kwargs[name] for name in ("input", "weight") if name in kwargs)][:2]
    if len({part.is_floating_point() for part in given if isinstance(part, Tensor)}) > 1:
        dtypes = " and ".join(str(part.dtype) for part in given)
        refuse(where, f"it cannot be called like this (input and weight of {dtypes})")


def _check_item(args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """`getitem` takes one result of several by its number; on a tensor it would take anything."""
    fits = len(args) == 2 and not kwargs and isinstance(args[0], (list, tuple)) and type(args[1]) is int
    if not fits:
        refuse(where, "getitem takes a list of tensors and an integer")
