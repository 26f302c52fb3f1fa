"""Lowers an exported program to a flat, functional ATen graph that has its weights.

They are those of the exported model, which is a private copy: nothing writes to its parameters.
`ExportedProgram.module()` is no substitute: its buffers alias the model's, and calls write to those. An
in-place operator is replaced by its functional form only if the overwritten tensor provably has no alias;
otherwise PyTorch functionalizes the whole graph, which is then converted back to the operators that passes
match.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument

from ampopt.errors import CaptureError, first_line
from ampopt.ir.aliasing import is_returned, overlapping_write, sharing, write_between_gaps
from ampopt.ir.fake_values import result_of
from ampopt.ir.functional_losses import (
    drop_idle_dropouts,
    drop_idle_writes,
    keep_casts,
    write_diagonals,
)
from ampopt.ir.graph import (
    arguments,
    aten,
    calls,
    draws_random_numbers,
    finish,
    insert_call,
    is_constant,
    makes_fresh_tensor,
    own_outputs,
    replace,
    where,
)
from ampopt.ir.masked_updates import write_out_masked_updates
from ampopt.ir.norm_statistics import check_statistics, write_out_statistics
from ampopt.ir.origin import carry_on, note_borders, note_exported
from ampopt.ir.own_autocast import FULL_PRECISION
from ampopt.ir.own_dtypes import widen_own
from ampopt.ir.own_limits import widen_limits
from ampopt.ir.selected_places import write_out_selected_places
from ampopt.ir.strided_reads import fix_layouts
from ampopt.ir.weight_norms import write_out_weight_norms
from ampopt.system.interrupts import check_interrupted

logger = logging.getLogger("ampopt")

_hop = torch.ops.higher_order

_BLOCKS: dict[Any, tuple[int, int]] = {
    _hop.wrap_with_autocast: (4, 5),
    _hop.wrap_with_set_grad_enabled: (1, 2),
    _hop.invoke_subgraph: (0, 2),
}
"""The places of a block among the arguments of what calls it, and of its first operand."""

_ANY_LAYOUT: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten.view_as.default: aten.reshape_as.default,
}
"""Operators that refuse some memory formats, and the same functions that take them all."""

_PADDED: dict[Any, Any] = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}
"""Convolutions whose padding is a word, and those where it is numbers."""


def _write_out_padding(module: fx.GraphModule, node: fx.Node) -> None:
    """Turn "valid" and "same" into numbers: 0, and dilation · (kernel - 1) / 2 where that is whole."""
    own = arguments(node)
    if not is_constant(own["weight"]):
        return
    kernel = getattr(module, str(own["weight"].target)).shape[2:]
    dilation = list(own["dilation"]) * (len(kernel) if len(own["dilation"]) == 1 else 1)
    total = [0 if own["padding"] == "valid" else d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if any(amount % 2 for amount in total):
        return  # one side gets more than the other, which no number says
    padding = [amount // 2 for amount in total]
    node.target = _PADDED[node.target]
    node.args = (own["input"], own["weight"], own["bias"], own["stride"], padding, dilation, own["groups"])
    node.kwargs = {}


def _functional_form(node: fx.Node) -> torch._ops.OpOverload | None:
    """The operator that computes what an in-place one does, into a new tensor."""
    overload = node.target
    assert isinstance(overload, torch._ops.OpOverload)
    name = overload._schema.name.split("::")[1]
    if overload.namespace != "aten" or not name.endswith("_") or name.startswith("_"):
        return None
    packet = getattr(aten, name[:-1], None)
    return getattr(packet, overload._overloadname, None) if packet is not None else None


def _is_mutable(node: fx.Node) -> bool:
    overload = node.target
    return isinstance(overload, torch._ops.OpOverload) and overload._schema.is_mutable


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _keeps_dtype(node: fx.Node, functional: torch._ops.OpOverload) -> bool:
    """Whether the functional form of a call gives the dtype of the tensor that the call overwrites.

    A comparison gives booleans, and an argument of another dtype promotes. The operator is asked, with
    tensors that have no numbers; one that does not answer does not.
    """
    overwritten = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    if not isinstance(overwritten, FakeTensor):
        return False
    try:
        result = result_of(overwritten.fake_mode, functional, node)
    except Exception as error:
        check_interrupted(error)
        logger.debug("ampopt: PyTorch itself makes %s functional: %s", node, first_line(error))
        return False
    return isinstance(result, Tensor) and result.dtype is overwritten.dtype


def _rename_in_place(module: fx.GraphModule) -> bool:
    """Give every in-place operator its functional form; False (graph half-done) where one may be aliased."""
    order = {node: index for index, node in enumerate(module.graph.nodes)}
    for node in calls(module):
        if not _is_mutable(node):
            continue
        functional, overwritten = _functional_form(node), node.args[0]
        if functional is None or not isinstance(overwritten, fx.Node) or not _keeps_dtype(node, functional):
            return False
        others = [user for user in overwritten.users if user is not node]
        aliased = any(order[user] > order[node] or not makes_fresh_tensor(user) for user in others)
        if aliased or not makes_fresh_tensor(overwritten):
            return False
        node.target = functional
    return True


def _lift_weights(exported: ExportedProgram, states: Sequence[str] = ()) -> fx.GraphModule:
    """The exported graph with weights as attributes, flat inputs and a flat tuple of tensors.

    Parameters are shared with the exported model where they are plain tensors; all others are cloned. The
    last inputs have the names in `states`.
    """
    graph, root = fx.Graph(), torch.nn.Module()
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    shared: dict[str, str] = {}
    mapping: dict[fx.Node, Any] = {}
    inputs = [spec.arg.name for spec in exported.graph_signature.input_specs if _is_tensor_input(spec)]
    own = inputs[: len(inputs) - len(states)]
    names = dict(
        zip(inputs, [*own, *(name if name not in own else f"{name}_" for name in states)], strict=True)
    )
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind is InputKind.USER_INPUT:
                if node.name in names:
                    mapping[node] = graph.placeholder(names[node.name])
                    mapping[node].meta["val"] = node.meta["val"]
                continue  # other arguments are constants of the graph: the call's key holds their values
            value = _weight(exported, spec)
            name = shared.setdefault(str(spec.target), node.name)
            if not hasattr(root, name):
                is_shared = spec.kind is InputKind.PARAMETER and _is_plain(value)
                root.register_buffer(name, value.detach() if is_shared else value.detach().clone())
            mapping[node] = graph.get_attr(name)
            mapping[node].meta["val"] = value
            continue
        if node.op == "output":
            graph.output(tuple(mapping[arg] for arg in node.args[0] if isinstance(arg, fx.Node)))
        else:
            _copy_into(graph, node, mapping, full_precision=False)
    return fx.GraphModule(root, graph)


def _is_tensor_input(spec: InputSpec) -> bool:
    return spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)


def _is_plain(weight: Tensor) -> bool:
    """Whether a tensor is all of its memory, and each element in one place, as nothing expanded or cut is."""
    formats = torch.contiguous_format, torch.channels_last, torch.channels_last_3d
    fitting = [f for f in formats if f is torch.contiguous_format or weight.dim() == 4 + (f is formats[2])]
    is_dense = any(weight.is_contiguous(memory_format=f) for f in fitting)
    return is_dense and weight.untyped_storage().nbytes() == weight.nbytes


def _copy_into(graph: fx.Graph, node: fx.Node, mapping: dict[fx.Node, Any], *, full_precision: bool) -> None:
    """Copy a call; a block under the model's own `torch.autocast` is copied call by call in its place.

    Where that block switches autocast off, its calls are marked for `bake-autocast`. A block in which
    gradients are on or off is copied in its place, too: that changes no value. So is a region that the model
    has compiled once for several calls (`torch.compiler.nested_compile_region`): passes look into it there.
    """
    if node.target is aten._assert_tensor_metadata.default:
        return  # it would forbid every later change of dtype
    if node.op == "get_attr" and isinstance(block := _block(node), fx.GraphModule):
        mapping[node] = block
    elif node.target in _BLOCKS:
        place, first = _BLOCKS[node.target]
        block, operands = node.args[place], node.args[first:]
        is_autocast = node.target is _hop.wrap_with_autocast
        full = not node.args[2] if is_autocast else full_precision
        inside = mapping[block].graph  # type: ignore[index]
        names = inside.find_nodes(op="placeholder")
        inner = dict(zip(names, (mapping[o] for o in operands), strict=True))  # type: ignore[index]
        for own in inside.nodes:
            if own.op == "output":
                mapping[node] = [inner[result] for result in own.args[0]]
            elif own.op != "placeholder":
                _copy_into(graph, own, inner, full_precision=full)
    elif node.target is operator.getitem and isinstance(results := mapping[node.all_input_nodes[0]], list):
        mapping[node] = results[node.args[1]]  # type: ignore[index]
    elif node.op == "call_function":
        new = graph.node_copy(node, lambda old: mapping[old])
        new.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
        carry_on(new, node)
        if full_precision:
            new.meta[FULL_PRECISION] = True
        mapping[node] = new
    else:
        raise CaptureError(f"the graph holds a {node.op} node, which ampopt does not know: {where(node)}")


def _block(node: fx.Node) -> object:
    """What a get_attr node reads."""
    owner = node.graph.owning_module
    return getattr(owner, str(node.target), None) if owner is not None else None


def _weight(exported: ExportedProgram, spec: Any) -> Tensor:
    for store in (exported.state_dict, exported.constants):
        if spec.target in store and isinstance(store[spec.target], Tensor):
            return store[spec.target]  # type: ignore[no-any-return]
    raise CaptureError(f"the model holds {spec.target}, which is not a tensor; ampopt cannot carry it")


def _check_writes(exported: ExportedProgram) -> None:
    """Raise CaptureError where the functional graph writes to an input or a buffer."""
    for spec in exported.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            raise CaptureError(f"the model changes its input {spec.target} when it is called")
        if spec.kind is OutputKind.BUFFER_MUTATION:
            raise CaptureError(f"the model changes its buffer {spec.target}, in which calls show no state")


def _drop_copies_of_state(module: fx.GraphModule, count: int) -> None:
    """Let what reads a copy of the state, the last inputs, read the state: nothing writes to it any more."""
    inputs = module.graph.find_nodes(op="placeholder")
    for state in inputs[len(inputs) - count :]:
        for node in [user for user in state.users if user.target is aten.clone.default]:
            node.replace_all_uses_with(state)
            module.graph.erase_node(node)


def _restore_vocabulary(module: fx.GraphModule) -> None:
    """Bring decomposed operators back to the whole ones that passes match.

    `_native_batch_norm_legit_no_training` returns (normalized, empty, empty): its first result is
    `batch_norm` with running statistics. That of `_native_batch_norm_legit.no_stats` is `batch_norm` by the
    input's own. `convolution` is `convNd`, or `conv_transposeNd` where it says so.
    `_to_copy` to the dtype that a tensor has is a cast; one that the caller gets may be a copy for him.
    """
    for node in calls(module, [aten._to_copy.default]):
        source = node.args[0]
        is_idle = isinstance(source, fx.Node) and node.kwargs == {"dtype": _dtype(source)}
        if is_idle and not is_returned(sharing(node, makes_fresh_tensor)):
            node.target, node.args, node.kwargs = aten.to.dtype, (source, node.kwargs["dtype"]), {}
    for node in calls(module, [aten._native_batch_norm_legit_no_training.default]):
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1] == 0:
                x, weight, bias, mean, variance, momentum, eps = node.args
                norm = (x, weight, bias, mean, variance, False, momentum, eps, True)
                replace(user, insert_call(module, user, aten.batch_norm.default, *norm))
    for node in calls(module, [aten._native_batch_norm_legit.no_stats]):
        if all(user.args[1] == 0 for user in node.users):
            given, options = node.args[:3], node.args[3:]
            own = insert_call(module, node, aten.batch_norm.default, *given, None, None, *options, True)
            for user in list(node.users):
                replace(user, own)
    plain = {3: aten.conv1d.default, 4: aten.conv2d.default, 5: aten.conv3d.default}
    transposed = {
        3: aten.conv_transpose1d.default,
        4: aten.conv_transpose2d.input,
        5: aten.conv_transpose3d.input,
    }
    for node in calls(module, [aten.convolution.default]):
        x, weight, bias, stride, padding, dilation, is_transposed, extra, groups = node.args
        if not isinstance(weight, fx.Node) or weight.op != "get_attr":
            continue
        rank = getattr(module, str(weight.target)).dim()
        if is_transposed:
            new = (x, weight, bias, stride, padding, extra, groups, dilation)
            replace(node, insert_call(module, node, transposed[rank], *new))
        else:
            new = (x, weight, bias, stride, padding, dilation, groups, None)
            replace(node, insert_call(module, node, plain[rank], *new[:7]))


def lower(exported: ExportedProgram, states: Sequence[str] = ()) -> fx.GraphModule:
    """The exported program as a functional `fx.GraphModule`: flat tensors in, a flat tuple of tensors out.

    `states` are names for the last inputs, the model's state. Raises CaptureError if the model writes to its
    inputs or buffers, holds an object that is not a tensor, draws random numbers, or cannot be functionalized
    by PyTorch (with PyTorch's reason).
    """
    try:
        return _lower(exported, states)
    except CaptureError:
        raise
    except Exception as error:
        writes = [where(node) for node in exported.graph.nodes if _is_mutable(node)]
        place = f" (it writes in place, first by {writes[0]})" if writes else ""
        raise CaptureError(f"its graph cannot be lowered{place}: {first_line(error)}") from error


def _lower(exported: ExportedProgram, states: Sequence[str]) -> fx.GraphModule:
    note_exported(exported.graph_module)
    write_out_masked_updates(exported)
    write_out_statistics(exported)
    module = _lift_weights(exported, states)
    drop_idle_writes(module)
    if not _rename_in_place(module):
        if (node := overlapping_write(module.graph.nodes)) is not None:
            raise CaptureError(
                f"the model writes in place to a tensor whose elements share memory: {where(node)}"
            )
        if (node := write_between_gaps(module.graph.nodes)) is not None:
            raise CaptureError(f"the model writes in place to a part of a tensor by unfold: {where(node)}")
        drop_idle_dropouts(exported)
        write_diagonals(exported)
        keep_casts(exported)
        exported = exported.run_decompositions({})
        _check_writes(exported)
        module = _lift_weights(exported, states)
        _restore_vocabulary(module)
    check_statistics(module)
    _drop_copies_of_state(module, len(states))
    write_out_selected_places(module)
    for node in calls(module):
        node.target = _ANY_LAYOUT.get(node.target, node.target)
    for node in calls(module, _PADDED):
        _write_out_padding(module, node)
    fix_layouts(module)
    write_out_weight_norms(module)
    widen_limits(module)
    widen_own(module)
    note_borders(module)
    own_outputs(module)
    for node in module.graph.nodes:
        node.meta.pop(
            "val", None
        )  # later passes change shapes and dtypes; `record_shapes` tells the new ones
    for node in calls(module):
        if draws_random_numbers(node):
            raise CaptureError(f"the model draws random numbers when it is called: {where(node)}")
    return finish(module)
