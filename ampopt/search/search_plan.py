"""The search over all lanes: their openings first, then everything else in the lanes that may still win."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Mapping, Sequence

from ampopt.ir.lanes import Lane
from ampopt.ir.pipeline import Pipeline
from ampopt.ir.program import Program
from ampopt.ir.transform import Pass
from ampopt.measure.clocks import latency
from ampopt.measure.ledger import Ledger
from ampopt.measure.sampling import interleave
from ampopt.measure.verify import Verifier
from ampopt.passes import KeepFp32
from ampopt.search.foreseen import Foreseen
from ampopt.search.lane_search import LaneSearch
from ampopt.search.lane_state import LaneState
from ampopt.search.pass_manager import PassManager
from ampopt.search.rehearsal import Sandbox
from ampopt.search.rescue import MARGIN, founded_anew, rescued
from ampopt.system.budget import Budget
from ampopt.system.interrupts import check_interrupted
from ampopt.system.wording import argument

TRYING = 0.85
"""Share of the time budget after which nothing is tried; the rest is for the last comparison."""

OPENINGS = 0.4
"""Share of the search's time for the openings of all lanes together."""

ALONE = 0.9
"""Share of it for the opening of a lane where eager is too inexact in all others.

Those may still come to be right, and win; a compiler's result for the one that is right is likelier to.
"""

REOPENED = 0.6
"""Share of the search's time until which engines are tried again whose trial in an opening was noise."""

FUSING = 0.6
"""Share of the search's time for kernels that are measured in openings, or before those of later lanes."""

WAITING_S = 2.5
"""Seconds for which a compiler is waited for in the first lane, before another one is opened.

On an H200 it takes 1 to 3 s for what it begins on once kernels are chosen, and the opening of a lane 2 s.
"""

PATIENCE = 0.4
"""Share of the search's time after which nothing that is unlikely to gain is begun."""

LEADERS_SHARE = 0.6
"""Share of the remaining time for a lane that is ahead, if others may win, too."""

LEAST_REWRITING = 0.25
"""Share of a lane's time for rewrites, if an engine takes long."""

ENGINES_FIRST = 2.5
"""Nothing unlikely is tried before the longest engine if less than this many times its time is left."""

BEHIND = 1.3
"""A lane is not searched further if after its opening it is slower than another by this factor."""

FAR_BEHIND = 1.8
"""The same after other lanes were searched to the end: what is left seldom gains more."""

IN_FULL = 1.8
"""How many times faster an engine may be in full than in a hurry: ONNX Runtime is for ResNet-18 on a CPU."""

TOO_FAR_AHEAD = 1.5
"""Rewrites are left out if an engine that does not see them is faster than the graph by this factor."""

RIVAL = "rival"
"""The name of the time of what lanes have to be faster than, beside the names of lanes."""


def begin_ahead(program: Program, pipeline: Pipeline, sandbox: Sandbox | None) -> Foreseen:
    """Let compilers start, in processes of their own, on what the opening of a program should come to.

    If that comes to something else, or another lane is searched first, they get that instead. Returns what
    passes came to for it.
    """
    if sandbox is None or not sandbox.works_beside:
        return Foreseen()
    foreseen = Foreseen(lambda: sandbox.give_up(program))
    try:
        expected = foreseen.replay(LaneSearch.expected(program, pipeline), program)
        for step in (*pipeline.rewrites, *pipeline.engines):
            sandbox.begin(step, expected)
    except Exception as error:  # the opening, or the engine's trial, is going to tell
        check_interrupted(error)
    return foreseen


class Search:
    """The search over the lanes of one captured model; `states` holds what it has found."""

    def __init__(
        self,
        manager: PassManager,
        verifier: Verifier,
        ledger: Ledger,
        pipeline: Pipeline,
        budget: Budget,
        bound: float | None,
        rival: Callable[[], object] | None = None,
    ) -> None:
        """`bound` is the largest error of a lane of lower precision that may be chosen; None: no limit.

        `rival` calls what the lanes have to be faster than, beside each other.
        """
        self._rival = rival
        self._manager, self._verifier, self._ledger = manager, verifier, ledger
        self._pipeline, self._budget, self._bound = pipeline, budget, bound
        self.states: list[LaneState] = []

    def run(self, lanes: Mapping[Lane, float], begun: Mapping[str, tuple[Pass, ...]]) -> None:
        """Search lanes, in which a call takes so many seconds.

        `begun` has the recipes at which an earlier search was cut off: they take the openings' place.
        """
        searches: list[LaneSearch] = []
        began = time.perf_counter()
        left = self._manager.deadline - began
        ordered = self._likeliest_first(list(lanes), begun)
        if not begun:
            self._begin_on(ordered[0], list(lanes)[-1])
        for place, lane in enumerate(ordered, start=1):
            state, notes = self._manager.open(lane, lanes[lane]), self._ledger.notes
            rewrites = self._pipeline.rewrites
            if not rescued(self._manager, state, self._verifier, rewrites, notes, self._bound):
                continue
            search = self._begin(state, patience := began + PATIENCE * left)
            recipe = begun.get(lane.name, ())
            if not recipe or not search.resume(recipe):
                share = self._share(lane, list(lanes))
                until = max(began + place * share * left, time.perf_counter() + share * left)
                if search.opens_with_kernels:
                    until = max(until, began + FUSING * left)
                until = min(until, self._manager.deadline)
                if place > 1 and time.perf_counter() + self._manager.judging_s(state, None) > until:
                    until = -math.inf  # a trial of it would take the last comparison's time
                search.open(until, with_engine=self._is_usable(state) or len(lanes) == 1)
                if search.is_too_inexact:
                    search = self._opened_anew(search, lanes[lane], patience, share * left)
                if place == 1 and lane.is_mixed and len(lanes) > 1:
                    search.engines.begin()
                    search.fuse(began + FUSING * left)
                    search.engines.begin()
                    search.engines.await_made(min(time.perf_counter() + WAITING_S, began + FUSING * left))
            searches.append(search)
            for each in searches:
                each.engines.take_made()
        for search in searches:
            search.reopen(began + REOPENED * left)
        self.states.sort(key=lambda state: list(lanes).index(state.lane))
        contenders = self._contenders(searches)
        for search in contenders:
            search.engines.begin()
        for place, search in enumerate(contenders):
            if place and (behind := self._behind(search.state)) > FAR_BEHIND * _may_gain(search):
                self._leave_behind(search, f"it was {behind:.2f}x slower than what was found until then")
                continue
            self._deepen(search, 1.0 if place == len(contenders) - 1 else LEADERS_SHARE)
            search.state.made.clear()

    def _share(self, lane: Lane, lanes: Sequence[Lane]) -> float:
        """The share of the search's time until which the opening of one of the lanes may begin something."""
        if len(lanes) == 1 and self._rival is None:
            return 1.0
        sandbox = self._manager.sandbox
        waits = sandbox is None or not sandbox.works_beside  # for what a compiler makes
        is_alone = [each for each in lanes if self._is_exact_enough(each)] == [lane]
        return ALONE if waits and is_alone and self._rival is None else OPENINGS / len(lanes)

    def _begin(self, state: LaneState, patience: float) -> LaneSearch:
        """The search in an open lane that is right; compilers begin on what makes it so."""
        if state.founded and (sandbox := self._manager.sandbox) is not None:
            sandbox.give_up(state.base)
            self._manager.foreseen = begin_ahead(state.best.program, self._pipeline, sandbox)
        if state.lane.is_mixed and self._bound is not None and self._is_usable(state):
            state.bound = self._bound
        self.states.append(state)
        return LaneSearch(self._manager, state, self._pipeline, patience)

    def _begin_on(self, first: Lane, foreseen: Lane) -> None:
        """Compilers begin on the lane that comes first, where they did on one of lower precision.

        Whether eager is exact enough in that was not known then.
        """
        sandbox, captured = self._manager.sandbox, self._manager.captured
        if first != foreseen and sandbox is not None and sandbox.works_beside:
            sandbox.give_up(foreseen.start(captured))
            self._manager.foreseen = begin_ahead(first.start(captured), self._pipeline, sandbox)

    def _opened_anew(self, first: LaneSearch, call_s: float, patience: float, seconds: float) -> LaneSearch:
        """The search in the lane begun anew on few operators in FP32, see `founded_anew`.

        The first one goes on where that cannot be, or where what it opens with is slower.
        """
        anew, bound = self._manager.open(first.state.lane, call_s), first.state.bound
        if self._verifier.tolerance is not None:
            bound = min(bound, self._verifier.tolerance)
        note = founded_anew(self._manager, anew, self._pipeline.rewrites, bound)
        if note is None:
            return first
        second = self._begin(anew, patience)
        second.open(min(time.perf_counter() + seconds, self._manager.deadline))
        before, after = first.state.best_s, anew.best_s
        if before is not None and (after is None or after > before):
            self.states.remove(anew)
            return first
        self.states.remove(first.state)
        self._ledger.notes.append(note)
        return second

    def _likeliest_first(self, lanes: Sequence[Lane], begun: Container[str]) -> Sequence[Lane]:
        """The lanes in the order of their openings.

        Where compilers work beside measurements, the lowest precision comes first, unless it has to be
        rescued and TF32 may not do that: it wins most often.
        """
        sandbox, last = self._manager.sandbox, lanes[-1]
        if sandbox is None or not sandbox.works_beside:
            return lanes
        may_win = self._is_exact_enough(last) or self._is_exact_enough_in_tf32(last)
        return [last, *lanes[:-1]] if may_win else lanes

    def note_what_was_cut_off(self) -> bool:
        """Note how many trials there was no time for, and what budget they need; True if there are none."""
        cut = [entry for entry in self._ledger.entries if entry.needs_s is not None]
        if not cut:
            return True
        names = list(dict.fromkeys(entry.name for entry in cut))
        engines = {engine.name for engine in self._pipeline.engines}
        found = next((name.partition(" ")[0] for name in names if name.partition(" ")[0] in engines), None)
        among = f", {found} among them," if found is not None and len(names) > 1 else ""
        needed_s = sum(entry.needs_s or 0.0 for entry in cut)
        within = (time.perf_counter() - self._budget.started + needed_s) / TRYING
        whole = max(within, self._budget.seconds + needed_s)  # it is a lane's share that was over
        unit = 10.0 ** max(math.floor(math.log10(whole)) - 1, 0)
        what = f"{len(names)} passes{among} were" if len(names) > 1 else f"{names[0]} was"
        enough = argument("budget_s", round(unit * math.ceil(whole / unit)))
        self._ledger.notes.append(
            f"{what} not tried for want of time: {enough} would do, or another call, which goes on from here"
        )
        return False

    def _contenders(self, searches: Sequence[LaneSearch]) -> list[LaneSearch]:
        """The lanes that may win, by latency after their openings; the ledger notes why not others.

        A lane whose own error is over the limit is not going to be chosen. After the same passes a lane that
        is far behind another stays behind, because what makes one faster makes the other faster.
        """
        usable = [search for search in searches if self._is_usable(search.state)] or list(searches)
        for search in searches:
            if search not in usable:
                error = self._verifier.own_error(search.state.lane)
                why = f"eager's own error in it is {error:.2g}, over the tolerance {self._bound:g}"
                self._leave(search, f"{why} ({argument('precision', search.name)} searches it)")
        if len(usable) < 2 and (self._rival is None or not usable):
            return usable
        device = usable[0].state.base.device
        calls = {search.name: latency(search.opened.call, device) for search in usable}
        if self._rival is not None:
            calls[RIVAL] = latency(self._rival, device)
        timed = interleave(calls, seconds=0.2, least=3)
        took = {name: measured.median for name, measured in timed.items()}
        fastest = min(took.values())
        contenders: list[LaneSearch] = []
        for search in sorted(usable, key=lambda search: took[search.name]):
            behind = took[search.name] / fastest
            if search.is_launched and behind > BEHIND * _may_gain(search):
                self._leave_behind(search, f"after its opening it was {behind:.2f}x slower than another")
            else:
                contenders.append(search)  # also where there was no time to launch it: it may be faster
        return contenders

    def _leave_behind(self, search: LaneSearch, why: str) -> None:
        """Of the lanes only FP32 can be searched alone: beside another it is always a candidate."""
        alone = "" if search.state.lane.is_mixed else f" ({argument('precision', search.name)} searches it)"
        self._leave(search, why + alone)

    def _leave(self, search: LaneSearch, why: str) -> None:
        self._ledger.notes.append(f"the {search.name} lane was searched no further than its opening: {why}")

    def _behind(self, state: LaneState) -> float:
        """How many times slower a lane is than the fastest of all, each in its own trial."""
        found = [each.best_s for each in self.states if each.best_s is not None and self._is_usable(each)]
        return state.best_s / min(found) if found and state.best_s is not None else 1.0

    def _is_usable(self, state: LaneState) -> bool:
        """Whether a lane's error is going to be within the bound: it was made so, or that of a program is."""
        is_within = self._bound is not None and state.least_error <= self._bound
        return bool(state.founded) or is_within or self._is_exact_enough(state.lane)

    def _is_exact_enough_in_tf32(self, lane: Lane) -> bool:
        """Whether a lane may come to what the original is as it is called, with TF32; see `keep-fp32`."""
        called = self._verifier.called_error
        if called is None or self._bound is None or not lane.is_mixed:
            return False
        keeps = any(isinstance(step, KeepFp32) for step in self._pipeline.rewrites)
        return keeps and called <= MARGIN * self._bound

    def _is_exact_enough(self, lane: Lane) -> bool:
        if self._bound is None or not lane.is_mixed:
            return True
        return self._verifier.own_error(lane) <= self._bound

    def _deepen(self, search: LaneSearch, share: float) -> None:
        """Everything after the opening in one lane, within a share of the time that is left.

        A compiler starts in its own process first, if it may work beside measurements. Rewrites leave time
        for the engine that takes longest, up to a limit.
        """
        now, engines = time.perf_counter(), search.engines
        engines.begin()
        deadline = now + share * (self._manager.deadline - now)
        engines.run_put_off(deadline)
        longest = engines.longest_s()
        rewriting = max(now + LEAST_REWRITING * (deadline - now), deadline - longest)
        if (ahead := engines.lead) > TOO_FAR_AHEAD:
            search.leave_rewrites(f"the graph itself takes {ahead:.1f}x the time of the best engine")
        else:

            def until(needed_s: float) -> bool:
                late = deadline - time.perf_counter() < ENGINES_FIRST * longest
                return late or needed_s > engines.compiling_s()

            search.rewrite(rewriting, until)
            engines.begin()
            search.launch(deadline)
            search.vary(rewriting, until)
            search.launch(deadline)
        engines.run(deadline)


def _may_gain(search: LaneSearch) -> float:
    """How many times faster a lane may become by what it had no time for in its opening."""
    return IN_FULL if search.engines.is_hurried else 1.0
