"""Makes a mixed lane right before anything is built on it, or leaves it out with the evidence.

In a lane whose first program is over its limit, every pass on top of it would be wrong, too. So `keep-fp32` comes
first there, and is kept whatever it costs: there is nothing right to compare it with. It is also first in the lane's
recipes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ampopt.ir.transform import Pass
from ampopt.measure.entry import Entry, Verdict
from ampopt.measure.verify import Verifier
from ampopt.passes import KeepFp32
from ampopt.search.pass_manager import LaneState, PassManager

MOST_NAMED = 8
"""Operators that a note names; the report's data has them all."""


def rescued(
    manager: PassManager, state: LaneState, verifier: Verifier, passes: Sequence[Pass], notes: list[str]
) -> bool:
    """Whether a new lane is right, or `keep-fp32` has made it right; the notes say what was kept, or why not.

    Without that pass, a lane stays open for a user's tolerance or metric, within which other passes may bring it.
    """
    if not state.lane.is_mixed:
        return True
    wrong = verifier.check_errors(state.best.run, state.lane).reason
    if wrong is None:
        return True
    if (step := next((each for each in passes if isinstance(each, KeepFp32)), None)) is None:
        if verifier.tolerance is not None or verifier.metric is not None:
            return True
        notes.append(f"{_left_out(state)}: {wrong}")
        return False
    entry = manager.rescue(state, step)
    if entry.verdict is Verdict.KEPT:
        notes.append(_kept(entry))
        return True
    notes.append(f"{_left_out(state)}: {wrong}; keep-fp32 does not help: {entry.reason}")
    return False


def in_order(state: LaneState, passes: Sequence[Pass]) -> list[Pass]:
    """The passes in the order in which the lane's recipes have them: what has made it right comes first."""
    first = {step.name for step in state.best.program.recipe if isinstance(step, KeepFp32)}
    return sorted(passes, key=lambda step: step.name not in first)


def _left_out(state: LaneState) -> str:
    return f"the {state.lane.name} lane was not tried: eager itself is too inexact in it"


def _kept(entry: Entry) -> str:
    lines = entry.hints[: entry.rewrites]
    more = f"; and {len(lines) - MOST_NAMED} more" if len(lines) > MOST_NAMED else ""
    count = f"{entry.rewrites} operator{'s' if entry.rewrites > 1 else ''}"
    return f"the {entry.lane} lane is right with {count} in FP32: {'; '.join(lines[:MOST_NAMED])}{more}"
