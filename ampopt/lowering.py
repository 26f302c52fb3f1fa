"""From an exported program to a flat ATen graph that owns its weights and changes nothing in place.

`ExportedProgram.module()` is no substitute: its weights alias the user's. In-place operators are renamed
to their functional form only where the tensor that they overwrite provably has no other name; in every
other case the whole graph is functionalized by PyTorch and brought back to the operators that passes know.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ampopt.errors import CaptureError
from ampopt.graph import arguments, aten, calls, finish, insert_call, replace, where

_FRESH_COMPOSITES = frozenset(
    getattr(aten, name)
    for name in (
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear batch_norm "
        "instance_norm group_norm layer_norm relu6 selu celu hardswish max_pool1d max_pool2d max_pool3d "
        "cat concat stack softmax log_softmax upsample_nearest2d upsample_bilinear2d"
    ).split()
)
"""Operators composed of others whose result never shares memory with an argument."""


def _makes_fresh_tensor(node: fx.Node) -> bool:
    """Whether a node's output surely shares no memory with its inputs, by the operator's own schema.

    Operators that are composed of others may return their input without saying so (`dropout` in
    evaluation, `contiguous`), so only those known not to count.
    """
    overload = node.target
    if node.op != "call_function" or not isinstance(overload, torch._ops.OpOverload):
        return False
    if any(result.alias_info is not None for result in overload._schema.returns):
        return False
    if overload.overloadpacket in _FRESH_COMPOSITES:
        return True
    return overload.namespace == "aten" and not overload.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )


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


def _rename_in_place(module: fx.GraphModule) -> bool:
    """Give every in-place operator its functional form; False (graph half-done) where one may be aliased."""
    order = {node: index for index, node in enumerate(module.graph.nodes)}
    for node in calls(module):
        if not _is_mutable(node):
            continue
        functional, overwritten = _functional_form(node), node.args[0]
        if functional is None or not isinstance(overwritten, fx.Node):
            return False
        others = [user for user in overwritten.users if user is not node]
        aliased = any(order[user] > order[node] or not _makes_fresh_tensor(user) for user in others)
        if aliased or not _makes_fresh_tensor(overwritten):
            return False
        node.target = functional
    return True


def _lift_weights(exported: ExportedProgram) -> fx.GraphModule:
    """The exported graph with weights as attributes on clones, flat inputs and a flat tuple of tensors."""
    graph, root = fx.Graph(), torch.nn.Module()
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    shared: dict[str, str] = {}
    mapping: dict[fx.Node, Any] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind is InputKind.USER_INPUT:
                if isinstance(node.meta.get("val"), Tensor):
                    mapping[node] = graph.placeholder(node.name)
                continue  # other arguments are constants of the graph: the call's key holds their values
            value = _weight(exported, spec)
            name = shared.setdefault(str(spec.target), node.name)
            if not hasattr(root, name):
                root.register_buffer(name, value.detach().clone())
            mapping[node] = graph.get_attr(name)
        elif node.op == "output":
            flat = [mapping[arg] for arg in node.args[0] if isinstance(arg, fx.Node)]
            graph.output(tuple(_owned(graph, value) for value in flat))
        elif node.target is aten._assert_tensor_metadata.default:
            continue  # it would forbid every later change of dtype
        elif node.op == "call_function":
            new = graph.node_copy(node, lambda old: mapping[old])
            new.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
            mapping[node] = new
        else:
            raise CaptureError(f"the graph holds a {node.op} node, which ampopt does not know: {where(node)}")
    return fx.GraphModule(root, graph)


def _owned(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """A weight that is itself a result is cloned, so that a caller who writes to it leaves ours alone."""
    return graph.call_function(aten.clone.default, (value,)) if value.op == "get_attr" else value


def _weight(exported: ExportedProgram, spec: Any) -> Tensor:
    for store in (exported.state_dict, exported.constants):
        if spec.target in store and isinstance(store[spec.target], Tensor):
            return store[spec.target]  # type: ignore[no-any-return]
    raise CaptureError(f"the model holds {spec.target}, which is not a tensor; ampopt cannot carry it")


def _check_effects(exported: ExportedProgram) -> None:
    """Raise CaptureError where the model writes to its buffers or to its inputs when it is called."""
    for spec in exported.graph_signature.output_specs:
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            what = "its buffer" if spec.kind is OutputKind.BUFFER_MUTATION else "its input"
            raise CaptureError(f"the model changes {what} {spec.target} when it is called")


def _restore_vocabulary(module: fx.GraphModule) -> None:
    """Bring decomposed operators back to the whole ones that passes match.

    `_native_batch_norm_legit_no_training` returns (normalized, empty, empty): its first result is
    `batch_norm` with running statistics. `convolution` is `convNd`, or `conv_transposeNd` where it says so.
    """
    for node in calls(module, [aten._native_batch_norm_legit_no_training.default]):
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1] == 0:
                x, weight, bias, mean, variance, momentum, eps = node.args
                call = (x, weight, bias, mean, variance, False, momentum, eps, True)
                replace(user, insert_call(module, user, aten.batch_norm.default, *call))
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
            call = (x, weight, bias, stride, padding, extra, groups, dilation)
            replace(node, insert_call(module, node, transposed[rank], *call))
        else:
            call = (x, weight, bias, stride, padding, dilation, groups)
            replace(node, insert_call(module, node, plain[rank], *call))


def lower(exported: ExportedProgram) -> fx.GraphModule:
    """The exported program as a functional `fx.GraphModule`: flat tensors in, a flat tuple of tensors out.

    Raises CaptureError where the model writes to its own buffers or to its inputs, holds what is not a
    tensor, or draws random numbers.
    """
    module = _lift_weights(exported)
    if not _rename_in_place(module):
        exported = exported.run_decompositions({})
        _check_effects(exported)
        module = _lift_weights(exported)
        _restore_vocabulary(module)
    for node in calls(module, [aten.view.default]):
        node.target = aten.reshape.default  # the same function, and right in every memory format
    for node in calls(module):
        if _draws_random_numbers(node):
            raise CaptureError(f"the model draws random numbers when it is called: {where(node)}")
    return finish(module)


def _draws_random_numbers(node: fx.Node) -> bool:
    overload = node.target
    if not isinstance(overload, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in overload.tags:
        return False
    values = arguments(node)
    switched_off = values.get("train") is False or values.get("training") is False
    return not (switched_off or values.get("dropout_p") == 0.0)
