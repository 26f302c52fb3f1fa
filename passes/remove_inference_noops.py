"""remove-inference-noops: remove operators that have no effect in inference."""

from __future__ import annotations

import dataclasses

from torch import fx

from ampopt.ir.aliasing import is_returned, sharing
from ampopt.ir.graph import arguments, aten, calls, finish, replace, tensor_meta
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.ir.transform import Family, Numerics, Pass, Result

_DROPOUTS = {
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
}

_IDENTITIES = {aten.alias.default, aten.detach.default}

_VIEWS_COPIES_AND_CASTS = {
    aten.reshape.default,
    aten.view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.slice.Tensor,
    aten.contiguous.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.type_as.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.copy.default,
}

_COPIES = {aten._to_copy.default, aten.clone.default, aten.copy.default}


def _is_noop(node: fx.Node, source: fx.Node) -> bool:
    if node.target in _DROPOUTS:
        return arguments(node)["train"] is False
    if node.target in _IDENTITIES:
        return True
    if node.target not in _VIEWS_COPIES_AND_CASTS or _copies_for_the_caller(node, source):
        return False
    if node.target is aten.clone.default and node.kwargs.get("memory_format") is not None:
        return False  # it may stand before what reads memory, of which another pass may change the layout
    return _kind(node) == _kind(source)


def _kind(node: fx.Node) -> tuple[object, ...]:
    meta = tensor_meta(node)
    return meta.shape, meta.dtype, meta.stride, node.meta["device"], node.meta["signs"]


def _copies_for_the_caller(node: fx.Node, source: fx.Node) -> bool:
    """Whether a copy keeps a result of the model apart from its inputs, its weights, or another result.

    Each of them may be a view of what is copied, or of the copy.
    """
    if not _is_copy(node) or not is_returned(sharing(node, _is_copy)):
        return False
    others = sharing(source, _is_copy)
    return is_returned(others) or any(other.op != "call_function" for other in others)


def _is_copy(node: fx.Node) -> bool:
    if node.target not in _VIEWS_COPIES_AND_CASTS:
        return False
    return node.target in _COPIES or bool(arguments(node).get("copy"))


@dataclasses.dataclass(frozen=True)
class RemoveInferenceNoops(Pass):
    """Remove operators without effect in inference, and dead code: `noop(x)` -> `x`.

    Rewrites: dropout of every kind with `train=False`; alias and detach; views, slices, expands, permutes,
    copies and casts whose result has the shape, the dtype, the strides and the device of their input, and
    lies as that does: a copy of a conjugate has its numbers in memory.
    Requires: nothing.
    Declines: copies which keep the caller's tensors separate: a result, or what it is a view of, from an
    input, a weight or another result; copies that ask for a memory format; operators that are not proven
    no-ops are not examined.
    Correct because: dropout is defined as the identity outside training. A view that keeps shape and
    strides shows the same elements in the same order (a slice as long as its input starts at 0 with step 1),
    and a copy, or a cast to the dtype and device that are there already, keeps every bit. The graph is
    functional, so it does not matter that a copy and its source become one tensor. Whatever no output
    depends on has no effect.
    Cost: one run on the example inputs, which tells the shapes; what was told ahead of it must come true.
    """

    numerics = Numerics.BITWISE
    family = Family.REWRITE
    portable = True
    shape_dependent = True
    enables_others = True

    def apply(self, program: Program) -> Result:
        """Remove no-ops in graph order; see the class."""
        module = record_shapes(program)
        before, rewrites = len(module.graph.nodes), 0
        for node in calls(module):
            source = node.args[node.target is aten.copy.default] if node.args else None
            if not isinstance(source, fx.Node) or not _has_single_tensors(source, node):
                continue
            if _is_noop(node, source):
                replace(node, source)
                rewrites += 1
        module = finish(module)
        dead = before - rewrites - len(module.graph.nodes)
        rewrites += dead
        return Result(program.with_graph(module) if rewrites else program, rewrites)


def _has_single_tensors(*nodes: fx.Node) -> bool:
    return all(hasattr(node.meta.get("tensor_meta"), "stride") for node in nodes)
