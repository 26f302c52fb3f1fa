"""Selects the lanes in which a model can be optimized: times a call of each once its libraries are loaded."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ampopt.errors import first_line
from ampopt.ir.capture import Captured
from ampopt.ir.lanes import Lane
from ampopt.ir.model_copy import device_of, untouched_rng, working_copy
from ampopt.ir.narrow_convs import why_it_may_crash
from ampopt.ir.settings import Settings
from ampopt.ir.signature import flatten_call, map_tensors
from ampopt.measure.clocks import seconds_once_loaded, synchronize
from ampopt.measure.verify import Verifier
from ampopt.system.budget import CALLS_OF_A_TRIAL, CALLS_TO_LOOK
from ampopt.system.interrupts import check_interrupted

REWRITING = 0.6
"""The share of the time budget after which no rewrite is begun any more."""

LOADING = 0.15
"""The share of it in which the first calls of a lane may load libraries and choose kernels.

On an H200 cuDNN's kernels for float16 take 1.6 to 2.5 s in the first call of a process.
"""

SLOW_CALL_S = 0.05
"""A shorter call does not overrun a time budget by much, however small the budget is."""


DISTURBED, MOST_TO_LOOK = 1.5, 12
"""Calls that differ by this factor are repeated, up to so many."""

LOOKING = 0.03
"""The share of it for measuring the time of a call."""


def seconds_of_a_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], budget_s: float
) -> float:
    """Time in seconds of a call of a copy of a model: the shortest of three, or of fewer (see `LOOKING`).

    A single call may be disturbed by other load, and the first one of a process loads libraries: it is
    repeated within `LOADING`. Where later ones differ, other load stalls the threads of an operator that wait
    for each other: there are more then. Each call gets its own tensors, as it may write to them. An error of
    the first call is raised.
    """

    device, times = device_of(model, flatten_call(args, kwargs)[0]), list[float]()
    model = working_copy(model)
    while (len(times) < CALLS_TO_LOOK or _are_disturbed(times[1:])) and (
        sum(times) < LOOKING * budget_s or (len(times) == 1 and times[0] < LOADING * budget_s)
    ):
        with Settings().scope(device), untouched_rng(device):
            own_args, own_kwargs = map_tensors(torch.clone, args, kwargs)  # no inference tensors
            synchronize(device)
            began = time.perf_counter()
            try:
                model(*own_args, **own_kwargs)
                synchronize(device)
            except Exception as error:
                check_interrupted(error)
                if not times:
                    raise
                break  # it fails when it is called again, which is not for its timing to tell
        times.append(time.perf_counter() - began)
    return min(times)


def _are_disturbed(times: Sequence[float]) -> bool:
    """Whether so few calls differ by so much that the shortest may have been disturbed, too."""
    return len(times) < MOST_TO_LOOK and max(times) > DISTURBED * min(times)


def judgeable(
    lanes: Sequence[Lane], captured: Captured, verifier: Verifier, budget_s: float, notes: list[str]
) -> dict[Lane, float]:
    """The lanes that a time budget can judge, and seconds of a call in them; why not others goes to `notes`.

    A lane is left out where the original fails in it, as operators without a kernel for the lower precision
    do; where only its graph fails, as one with a dtype in it that autocast changes in the model; and where
    PyTorch may crash. So is one in which a single trial, of about `CALLS_OF_A_TRIAL` calls, takes more than
    its share of the budget, as bfloat16 can on a processor without instructions for it. The first lane may
    have everything. A lane that overflows or is too inexact is judged: `rescue` decides about it.
    """
    kept: dict[Lane, float] = {}
    for lane in lanes:
        share = REWRITING * budget_s / len(lanes) if kept else budget_s
        most_s = max(SLOW_CALL_S, share / CALLS_OF_A_TRIAL, 2 * min(kept.values(), default=0.0))
        try:
            seconds = _seconds(lane, captured, verifier, most_s, LOADING * budget_s)
        except _LeftOutError as left_out:
            notes.append(f"the {lane.name} lane was not tried: {left_out}")
            continue
        if seconds > most_s:
            notes.append(
                f"the {lane.name} lane was not tried: one call of it takes over {most_s:.2g} s here, so "
                f"that no pass could be judged within {share:.2g} s of the time budget"
            )
            continue
        kept[lane] = seconds
    return kept


class _LeftOutError(Exception):
    """Why a lane is left out."""


def _seconds(lane: Lane, captured: Captured, verifier: Verifier, most_s: float, loading_s: float) -> float:
    """Seconds of a call in a lane, by the original and by its graph; raises _LeftOutError."""
    program = captured.program
    if lane.is_mixed and (crash := why_it_may_crash(program)):
        raise _LeftOutError(crash)
    call = functools.partial(verifier.eager(lane), *program.examples)
    try:
        seconds = seconds_once_loaded(
            call, program.device, long_s=SLOW_CALL_S, most_s=most_s, loading_s=loading_s
        )
        if seconds <= most_s:
            verifier.own_error(lane)  # also on the random inputs
    except Exception as error:
        check_interrupted(error)
        raise _LeftOutError(f"the original fails in it ({first_line(error)})") from error
    if seconds <= most_s:
        _check_start(lane, captured)
    return seconds


def _check_start(lane: Lane, captured: Captured) -> None:
    """Raise _LeftOutError where the graph fails in a lane before any pass."""
    program = lane.start(captured.program)
    try:
        program.run(*program.examples)
    except Exception as error:
        check_interrupted(error)
        reason = f"the graph fails in it, where the original does not ({first_line(error)})"
        raise _LeftOutError(reason) from error
