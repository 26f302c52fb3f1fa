"""Tries the batched forms of a model's loops, and finds the submodules of the form to optimize."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from ampopt.batched.fixed import Cut
from ampopt.batched.loops import batched_loops
from ampopt.errors import first_line
from ampopt.ir.lane_io import original_call, original_of
from ampopt.ir.model_copy import working_copy
from ampopt.measure.headline import Compared
from ampopt.search.parts_search import shortened
from ampopt.search.region import Region, find_regions
from ampopt.search.whole_check import WholeCheck
from ampopt.system.interrupts import check_interrupted

AS_GRAPHS = ("cuda",)
"""Devices where batched loops are tried as graphs, also where they are no faster by themselves.

On a GPU launches and waits are most of their time. On a CPU masks and fixed sizes are more work.
"""

Compare = Callable[[Callable[..., Any], Callable[..., Any]], Compared]
"""Times calls of two models."""


@dataclasses.dataclass(frozen=True)
class Form:
    """What is optimized of a model that is not one graph: a form of it, in its state, and submodules.

    `model` is the original, or has batched loops. `with_loops` is a right form with batched loops that may
    serve as graphs; None: there is none. `loops` says which they are, `notes` what was found.
    """

    model: nn.Module
    regions: list[Region]
    with_loops: nn.Module | None
    loops: str
    notes: list[str]


def form_of(check: WholeCheck, compare: Compare, is_over: Callable[[], bool]) -> Form:
    """The form to optimize of the model that `check` has; no submodules are found once `is_over`."""
    return _as_one_graph(check, is_over) or _with_loops(check, compare, is_over)


def _as_one_graph(check: WholeCheck, is_over: Callable[[], bool]) -> Form | None:
    """The form in which detectors are graphs of fixed sizes; None where none can be, or it is wrong."""
    if check.device.type not in AS_GRAPHS:
        return None
    form, loops, _ = _right_form(check, is_one_graph=True)
    if form is None:
        return None
    regions, reasons = _regions_of(check, form, is_over)
    inside = original_of(form)
    owners = [inside.get_submodule(region.name.rpartition(".")[0]) for region in regions]
    if not any(isinstance(owner, Cut) for owner in owners):
        return None
    told = f"{loops}: batched, with fixed sizes: one graph, whose results are cut to their numbers after it"
    return Form(form, regions, form, loops, [told, *reasons])


def _with_loops(check: WholeCheck, compare: Compare, is_over: Callable[[], bool]) -> Form:
    """The model, with batched loops if those are right and faster."""
    form, loops, notes = _right_form(check, is_one_graph=False)
    model = check.original
    if form is not None:
        try:
            gain = compare(working_copy(check.original), working_copy(form)).gain
        except Exception as error:
            check_interrupted(error)
            form, notes = None, [f"{loops}: as before, because batched {first_line(error)}"]
        else:
            if gain.is_real:
                model = form
                notes = [f"{loops}: batched, with fixed sizes, the whole is {gain.ratio:.2f}x faster"]
    regions, reasons = _regions_of(check, model, is_over)
    return Form(model, regions, form, loops, [*notes, *reasons])


def _right_form(check: WholeCheck, *, is_one_graph: bool) -> tuple[nn.Module | None, str, list[str]]:
    """A form with batched loops that is right, what they are, and notes; None where there is none."""
    found = batched_loops(check.original, check.device, is_one_graph=is_one_graph)
    if found is None:
        return None, "", []
    form, names = found
    loops = f"the loops in {', '.join(names)}" if len(names) > 1 else f"the loop in {names[0]}"
    try:
        why_not = check.judge(working_copy(form))[1]
    except Exception as error:
        check_interrupted(error)
        why_not = first_line(error)
    if why_not:
        return None, loops, [f"{loops}: as before, because batched {why_not}"]
    return form, loops, []


def _regions_of(
    check: WholeCheck, form: nn.Module, is_over: Callable[[], bool]
) -> tuple[list[Region], list[str]]:
    """The submodules of a form to optimize, and why others cannot be."""
    inside, args, kwargs = original_call(form, check.args, check.kwargs)
    reasons = list[str]()
    found = list(find_regions(inside, args, kwargs, check.device, reasons, is_over))
    return found, shortened(reasons, "more submodules are no single graph either")
