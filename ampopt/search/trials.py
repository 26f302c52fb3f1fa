"""How a trial runs: apply, verify, time, and decide, with what it may take and what it needs."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence

from ampopt.errors import AmpoptError, first_line
from ampopt.ir.graph import where
from ampopt.ir.judged import Judged
from ampopt.ir.lanes import Lane
from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.ir.signature import own_copies
from ampopt.ir.transform import Declined, Engine, Family, Pass, Result, exits_failed, outcome
from ampopt.measure.clocks import synchronize
from ampopt.measure.entry import Entry, Verdict
from ampopt.measure.ledger import BestSoFar, Ledger
from ampopt.measure.report import interval
from ampopt.measure.verifiers_judge import VerifiersJudge
from ampopt.measure.verify import Verifier
from ampopt.search.estimates import expected_s
from ampopt.search.foreseen import Foreseen
from ampopt.search.lane_state import LaneState
from ampopt.search.play_off import note_rival
from ampopt.search.rehearsal import Sandbox
from ampopt.search.subject import Subject
from ampopt.search.trial import Trial
from ampopt.search.trial_timer import TrialTimer
from ampopt.system.budget import CALLS_OF_A_TRIAL
from ampopt.system.interrupts import check_interrupted, held, was_interrupted
from ampopt.system.wording import argument

logger = logging.getLogger("ampopt")

LEAST_ENABLING = 0.95
"""Largest loss of a pass that later passes build on; it is removed at the end if they gain nothing."""

SPENT = "the time budget was spent"
"""The reason of a trial that was not begun."""

CALLS_FOR_AN_ENGINE = 30
"""Number of calls in the trial of an engine. On a CPU they include an untimed call before each timed one."""

OWN_SHARE = 0.4
"""Share of a compiler's time that it takes in this process, after its rehearsal."""

LOADING_SHARE = 0.15
"""The same where what a rehearsal has made beside other work is loaded: 2 s of MixNet-S's 16 on an H100."""

MOST_FORMER = 3
"""Programs that were the best before the present one and are kept, the latest: engines hold memory."""

LOOKING_FAR = 0.06
"""Largest share of a search for verifying what is to lead outside of the examples' range, once."""

SEARCHING = 0.25
"""The share of the time that is left in which a pass that searches may make programs."""

Progress = Callable[[str, str], None]
"""Called with (lane, pass) when work on a pass starts."""


def silent(_lane: str, _name: str) -> None:
    """A progress callback that does nothing."""


class Trials:
    """The trials of one captured model, one at a time: their clocks, their rows, their verdicts."""

    def __init__(
        self,
        captured: Program,
        verifier: Verifier,
        ledger: Ledger,
        *,
        deadline: float,
        sample_s: float = 0.4,
        progress: Progress | None = None,
        sandbox: Sandbox | None = None,
        started: float | None = None,
        foreseen: Foreseen | None = None,
    ) -> None:
        """`deadline` and `started` are on `time.perf_counter`'s clock; a comparison takes `sample_s`.

        Risky passes are rehearsed in the `sandbox` first, if there is one. What was `foreseen` is taken by
        the first trial that would repeat it.
        """
        self.foreseen = foreseen or Foreseen()
        self.captured, self.verifier, self.ledger = captured, verifier, ledger
        self.deadline, self.timer = deadline, TrialTimer(sample_s)
        self._progress, self.sandbox = progress or silent, sandbox
        self._started = time.perf_counter() if started is None else started
        self._applied_s: dict[str, float] = {}
        """Time in seconds that an engine took to be applied the last time, by its name."""

    def run(
        self,
        state: LaneState,
        name: str,
        deadline: float,
        work: Callable[[Trial], None],
        needed_s: float | None = None,
        of: Sequence[Pass] = (),
    ) -> Trial:
        """Do the work of a trial, which ends it; what fails in it fails alone, and is its row.

        `of` are the passes that it tries. What there is no time left for is not begun; its row says what it
        needs, if anything is lost by that.
        """
        self._progress(state.lane.name, name)
        trial = Trial(Entry(state.lane.name, name, Verdict.NOT_TRIED, ""), deadline)
        check_interrupted()
        if trial.began > deadline:
            trial.note(needs_s=needed_s)
            self.end(trial, Verdict.NOT_TRIED, SPENT)
            return trial
        try:
            work(trial)
        except (Exception, KeyboardInterrupt) as error:
            if was_interrupted(error):
                if not trial.is_over:
                    self.end(trial, Verdict.NOT_TRIED, "interrupted")
                raise KeyboardInterrupt from error
            logger.debug("pass %s failed", name, exc_info=True)
            trial.program = None
            self.end(trial, Verdict.FAILED, first_line(error))
            self._check_device(name, of or state.graph.program.recipe)
        return trial

    def leave_out(self, state: LaneState, name: str, reason: str) -> None:
        """Write down that something is not tried, and why."""
        self._tell(Entry(state.lane.name, name, Verdict.NOT_TRIED, reason))

    def needed_s(self, state: LaneState, step: Pass, program: Program) -> float:
        """The expected time in seconds to apply a pass to a program and judge the result."""
        return self.applying_s(step, program) + self.judging_s(state, step)

    def judging_s(self, state: LaneState, step: Pass | None) -> float:
        """The time in seconds to judge a program: a minimum, or what it took in this lane so far."""
        is_engine = step is not None and step.family is Family.ENGINE
        calls = CALLS_FOR_AN_ENGINE if is_engine else CALLS_OF_A_TRIAL
        return max(state.call_s * calls, state.judging_s)

    def applying_s(self, step: Pass, program: Program) -> float:
        """The time in seconds to apply a pass: what it took the last time, if it is an engine.

        A rehearsal that was begun ahead takes that much less, and one in pieces as long as the largest; the
        pass itself takes a part of its own.
        """
        whole = self._applied_s.get(step.name, expected_s(step, program))
        if self.sandbox is None:
            return whole
        if self.sandbox.has_made(step, program):
            return LOADING_SHARE * whole
        rehearsed = min(whole, self.sandbox.expected_s(step, program))
        return max(rehearsed - self.sandbox.ahead_s(step, program), OWN_SHARE * whole)

    @exits_failed()
    def apply(
        self, trial: Trial, step: Pass, program: Program, judging: float, bound: float = math.inf
    ) -> Program | None:
        """Apply a pass; None, and the trial's end, where it does nothing or there is no time to judge it.

        `judging` is what that takes at the least, in seconds; `bound` is the largest error that a pass which
        searches may leave.
        """
        if (declined := step.why_not(program)) is not None:
            self.end(trial, Verdict.DECLINED, declined)
            return None
        left = trial.deadline - time.perf_counter() - judging
        needed = self.applying_s(step, program)
        if isinstance(step, Engine) and needed > left and (hurried := step.hurried()) != step:
            step, needed, trial.hurried = hurried, expected_s(hurried, program), True
        if needed > left:
            more, rest = needed + judging, max(left + judging, 0.0)
            trial.note(needs_s=more)
            reason = f"it needs about {more:.3g} s, and {rest:.3g} s of the budget are left"
            self.end(trial, Verdict.NOT_TRIED, reason)
            return None
        step, began = step.within(left), time.perf_counter()
        if isinstance(step, Judged):
            judge = VerifiersJudge(self.verifier, program.lane, began + SEARCHING * left, bound)
            result, unrehearsed = outcome(program, lambda given: step.apply_judged(given, judge)), None
        else:
            result, unrehearsed = self.applied(step, program, left)
        if isinstance(step, Engine) and not trial.hurried:
            self._applied_s[step.name] = time.perf_counter() - began
        result = dataclasses.replace(result, declined=with_places(result.declined, program))
        hints = (*result.hints, *([f"not rehearsed: {unrehearsed}"] if unrehearsed else []))
        trial.note(rewrites=result.rewrites, declined=result.declined, hints=hints, seconds=trial.seconds)
        if not result.modified:
            self.end(trial, Verdict.DECLINED, why_nothing(result))
            return None
        return result.program.replace(recipe=(*result.program.recipe, result.replay or step))

    def applied(self, step: Pass, program: Program, seconds: float) -> tuple[Result, str | None]:
        """What a pass comes to, and None or why it could not be rehearsed; see `Sandbox.apply`."""
        if self.sandbox is None:
            return outcome(program, step.apply), None
        return self.sandbox.apply(step, program, seconds=seconds)

    def check(self, subject: Subject, lane: Lane, *, everywhere: bool = False) -> Check:
        """Verify a program, which must write to nothing that others read."""
        return subject.checked(lambda: self.verifier.check(subject.run, lane, everywhere=everywhere))

    def is_right(
        self, trial: Trial, state: LaneState, candidate: Subject, same_bits_as: Program | None = None
    ) -> bool:
        """Verify; what is wrong ends the trial. `same_bits_as`: whose every bit must have stayed."""
        check = self.check(candidate, state.lane)
        trial.note(error=check.error, limit=check.limit)
        wrong = check.reason
        if wrong is None and check.error > state.bound:
            wrong = f"its error {check.error:.2g} is over the tolerance {state.bound:g}"
        if wrong is None and same_bits_as is not None:
            wrong = differing_bits(same_bits_as, candidate)
        if wrong is not None:
            self.end(trial, Verdict.REVERTED, wrong)
        else:
            state.least_error = min(state.least_error, check.error)
        return wrong is None

    def judge(
        self,
        trial: Trial,
        state: LaneState,
        candidate: Subject,
        step: Pass | None = None,
        same_bits_as: Program | None = None,
        *,
        runs: bool = False,
    ) -> None:
        """Verify, time, decide; what is right and faster is kept.

        It is judged as `step` is; None: as a rewrite. Rewrites are compared with the lane's graph. Engines,
        launches, and what `runs` otherwise, are compared with its best, on latency.
        """
        began = time.perf_counter()
        if not self.is_right(trial, state, candidate, same_bits_as):
            return
        runs = runs or (step is not None and step.family in (Family.ENGINE, Family.LAUNCH))
        is_kept_anyway = step is not None and step.enables_others
        other = state.best if runs else state.graph
        found, written = candidate.watched(
            lambda: self.timer.time(trial, other, candidate, runs, not is_kept_anyway)
        )
        if written is not None:
            self.end(trial, Verdict.REVERTED, written)
            return
        mine = next((s for s in candidate.program.recipe if step is not None and s.name == step.name), None)
        if is_kept_anyway and (not found.is_loss or found.ratio >= LEAST_ENABLING):
            verdict, what = Verdict.KEPT, "faster" if found.is_real else "later passes build on it"
            if found.is_loss and mine is not None:
                state.at_a_loss.append(mine)
        elif found.is_real:
            verdict, what = Verdict.KEPT, "faster"
        else:
            verdict, what = Verdict.REVERTED, "slower" if found.is_loss else "no gain outside the noise"
            if mine is not None and mine.family in (Family.REWRITE, Family.PLACEMENT):
                state.too_slow.append(mine)
        leads = runs or state.best is state.graph
        if verdict is Verdict.KEPT and leads and (why := self._why_wrong_elsewhere(state, candidate)):
            self.end(trial, Verdict.REVERTED, f"{what}, but wrong elsewhere: {why}")
            return
        trial.program = candidate.program
        if leads:
            before = state.best if runs else state.graph
            note_rival(state, before, candidate, found, kept=verdict is Verdict.KEPT)
        state.judging.append(time.perf_counter() - began)
        with held():  # the programs and the row belong together
            if verdict is Verdict.KEPT:
                assert trial.entry.after is not None
                self._keep(state, candidate, trial.entry, runs)
            pace = f"{what}: {found.ratio:.3f}x ({interval(found, 3)})"
            self.end(trial, verdict, pace)

    def _why_wrong_elsewhere(self, state: LaneState, candidate: Subject) -> str | None:
        """Why a program must not lead, for what it gives far outside of the examples' range; None if it may.

        A wrong one would be the yardstick of those that come after it, and leave nothing when it falls. Where
        calls take long, only the winner is verified there, see `PassManager.settle`.
        """
        if self.verifier.settling_s(state.call_s) > LOOKING_FAR * (self.deadline - self._started):
            return None
        check = self.check(candidate, state.lane, everywhere=True)
        candidate.settled = check if check.passed else None
        return check.reason

    def lead(self, state: LaneState, subject: Subject, name: str, seconds: float) -> None:
        """A program that a call takes so many seconds of is the lane's best now; `name` is its trial's."""
        state.former = [*state.former, state.best][-MOST_FORMER:]
        state.best, state.best_s = subject, seconds
        at = time.perf_counter() - self._started
        self.ledger.best_so_far.append(BestSoFar(at, state.lane.name, name, seconds))

    def _keep(self, state: LaneState, candidate: Subject, entry: Entry, runs: bool) -> None:
        """The candidate is the lane's best, or its graph, which may be the best itself."""
        assert entry.after is not None
        seconds, is_best = entry.after.latency.median, runs or state.best is state.graph
        if not runs:
            state.graph, state.call_s = candidate, seconds
        if is_best:
            self.lead(state, candidate, entry.name, seconds)

    def _check_device(self, name: str, of: Sequence[Pass]) -> None:
        """Say so at once where a failed pass has left the CUDA context unusable."""
        try:
            synchronize(self.captured.device)
        except Exception as error:
            without = argument("exclude", [step.name for step in of])
            raise AmpoptError(
                f"{name} has broken this process's CUDA context ({first_line(error)}): leave out what does "
                f"with {without}, in a new process"
            ) from error

    def end(self, trial: Trial, verdict: Verdict, reason: str) -> None:
        self._tell(trial.end(verdict, reason))

    def _tell(self, row: Entry) -> None:
        """Write down what became of a trial; that there was no time for it before is not worth a row then."""
        key, entries = (row.lane, row.name), self.ledger.entries
        entries[:] = [each for each in entries if (each.lane, each.name) != key or each.needs_s is None]
        entries.append(row)


def with_places(declined: Sequence[Declined], program: Program) -> tuple[Declined, ...]:
    """What a pass left alone, each node with where in the user's model it comes from."""
    named = {node.name: where(node) for node in program.graph.graph.nodes}
    return tuple(Declined(named.get(found.node, found.node), found.reason) for found in declined)


def why_nothing(result: Result) -> str:
    if not result.declined:
        return "there is nothing to rewrite"
    first = result.declined[0]
    more = f" (and {len(result.declined) - 1} more)" if len(result.declined) > 1 else ""
    return f"{first.node}: {first.reason}{more}"


def differing_bits(before: Program, candidate: Subject) -> str | None:
    ran = (run(*own_copies(candidate.program.examples)) for run in (before.run, candidate.run))
    pairs = zip(*ran, strict=True)
    if all(a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs):
        return None  # NaN is the same as NaN, and as nothing else
    return "it claims to keep every bit and does not"
