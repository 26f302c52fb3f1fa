"""Makes a mixed lane right before anything is built on it, or leaves it out with the evidence.

In a lane whose first program is over its limit, every pass on top of it would be wrong, too. So what can make
it right comes first there, and is kept whatever it costs: there is nothing right to compare it with. First
are the rewrites that need no precision, because a folded batch norm may be all that a convolution's overflow
needs; then, if that is not enough, `keep-fp32`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from ampopt.ir.transform import Family, Pass
from ampopt.measure.entry import Entry, Verdict
from ampopt.measure.verify import Verifier
from ampopt.passes import PIPELINE, BakeAutocast, KeepFp32
from ampopt.search.lane_state import LaneState
from ampopt.search.pass_manager import PassManager

MARGIN = 0.9
"""A lane is brought within this share of a bound, because later passes round again."""

FEW = 0.3
"""Largest share of the products that stay in FP32 in a lane that is right, and only over the bound."""

MOST_NAMED = 3
"""Operators that a note names; the report's data has them all."""


def rescued(
    manager: PassManager,
    state: LaneState,
    verifier: Verifier,
    passes: Sequence[Pass],
    notes: list[str],
    bound: float | None = None,
) -> bool:
    """Whether a new lane is right, or has been made right; the notes say by what, or why not.

    A lane whose error is over `bound` (that of `precision="auto"`) is brought within it, if that can be; it
    is right all the same. A lane that is over a user's tolerance or metric stays open, so that the
    report can say how fast it would be; one that overflows does so only without `keep-fp32`.
    """
    if not state.lane.is_mixed:
        return True
    check, most = verifier.check_errors(state.best.run, state.lane), math.inf if bound is None else bound
    if check.passed:
        state.least_error = check.error
    if check.passed and check.error <= most:
        return True
    wrong, name, why = check.reason, state.lane.name, ""
    if check.passed:
        passes = [_sparing(step) for step in passes]
    for attempt, steps in _attempts(passes):
        entry = manager.rescue(state, attempt, steps, MARGIN * most)
        if entry.verdict is Verdict.KEPT:
            notes.append(_kept(entry))
            return True
        why = f"; {attempt} does not help: {entry.reason}"
    if check.passed:
        return True
    has_searched = any(isinstance(step, KeepFp32) for step in passes)
    if _may_be_brought_within(verifier) and (math.isfinite(check.error) or not has_searched):
        return True
    notes.append(f"the {name} lane was not tried: eager itself is too inexact in it: {wrong}{why}")
    return False


def founded_anew(manager: PassManager, state: LaneState, passes: Sequence[Pass], bound: float) -> str | None:
    """Keep few operators in FP32, to leave room below `bound` for rewrites, each of which rounds anew.

    For a new lane whose first program is right, and to which all rewrites together are too inexact. Returns
    a note on them; None where that cannot be.
    """
    passes = [_sparing(step) for step in passes if not isinstance(step, BakeAutocast)]
    for attempt, steps in _attempts(passes):
        entry = manager.rescue(state, attempt, steps, MARGIN * bound)
        if entry.verdict is Verdict.KEPT:
            return _kept(entry)
    return None


def in_order(state: LaneState, passes: Sequence[Pass]) -> list[Pass]:
    """The passes in the order of the lane's recipes: those that have made it right come first."""
    first = [step.name for step in state.best.program.recipe]
    return sorted(passes, key=lambda step: first.index(step.name) if step.name in first else len(first))


def _attempts(passes: Sequence[Pass]) -> Iterator[tuple[str, list[Pass]]]:
    """What may make a lane right, by name."""
    ours = {type(step) for step in PIPELINE}
    exact = [s for s in passes if s.portable and s.family is Family.REWRITE and type(s) in ours]
    for kind in (BakeAutocast, KeepFp32):
        for step in (each for each in passes if isinstance(each, kind)):
            yield step.name, [*exact, step]


def _sparing(step: Pass) -> Pass:
    """The pass, with few operators in FP32 at the most if it is one that keeps them."""
    return dataclasses.replace(step, most=min(step.most, FEW)) if isinstance(step, KeepFp32) else step


def _may_be_brought_within(verifier: Verifier) -> bool:
    return verifier.tolerance is not None or verifier.metric is not None


def _kept(entry: Entry) -> str:
    if entry.name == "bake-autocast":
        return f"the {entry.lane} lane is right with the rewrites that need no precision before its casts"
    lines = entry.hints[: entry.rewrites]
    more = f"; and {len(lines) - MOST_NAMED} more" if len(lines) > MOST_NAMED else ""
    count = f"{entry.rewrites} operator{'s' if entry.rewrites > 1 else ''}"
    return f"the {entry.lane} lane is right with {count} in FP32: {'; '.join(lines[:MOST_NAMED])}{more}"
