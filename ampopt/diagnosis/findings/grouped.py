"""grouped-convolution: grouped and depthwise convolutions that take more time than their arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Counterfactual, Finding, counted, saved
from ampopt.ir.graph import arguments, aten, calls, constant, dtype_of, is_constant, shape_of
from ampopt.ir.lanes import Lane
from ampopt.ir.origin import place_of
from ampopt.ir.shapes import record_shapes
from ampopt.kernels.group_forms import GroupedConv
from ampopt.passes import Degroup

LEAST = 0.1
"""From this share of the operators' time on, grouped convolutions are told."""


def find(case: Case) -> Iterator[Finding]:
    """Their share of time against that of FLOP; executed: each in its fastest form (the pass degroup)."""
    convs = dict(grouped(case))
    if not convs:
        return
    rows = [layer for layer in case.layers if layer.name in convs]
    flops = sum(layer.work.flops for layer in case.layers) or 1
    for name, lane in case.lanes.items():
        total = sum(layer.seconds(name) for layer in case.layers)
        share = sum(layer.seconds(name) for layer in rows) / total if total else 0.0
        if share < LEAST or name not in case.latency:
            continue
        arithmetic = sum(layer.work.flops for layer in rows) / flops
        slowest = max(rows, key=lambda layer: layer.seconds(name))
        conv = dataclasses.replace(convs[slowest.name][0], dtype=lane.dtype)
        hint = f": {conv.tensor_core_hint(case.device)}" if case.device.type == "cuda" else ""
        ran = _degrouped(case, lane)
        yield Finding(
            "grouped-convolution",
            f"{counted(len(rows), 'grouped convolution takes', 'grouped convolutions take')} {share:.0%} of "
            f"the operators' time for {arithmetic:.0%} of the arithmetic; the slowest is {slowest.name} "
            f"({conv}){hint}",
            places=tuple(
                convs[layer.name][1] for layer in sorted(rows, key=lambda layer: -layer.seconds(name))[:3]
            ),
            advice="fewer, wider groups; ampopt.optimize merges groups where that is faster (degroup)",
            lane=name,
            share=saved(ran) if ran is not None else 0.0,
            counterfactual=ran,
        )


def _degrouped(case: Case, lane: Lane) -> Counterfactual | None:
    ran = case.rewritten("with its grouped convolutions in the fastest form", lane, Degroup())
    return ran[0] if ran is not None and ran[0].helps else None


def grouped(case: Case) -> Iterator[tuple[str, tuple[GroupedConv, str]]]:
    """The name of each grouped 2d convolution of the graph, its parameters and its place."""
    if case.program is None:
        return
    module = record_shapes(case.program)
    for node in calls(module, [aten.conv2d.default]):
        own = arguments(node)
        weight = constant(module, own["weight"]) if is_constant(own["weight"]) else None
        if own["groups"] == 1 or weight is None or isinstance(own["padding"], str):
            continue
        yield (
            node.name,
            (
                GroupedConv(
                    input_shape=shape_of(own["input"]),
                    weight_shape=tuple(weight.shape),
                    stride=tuple(own["stride"]),
                    padding=tuple(own["padding"]),
                    dilation=tuple(own["dilation"]),
                    groups=own["groups"],
                    has_bias=own["bias"] is not None,
                    dtype=dtype_of(own["input"]),
                    channels_last=False,
                ),
                place_of(node),
            ),
        )
