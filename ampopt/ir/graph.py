"""Helper functions to read and edit an ATen graph; they narrow FX's loose types."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.passes.shape_prop import TensorMetadata

from ampopt.ir.origin import carry_on, place_of

aten = torch.ops.aten

CONVOLUTIONS = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
"""Plain convolutions and their number of spatial dimensions."""

TRANSPOSED_CONVOLUTIONS = {
    aten.conv_transpose1d.default: 1,
    aten.conv_transpose2d.input: 2,
    aten.conv_transpose3d.input: 3,
}
"""Transposed convolutions and their number of spatial dimensions; weight is [in, out / groups, *kernel]."""


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph that may be edited; it shares its weight tensors with the original."""
    return fx.GraphModule(module, copy.deepcopy(module.graph))


def finish(module: fx.GraphModule) -> fx.GraphModule:
    """Remove dead nodes and weights, check the graph and compile its Python code."""
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.delete_all_unused_submodules()
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in module.named_buffers(recurse=False) if name not in used]:
        delattr(module, name)
    module.recompile()
    return module


def calls(module: fx.GraphModule, targets: Iterable[object] | None = None) -> Iterator[fx.Node]:
    """The function calls of a graph in order, all or those to one of `targets`; safe while editing."""
    wanted = None if targets is None else set(targets)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and (wanted is None or node.target in wanted):
            yield node


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator call by their schema names, including defaults."""
    overload = node.target
    if not isinstance(overload, torch._ops.OpOverload):
        raise TypeError(f"{node.name} does not call an operator")
    values: dict[str, Any] = dict(node.kwargs)
    for index, parameter in enumerate(overload._schema.arguments):
        if index < len(node.args):
            values[parameter.name] = node.args[index]
        elif parameter.name not in values and parameter.has_default_value():
            values[parameter.name] = parameter.default_value
    return values


def is_constant(node: object) -> bool:
    """Whether an argument is a weight that the graph owns."""
    return isinstance(node, fx.Node) and node.op == "get_attr"


def computed_weight(layer: fx.Node) -> str | None:
    """Which of a layer's `weight` and `bias` is computed; None where the graph owns what there is of them."""
    own = arguments(layer)
    return next(
        (key for key in ("weight", "bias") if own[key] is not None and not is_constant(own[key])), None
    )


def constant(module: fx.GraphModule, node: object) -> Tensor | None:
    """The weight behind an argument; None if the argument is None.

    Raises TypeError if the argument is computed, and so is not a weight.
    """
    if node is None:
        return None
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        raise TypeError(f"{node} is not a constant of the graph")
    value = getattr(module, str(node.target))
    if not isinstance(value, Tensor):
        raise TypeError(f"constant {node.target} is not a tensor")
    return value


def exact_constant(module: fx.GraphModule, node: object) -> Tensor | None:
    """Like `constant`, but the weight before it was rounded to a lower precision.

    Arithmetic on weights starts from this value, so it is rounded once; see `add_rounded`.
    """
    value = constant(module, node)
    return value if value is None or not isinstance(node, fx.Node) else node.meta.get("exact", value)


def add_rounded(
    module: fx.GraphModule, hint: str, exact: Tensor, dtype: torch.dtype, before: fx.Node
) -> fx.Node:
    """`add_constant` for a weight that is stored in `dtype`; `exact_constant` finds the unrounded one.

    If `dtype` holds every bit, or the graph computes in full precision, no unrounded copy is kept.
    """
    node = add_constant(module, hint, exact.to(dtype), before)
    if dtype in (torch.float16, torch.bfloat16):
        node.meta["exact"] = exact.detach().to(torch.float32)
    return node


def forget_unrounded(module: fx.GraphModule) -> None:
    """Free the weights before they were rounded, which only passes read.

    The graph's table of names knows the nodes that were erased, too.
    """
    named = getattr(module.graph._graph_namespace, "_obj_to_name", {})
    for node in (*module.graph.nodes, *named):
        if isinstance(node, fx.Node):
            node.meta.pop("exact", None)


def add_constant(module: fx.GraphModule, hint: str, value: Tensor, before: fx.Node) -> fx.Node:
    """Give the graph a new weight, named after `hint`, and return the node that reads it.

    Its origins are those of the node `before` and of that node's weights: pass the call whose weight it
    replaces.
    """
    base = "".join(c if c.isalnum() else "_" for c in hint)
    name, number = base, 0
    while hasattr(module, name):
        number += 1
        name = f"{base}_{number}"
    module.register_buffer(name, value.detach())
    with module.graph.inserting_before(before):
        node = module.graph.get_attr(name)
    carry_on(node, before, *filter(is_constant, before.all_input_nodes))
    return node


def insert_call(
    module: fx.GraphModule, before: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any
) -> fx.Node:
    """Insert a call before a node; its origins are those of this node, or, at the end, of its arguments."""
    with module.graph.inserting_before(before):
        node = module.graph.call_function(target, args, kwargs)
    carry_on(node, *(node.all_input_nodes if before.op == "output" else [before]))
    return node


def replace(old: fx.Node, new: fx.Node) -> None:
    """Make all readers of `old` read `new`, and remove `old`.

    `new` also gets the origins of `old`, and of all nodes that only `old` read.
    """
    old.replace_all_uses_with(new)
    parts = {new, *_read_only_by(old)}
    carry_on(new, *sorted(parts, key=lambda node: (is_constant(node), node)))  # what a call says comes first
    old.graph.erase_node(old)


def replace_result(old: fx.Node, new: fx.Node) -> None:
    """`replace`, with what was recorded of the tensor of `old`: another rewrite may ask what it reads."""
    if "tensor_meta" in old.meta:
        new.meta["tensor_meta"] = old.meta["tensor_meta"]
    replace(old, new)


def _read_only_by(node: fx.Node) -> set[fx.Node]:
    """A node that nobody reads any more, and the calls and weights that nobody else needs."""
    unread, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source.op != "placeholder" and source not in unread and unread.issuperset(source.users):
                unread.add(source)
                todo.append(source)
    return unread


def reads_result(node: fx.Node, index: int) -> bool:
    """Whether any node reads one of the results of a node with several, or their tuple as a whole."""
    return any(user.target is not operator.getitem or user.args[1] == index for user in node.users)


def only_user(node: fx.Node) -> fx.Node | None:
    """The only node that reads `node`; None if several nodes or none read it, or one reads it twice."""
    if len(node.users) != 1:
        return None
    user, reads = next(iter(node.users)), 0

    def count(argument: fx.Node) -> fx.Node:
        nonlocal reads
        reads += argument is node
        return argument

    fx.map_arg((user.args, user.kwargs), count)
    return user if reads == 1 else None


_FRESH_COMPOSITES = {
    *(aten.conv1d, aten.conv2d, aten.conv3d),
    *(aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d),
    *(aten.linear, aten.cat, aten.concat, aten.stack, aten.softmax, aten.log_softmax),
    *(aten.batch_norm, aten.instance_norm, aten.group_norm, aten.layer_norm),
    *(aten.relu6, aten.selu, aten.celu, aten.hardswish),
    *(aten.max_pool1d, aten.max_pool2d, aten.max_pool3d),
    *(aten.upsample_nearest2d, aten.upsample_bilinear2d),
}
"""Operators composed of others whose result never shares memory with an argument."""


def makes_fresh_tensor(node: fx.Node) -> bool:
    """Whether a node's output certainly shares no memory with its inputs, by the operator's schema.

    Composite operators may return their input without declaring it (`dropout` in evaluation, `contiguous`),
    so only those known not to do so count.
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


def own_outputs(module: fx.GraphModule) -> None:
    """Clone every output that may share memory with a weight or an input, so that callers may write to it."""
    output = module.graph.output_node()
    for result in dict.fromkeys(output.all_input_nodes):
        if _may_share_memory(result):
            clone = insert_call(module, output, aten.clone.default, result)
            output.replace_input_with(result, clone)


def _may_share_memory(node: fx.Node) -> bool:
    if node.op in ("get_attr", "placeholder"):
        return True
    if node.op != "call_function" or makes_fresh_tensor(node):
        return False
    return any(_may_share_memory(source) for source in node.all_input_nodes)


def constant_outputs(module: fx.GraphModule) -> frozenset[int]:
    """The indices of outputs that depend on no input; a compiler may reuse one tensor for all calls."""
    computed: set[fx.Node] = set(module.graph.find_nodes(op="placeholder"))
    for node in module.graph.nodes:
        if not computed.isdisjoint(node.all_input_nodes):
            computed.add(node)
    results: tuple[fx.Node, ...] = module.graph.output_node().args[0]  # type: ignore[assignment]
    return frozenset(place for place, node in enumerate(results) if node not in computed)


def tensor_meta(node: fx.Node) -> TensorMetadata:
    """The recorded metadata of a node with one output tensor, after `shapes.record_shapes`."""
    meta = node.meta.get("tensor_meta")
    if not isinstance(meta, TensorMetadata):
        raise TypeError(f"{node.name} has no single output tensor")
    return meta


def gives_a_tensor(node: fx.Node) -> bool:
    """Whether a node has one output tensor, after `shapes.record_shapes`; others give numbers or several."""
    return isinstance(node.meta.get("tensor_meta"), TensorMetadata)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's output, after `shapes.record_shapes`."""
    return tuple(tensor_meta(node).shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype of a node's output, after `shapes.record_shapes`."""
    return tensor_meta(node).dtype


def where(node: fx.Node) -> str:
    """A node's name and its place in the user's model: `conv2d_12 (layer3.0.conv1, resnet.py:92)`.

    Only the name if the place is unknown.
    """
    place = place_of(node)
    return f"{node.name} ({place})" if place else node.name


SWITCHES = {"train": False, "training": False, "dropout_p": 0.0}
"""Arguments that disable an operator's random numbers, and the value that does so."""


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether an operator draws random numbers with these arguments."""
    overload = node.target
    if not isinstance(overload, OpOverload) or torch.Tag.nondeterministic_seeded not in overload.tags:
        return False
    values = arguments(node)
    return not any(name in values and values[name] == off for name, off in SWITCHES.items())


STRIDED = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
"""Operators that see their argument's memory in place of its elements."""


def reads_strides(module: fx.GraphModule) -> fx.Node | None:
    """The first operator whose result depends on its input's memory layout; None if there is none."""
    return next(calls(module, (*STRIDED, aten.view_as_real.default, aten.view_as_complex.default)), None)


_NUMBERS = ("SymInt", "int", "float", "number", "Scalar", "bool")


def gives_a_number(module: fx.GraphModule) -> fx.Node | None:
    """The first operator whose result is a number that depends on the inputs' values; None if there is none.

    Sizes that are the same in every call are constants of a graph, so a computed size is not.
    """
    for node in calls(module):
        overload = node.target
        if isinstance(overload, OpOverload) and any(
            str(result.type) in _NUMBERS for result in overload._schema.returns
        ):
            return node
    return None


def is_native(node: fx.Node) -> bool:
    """Whether a call's operator is not one that PyTorch itself defines for every machine."""
    overload = node.target
    if not isinstance(overload, torch._ops.OpOverload):
        return getattr(overload, "__module__", "") not in ("_operator", "math", "builtins")
    return overload.namespace not in ("aten", "prims") or _runs_on_real_tensors_only(overload)


def is_opaque(node: fx.Node) -> bool:
    """Whether a compiler cannot handle a call: a foreign operator, or one without a shape function."""
    ours = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "ampopt"
    return is_native(node) and not ours


def _runs_on_real_tensors_only(overload: torch._ops.OpOverload) -> bool:
    keys = torch._C.DispatchKey
    composite = ("ImplicitAutograd", "ExplicitAutograd", "ExplicitAutogradNonFunctional")
    symbolic = (keys.Meta, *(getattr(keys, f"Composite{kind}") for kind in composite))
    return not any(overload.has_kernel_for_dispatch_key(key) for key in symbolic)


def cast_for_readers(module: fx.GraphModule, node: fx.Node, dtype: torch.dtype) -> None:
    """Give all readers of a node its value in `dtype`."""
    cast = insert_call(module, node.next, aten._to_copy.default, node, dtype=dtype)
    carry_on(cast, node)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
