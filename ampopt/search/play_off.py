"""The play-off: programs that other load on the machine may have cost their place meet the best once more.

A trial takes half a second. Where another process has the cores for that long, its interval reaches from a
loss to a large gain, and whatever the verdict says, it is chance: OpenVINO, 1.7 times faster than the graph,
was reverted, and the call answered with less than half of the speed that it has on a quiet machine.
"""

from __future__ import annotations

from ampopt.measure.sampling import Gain
from ampopt.search.lane_state import LaneState
from ampopt.search.subject import Subject

MOST_RIVALS = 3
"""Programs of a lane that wait for a play-off, the latest: each may hold an engine with its memory."""

PLAY_OFF = "play-off"
"""The row of a play-off."""

LEAST_CHANCE, SURE = 1.05, 1.25
"""A loser may be faster if a vague interval contains the first gain; a winner is sure from the second on."""


def note_rival(state: LaneState, before: Subject, candidate: Subject, found: Gain, *, kept: bool) -> None:
    """Keep the loser of a trial for the play-off where its interval leaves open who is faster."""
    if not found.is_vague or (found.low > SURE if kept else found.high < LEAST_CHANCE):
        return
    loser = before if kept else candidate
    if loser not in state.rivals:
        state.rivals = [*state.rivals, loser][-MOST_RIVALS:]
