"""What torch.onnx's exporter decomposes: node by node where that is the same as tracing the graph anew."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from ampopt.ir.graph import arguments, aten

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""What an operator has a kernel for where PyTorch composes it of others, whichever way it is called."""


@contextlib.contextmanager
def decomposed_by_node(exported: ExportedProgram) -> Iterator[None]:
    """Let a program of what ONNX has, and of simple operators, be decomposed in place, without a trace.

    The exporter traces every graph anew, twice, with 280 operators overridden: that took half of the 1.7 s of
    MobileNetV3-small's export. Most operators come out as they went in. A graph in which another one may not,
    or with sizes that vary, is traced, and so are other programs, which another thread may export in the
    block. Enter it within `capturing`: the class is the whole process's.
    """
    traced = ExportedProgram.run_decompositions

    def run_decompositions(program: ExportedProgram, *args: Any, **options: Any) -> ExportedProgram:
        table: Any = options.get("decomp_table", args[0] if args else None)
        is_it = program is exported and table is not None and len(args) + len(options) == 1
        if not is_it or not _decompose(program, table):
            found: ExportedProgram = traced(program, *args, **options)
            return found
        return program

    ExportedProgram.run_decompositions = run_decompositions  # type: ignore[method-assign]
    try:
        yield
    finally:
        ExportedProgram.run_decompositions = traced  # type: ignore[method-assign]


def _decompose(program: ExportedProgram, table: Mapping[Any, Any]) -> bool:
    """Decompose a program in place; False, and nothing is changed, where that takes a trace."""
    if any(each.kind is not OutputKind.USER_OUTPUT for each in program.graph_signature.output_specs):
        return False
    no_values = ("output", aten._assert_tensor_metadata.default)  # the exporter leaves assertions out
    nodes = [node for node in program.graph.nodes if not {node.op, node.target}.intersection(no_values)]
    if not all(_is_fixed(node) for node in nodes):
        return False
    called = [node for node in nodes if node.op != "placeholder"]
    simple = [node for node in called if _is_simple(node, table)]
    if not all(_stays(node, table) for node in set(called).difference(simple)):
        return False
    for node in simple:
        RULES[node.target][-1](node)
    program.graph_module.recompile()
    return True


def _is_fixed(node: fx.Node) -> bool:
    """Whether a node gives tensors of sizes that do not vary."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return all(isinstance(each, Tensor) and all(type(n) is int for n in each.shape) for each in values)


def _is_simple(node: fx.Node, table: Mapping[Any, Any]) -> bool:
    """Whether a call is one that `RULES` decompose into what ONNX has."""
    may, made, _ = RULES.get(node.target, (None, None, None))
    return may is not None and made not in table and may(node)


def _stays(node: fx.Node, table: Mapping[Any, Any]) -> bool:
    """Whether a trace with a table of decompositions leaves a node as it is."""
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or target in table or target._schema.is_mutable:
        return False
    return target in _decomposable() or not target.has_kernel_for_dispatch_key(COMPOSITE)


@functools.cache
def _decomposable() -> frozenset[Any]:
    """The operators that the exporter has decompositions of; it leaves out those of what ONNX has."""
    return frozenset((*torch.export.default_decompositions().keys(), *torch._decomp.decomposition_table))


def _always(_: fx.Node) -> bool:
    return True


def _become(node: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call another operator in a node's place: its name stays, which an output may have."""
    node.target, node.args, node.kwargs = target, args, kwargs


def _insert_before(
    node: fx.Node, value: Any, target: Callable[..., Any], *args: Any, **kwargs: Any
) -> fx.Node:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, kwargs)
    made.meta.update(node.meta, val=value)
    return made


def _view(node: fx.Node) -> None:
    """Another shape of what lies in memory as it is, or of a copy."""
    source, shape = arguments(node)["self"], list(node.meta["val"].shape)
    given = source.meta["val"]
    try:
        given.view(shape)
    except (RuntimeError, ValueError):
        options = {"memory_format": torch.contiguous_format}
        source = _insert_before(node, given.contiguous(), aten.clone.default, source, **options)
    _become(node, aten.view.default, source, shape)


def _expand(node: fx.Node) -> None:
    _become(node, aten.expand.default, arguments(node)["self"], list(node.meta["val"].shape))


def _is_of_rows(node: fx.Node) -> bool:
    format_ = node.kwargs.get("memory_format", torch.contiguous_format)
    return len(node.args) == 1 and format_ is torch.contiguous_format


def _copy_rows(node: fx.Node) -> None:
    _become(node, aten.clone.default, node.args[0], memory_format=torch.contiguous_format)


def _drops_nothing(node: fx.Node) -> bool:
    return not arguments(node)["train"]


def _repeat(node: fx.Node) -> None:
    _become(node, aten.clone.default, node.all_input_nodes[0])


def _cast(node: fx.Node) -> None:
    values = arguments(node)
    if values["self"].meta["val"].dtype is values["dtype"]:
        _repeat(node)
    else:
        _become(node, aten._to_copy.default, values["self"], dtype=values["dtype"])


def _divides(node: fx.Node) -> bool:
    """Whether the windows of a pooling to sizes are all of one size."""
    given, made = (each.meta["val"].shape[-2:] for each in (node.all_input_nodes[0], node))
    return all(made) and not any(before % after for before, after in zip(given, made, strict=True))


def _pool(node: fx.Node) -> None:
    source = node.all_input_nodes[0]
    sizes = zip(source.meta["val"].shape[-2:], node.meta["val"].shape[-2:], strict=True)
    window = [before // after for before, after in sizes]
    _become(node, aten.avg_pool2d.default, source, window, window)


def _has_chunks(node: fx.Node) -> bool:
    """Whether there is anything in the dimension: of nothing there are as many chunks as are asked for."""
    values = arguments(node)
    return bool(values["self"].meta["val"].shape[values["dim"]])


def _split(node: fx.Node) -> None:
    values = arguments(node)
    size = values["self"].meta["val"].shape[values["dim"]]
    each = max(1, -(-size // values["chunks"]))
    _become(node, aten.split.Tensor, values["self"], each, values["dim"])


def _swap(node: fx.Node) -> None:
    _become(node, aten.transpose.int, *arguments(node).values())


_STATISTICS = ("input", "weight", "bias", "running_mean", "running_var")


def _has_statistics(node: fx.Node) -> bool:
    values = arguments(node)
    return not values["training"] and all(isinstance(values[name], fx.Node) for name in _STATISTICS)


def _normalize(node: fx.Node) -> None:
    """By the operator with the statistics of batches, which are empty."""
    values, result = arguments(node), node.meta["val"]
    value = (result, result.new_empty(0), result.new_empty(0))
    args = [values[name] for name in (*_STATISTICS, "momentum", "eps")]
    made = _insert_before(node, value, aten._native_batch_norm_legit_no_training.default, *args)
    _become(node, operator.getitem, made, 0)


Rule = tuple[Callable[[fx.Node], bool], Any, Callable[[fx.Node], None]]

_VIEW: Rule = (_always, aten.view.default, _view)
_SWAP: Rule = (_always, aten.transpose.int, _swap)
_REPEAT: Rule = (_drops_nothing, aten.clone.default, _repeat)

RULES: Mapping[Any, Rule] = {
    **dict.fromkeys((aten.flatten.using_ints, aten.reshape.default, aten.unflatten.int), _VIEW),
    aten.adaptive_avg_pool2d.default: (_divides, aten.avg_pool2d.default, _pool),
    **dict.fromkeys((aten.swapaxes.default, aten.swapdims.default), _SWAP),
    **dict.fromkeys((aten.dropout.default, aten.feature_dropout.default), _REPEAT),
    aten.lift_fresh_copy.default: (_always, aten.clone.default, _repeat),
    aten.expand_as.default: (_always, aten.expand.default, _expand),
    aten.to.dtype: (_always, aten._to_copy.default, _cast),
    aten.chunk.default: (_has_chunks, aten.split.Tensor, _split),
    aten.contiguous.default: (_is_of_rows, aten.clone.default, _copy_rows),
    aten.batch_norm.default: (_has_statistics, aten._native_batch_norm_legit_no_training.default, _normalize),
}
"""For simple operators that a trace decomposes: which calls are simple, what they become, and how."""
