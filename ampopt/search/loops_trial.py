"""Tries the batched forms of a model's loops: what is right is a candidate, and what is faster serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from ampopt.batched.loops import batched_loops
from ampopt.errors import first_line
from ampopt.ir.model_copy import working_copy
from ampopt.measure.headline import Compared
from ampopt.search.whole_check import WholeCheck
from ampopt.system.interrupts import check_interrupted

Answer = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class BatchedLoops:
    """A right form of a model with batched loops, in the state of the original, and what to say of them.

    `is_faster` as it is, without graphs of the code around the loops. `is_one_graph`: its detectors are made
    to be graphs.
    """

    form: nn.Module
    loops: str
    is_faster: bool
    is_one_graph: bool


def with_batched_loops(
    check: WholeCheck, compare: Callable[[Answer, Answer], Compared], *, is_one_graph: bool
) -> tuple[BatchedLoops | None, list[str]]:
    """The model that `check` has with batched loops, if it has such and is right with them; and notes on it.

    `compare` times calls of the model and of another. With `is_one_graph`, detectors are graphs of fixed
    sizes; None where there are none that can be, or the model is not right with them.
    """
    found = batched_loops(check.original, check.device, is_one_graph=is_one_graph)
    if found is None:
        return None, []
    form, names = found
    loops = f"the loops in {', '.join(names)}" if len(names) > 1 else f"the loop in {names[0]}"
    try:
        if why_not := check.judge(working_copy(form))[1]:
            return None, [f"{loops}: as before, because batched {why_not}"]
        gain = compare(working_copy(check.original), working_copy(form)).gain
    except Exception as error:
        check_interrupted(error)
        return None, [f"{loops}: as before, because batched {first_line(error)}"]
    told = (
        [f"{loops}: batched, with fixed sizes, the whole is {gain.ratio:.2f}x faster"] if gain.is_real else []
    )
    return BatchedLoops(form, loops, gain.is_real, is_one_graph), told
