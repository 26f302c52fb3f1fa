"""degroup: rewrite grouped convolutions to the form that is fastest at their real shapes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ampopt.ir.deciding_calls import deciding_node
from ampopt.ir.graph import (
    add_constant,
    arguments,
    aten,
    calls,
    computed_weight,
    constant,
    dtype_of,
    finish,
    insert_call,
    replace,
    tensor_meta,
    where,
)
from ampopt.ir.pass_options import option
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.ir.transform import Declined, Family, Numerics, Pass, Result
from ampopt.kernels.group_forms import AS_IS, Form, GroupedConv, forms_for, measure_forms, merge_groups

MEASURING_S = 5.0
"""Time in seconds for all convolutions together; no measurement starts after it."""


@dataclasses.dataclass(frozen=True)
class Degroup(Pass):
    """Rewrite grouped convolutions as fewer groups, one dense one, or one for each group, if faster.

    Rewrites: conv2d with 1 < groups (depthwise included) to `merge=m` (every m neighbouring groups become
    one, whose weight is block-diagonal; m = groups is the dense convolution), or `split` (a convolution for
    each group and a concatenation), either of them also with its input in the other memory format. Every
    form is timed at the convolution's real shape, dtype and layout, format changes at its border included.
    Requires: a weight of the graph, a batched input.
    Declines: convolutions whose present form is the fastest, with the ratio; computed weights; all others
    once the time for measurements is over; merging where values decide (the index of a maximum that is read,
    `nan_to_num`).
    Correct because: group g's outputs depend on group g's inputs alone. In a merged group the weights from
    other groups' inputs are zero, and zero times a finite number adds nothing; a split is the definition.
    NaN reaches the groups that it is merged with: where values decide, another group's NaN would be taken
    for the own one's place.
    Cost: merging by m multiplies the weights and the arithmetic by m.

    `choices` holds the measured (convolution's name, form) pairs; a replay applies them without measuring.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.PLACEMENT
    portable = True

    choices: tuple[tuple[str, str], ...] | None = None
    least_gain: float = option(1.03, 0.0, 1000.0)

    def apply(self, program: Program) -> Result:
        """Find convolutions, measure forms (or use `choices`), rewrite; see the class."""
        end = time.perf_counter() + MEASURING_S
        module = record_shapes(program)
        convs = [n for n in calls(module, [aten.conv2d.default]) if arguments(n)["groups"] > 1]
        if not convs:
            return Result(program, 0)
        decides, fixed = deciding_node(module), None if self.choices is None else dict(self.choices)
        cache: dict[GroupedConv, list[tuple[Form, float]]] = {}
        declined, hints, chosen = list[Declined](), list[str](), list[tuple[str, str]]()
        for node in convs:
            if reason := _why_not(node):
                declined.append(Declined(node.name, reason))
                continue
            conv = _describe(module, node)
            if fixed is not None:
                form = Form.parse(fixed[node.name]) if node.name in fixed else AS_IS
                if form.merge > 1 and decides is not None:
                    declined.append(Declined(node.name, f"{where(decides)} may take NaN of a merged group"))
                    form = AS_IS
                elif conv.groups % form.merge != 0:
                    declined.append(Declined(node.name, f"{form} does not divide its {conv.groups} groups"))
                    form = AS_IS
            elif conv not in cache and time.perf_counter() > end:
                form = AS_IS
                declined.append(Declined(node.name, "the time for measurements was spent"))
            else:
                forms = [each for each in forms_for(conv) if each.merge == 1 or decides is None]
                timed = cache.get(conv) or measure_forms(conv, forms, program)
                cache[conv] = timed
                form, reason = _choose(timed, self.least_gain)
                hints.append(f"{where(node)} ({conv}): {conv.tensor_core_hint(program.device)}; {reason}")
                if form == AS_IS:
                    declined.append(Declined(node.name, reason))
            if form != AS_IS:
                _rewrite(module, node, conv, form)
                chosen.append((node.name, str(form)))
        if not chosen:
            return Result(program, 0, tuple(declined), tuple(hints))
        changed = program.with_graph(finish(module))
        frozen = dataclasses.replace(self, choices=tuple(chosen))
        return Result(changed, len(chosen), tuple(declined), tuple(hints), frozen)


def _why_not(node: fx.Node) -> str | None:
    if (name := computed_weight(node)) is not None:
        return f"its {name} is computed"
    return "its input has no batch" if len(tensor_meta(node).shape) != 4 else None


def _describe(module: fx.GraphModule, node: fx.Node) -> GroupedConv:
    own = arguments(node)
    weight = constant(module, own["weight"])
    assert weight is not None
    source = tensor_meta(own["input"])
    nhwc = torch.empty_strided(source.shape, source.stride, device="meta").is_contiguous(
        memory_format=torch.channels_last
    )
    pair = [tuple(v * 2 if len(v) == 1 else v) for v in (own["stride"], own["padding"], own["dilation"])]
    return GroupedConv(
        input_shape=tuple(source.shape),
        weight_shape=tuple(weight.shape),
        stride=pair[0],
        padding=pair[1],
        dilation=pair[2],
        groups=own["groups"],
        has_bias=own["bias"] is not None,
        dtype=dtype_of(own["input"]),
        channels_last=nhwc,
    )


def _choose(timed: Sequence[tuple[Form, float]], least_gain: float) -> tuple[Form, str]:
    """The fastest form, or the one that is there where no other is faster by `least_gain`."""
    now = next(seconds for form, seconds in timed if form == AS_IS)
    best, seconds = min(timed, key=lambda pair: pair[1])
    text = f"fastest form {best} {seconds * 1e6:.1f} µs, as is {now * 1e6:.1f} µs"
    return (best if now / seconds >= least_gain else AS_IS), text


def _rewrite(module: fx.GraphModule, node: fx.Node, conv: GroupedConv, form: Form) -> None:
    own = arguments(node)
    weight, bias = constant(module, own["weight"]), constant(module, own["bias"])
    assert weight is not None
    source: fx.Node = own["input"]
    if form.other_layout:
        source = insert_call(module, node, aten.clone.default, source, memory_format=conv.other_format)
    layout = conv.other_format if form.other_layout else conv.format
    geometry = (list(conv.stride), list(conv.padding), list(conv.dilation))

    def weight_node(value: Tensor) -> fx.Node:
        return add_constant(module, f"{node.name}_weight", value.contiguous(memory_format=layout), node)

    if form.split:
        width = weight.shape[1]
        outs = []
        for group, part in enumerate(weight.chunk(conv.groups)):
            piece = insert_call(
                module, node, aten.slice.Tensor, source, 1, group * width, (group + 1) * width
            )
            part_bias = None
            if bias is not None:
                part_bias = add_constant(
                    module, f"{node.name}_bias", bias.chunk(conv.groups)[group].clone(), node
                )
            call = (piece, weight_node(part), part_bias, *geometry, 1)
            outs.append(insert_call(module, node, aten.conv2d.default, *call))
        new = insert_call(module, node, aten.cat.default, outs, 1)
    else:
        merged = weight_node(merge_groups(weight, conv.groups, form.merge))
        call = (source, merged, own["bias"], *geometry, conv.groups // form.merge)
        new = insert_call(module, node, aten.conv2d.default, *call)
    if form.other_layout:
        new = insert_call(module, node, aten.clone.default, new, memory_format=conv.format)
    new.meta["tensor_meta"] = node.meta["tensor_meta"]  # the next grouped convolution may read this
    replace(node, new)
