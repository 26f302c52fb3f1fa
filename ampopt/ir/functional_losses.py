"""What PyTorch loses when it makes a graph functional: names of one tensor, idle casts; and idle writes."""

from __future__ import annotations

from torch import Tensor, fx
from torch.export import ExportedProgram

from ampopt.ir.aliasing import never_written
from ampopt.ir.graph import arguments, aten, calls, replace

_DROPOUTS = (
    *(aten.dropout.default, aten.feature_dropout.default),
    *(aten.alpha_dropout.default, aten.feature_alpha_dropout.default),
)
"""Dropouts of an argument `train`; the inference of each returns the tensor itself."""


_IN_PLACE = (
    *(aten.dropout_.default, aten.feature_dropout_.default),
    *(aten.alpha_dropout_.default, aten.feature_alpha_dropout_.default),
)


def drop_idle_writes(module: fx.GraphModule) -> None:
    """Let what reads an in-place dropout of inference read its argument: nothing is written to that."""
    for node in calls(module, _IN_PLACE):
        if arguments(node)["train"] is False:
            replace(node, node.args[0])  # type: ignore[arg-type]


def drop_idle_dropouts(exported: ExportedProgram) -> None:
    """Let what reads a dropout of inference read its argument, which is what it returns.

    PyTorch's decompositions before 2.12 make a new tensor of it, and what is written to it in place is lost.
    """
    for node in exported.graph.nodes:
        if node.target in _DROPOUTS and arguments(node)["train"] is False:
            node.replace_all_uses_with(arguments(node)["input"], lambda user: user.op != "output")


def write_diagonals(exported: ExportedProgram) -> None:
    """Fill the diagonal of a matrix as a view of it, which PyTorch otherwise makes a read of memory."""
    for node in exported.graph.find_nodes(op="call_function", target=aten.fill_diagonal_.default):
        own, matrix = arguments(node), node.args[0].meta["val"]
        if matrix.dim() != 2 or (own["wrap"] and matrix.shape[0] > matrix.shape[1]):
            continue
        with exported.graph.inserting_before(node):
            diagonal = exported.graph.call_function(aten.diagonal.default, (own["self"],))
            filled = exported.graph.call_function(aten.fill_.Scalar, (diagonal, own["fill_value"]))
        diagonal.meta["val"] = filled.meta["val"] = matrix.diagonal()
        replace(node, own["self"])


_CASTS = (aten.to.dtype, aten.to.device, aten.to.dtype_layout)


def keep_casts(exported: ExportedProgram) -> None:
    """Hold on to casts to the dtype that a tensor has anyway, which PyTorch leaves out of functional graphs.

    Under autocast the tensor may have another dtype, and the cast work to do. As a copy it stays; what is
    written to in place has to stay one tensor under two names, and its casts go. `_restore_vocabulary` makes
    casts of the copies again.
    """
    safe = never_written(exported.graph)
    for node in exported.graph.find_nodes(op="call_function", target=aten.type_as.default):
        source, value = node.args[0], node.meta.get("val")
        before = source.meta.get("val")
        same = isinstance(value, Tensor) and isinstance(before, Tensor) and value.dtype is before.dtype
        if node not in safe and same and value.device == before.device:
            node.replace_all_uses_with(
                source
            )  # PyTorch takes it for a copy, and what is written to it is lost
    for node in exported.graph.nodes:
        if node.target not in _CASTS or node not in safe:
            continue
        own, value = arguments(node), node.meta.get("val")
        source = own["self"].meta.get("val")
        if not isinstance(value, Tensor) or not isinstance(source, Tensor):
            continue
        is_idle = (value.dtype, value.device, own["memory_format"]) == (source.dtype, source.device, None)
        if is_idle and not own["copy"] and value.is_floating_point():
            node.target, node.args, node.kwargs = (
                aten._to_copy.default,
                (own["self"],),
                {"dtype": value.dtype},
            )
