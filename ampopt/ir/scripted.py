"""Modules of TorchScript, as a whole model and inside of one: in the forms that `torch.export` captures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ampopt.errors import CaptureError
from ampopt.ir.graph import aten, calls
from ampopt.ir.obstacles import ScriptBranchError, branch_by_values


def export_script(
    script: torch.jit.ScriptModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.export.ExportedProgram:
    """The export of a whole scripted model, which `torch.export` itself refuses.

    Raises CaptureError for code in oneDNN's own tensors, and ScriptBranchError where values decide its path:
    the converter makes `torch.cond` of such a branch, leaves the other one out, or fails.
    """
    from torch._export.converter import TS2EPConverter

    if any(kind.startswith(_OF_ONEDNN) for kind in _kinds(script.inlined_graph)):  # it would end the process
        raise CaptureError(
            "its TorchScript code has oneDNN's own tensors, as torch.jit.optimize_for_inference makes them: "
            "give the model as it was before that"
        )
    try:
        exported = TS2EPConverter(script, args, kwargs).convert()
    except Exception as error:
        if (place := branch_by_values(script)) is not None:
            raise ScriptBranchError(place) from error
        raise
    reading = (aten.item.default, aten._local_scalar_dense.default, torch.ops.higher_order.cond)
    if any(calls(exported.graph_module, reading)) and (place := branch_by_values(script)) is not None:
        raise ScriptBranchError(place)
    return exported


_OF_ONEDNN = ("prim::ConstantMKLDNNTensor", "prim::mkldnn_", "mkldnn", "aten::to_mkldnn")
"""How kinds of nodes begin that make or take oneDNN's own tensors."""


def _kinds(graph: Any) -> Iterator[str]:
    """The kinds of the nodes of TorchScript code, also of those inside its branches and loops."""
    for node in graph.nodes():
        yield node.kind()
        for block in node.blocks():
            yield from _kinds(block)


def scripted_submodules(model: nn.Module) -> dict[str, torch.jit.ScriptModule]:
    """The outermost modules of TorchScript inside of a model, by their names."""
    found: dict[str, torch.jit.ScriptModule] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not is_inside and isinstance(module, torch.jit.ScriptModule):
            found[name] = module
    return found


def with_frozen_scripts(model: nn.Module) -> nn.Module:
    """Freeze the scripted submodules of a working copy, in place: their weights become constants.

    `torch.export` takes a scripted module's code, but not its parameters, which are no `nn.Parameter`. The
    arithmetic stays as it is. A submodule that cannot be frozen stays as it was.
    """
    for name, module in scripted_submodules(model).items():
        try:
            frozen = torch.jit.freeze(module.eval(), optimize_numerics=False)
        except RuntimeError:  # it is frozen already, or has no `forward`
            continue
        parent, _, own = name.rpartition(".")
        model.get_submodule(parent)._modules[own] = frozen
    return model
