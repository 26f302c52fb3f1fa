"""overflow: the layer at which a lower precision leaves its range."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ampopt.diagnosis.accuracy import CALLS, layer_errors
from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding
from ampopt.errors import first_line
from ampopt.system.interrupts import check_interrupted


def find(case: Case) -> Iterator[Finding]:
    """The first operator that gives infinity or NaN where float64 gives numbers; it looks at every layer."""
    _note_errors(case)
    for name, errors in case.accuracy.items():
        order = {layer.name: place for place, layer in enumerate(case.layers)}
        spoilt = sorted(
            (each for each in errors if each.overflows), key=lambda each: order.get(each.name, len(order))
        )
        if not spoilt:
            continue
        first, dtype = spoilt[0], case.lanes[name].dtype
        yield Finding(
            "overflow",
            f"{first.name} overflows: it gives up to {first.largest:,.0f}, and "
            f"{str(dtype).removeprefix('torch.')} holds {torch.finfo(dtype).max:,.0f}",
            places=tuple(each.place for each in spoilt[:3]),
            advice="keep it in FP32, or use bfloat16: ampopt.optimize does the first (keep-fp32)",
            lane=name,
            is_fault=True,
        )


def _note_errors(case: Case) -> None:
    """Compute the errors by layer of every lane for which there is time."""
    if case.program is None:
        return
    for name in reversed(case.latency):  # the lower precision first
        needed_s = CALLS * case.latency["fp32"].median
        if not case.has_time(f"errors by layer in the {name} lane", needed_s):
            continue
        try:
            case.accuracy[name] = layer_errors(case.program, case.lanes[name], case.budget.left_s)
        except Exception as error:  # an operator that knows no float64
            check_interrupted(error)
            case.notes.append(f"no errors by layer in the {name} lane: {first_line(error)}")
        else:
            if not case.accuracy[name]:
                case.notes.append(f"no errors by layer in the {name} lane: no operator rounds a number there")
