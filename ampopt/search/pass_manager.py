"""The pass manager: applies, verifies and times one pass or recipe, and keeps or reverts it with a reason."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence

from ampopt.engines.executable import executable
from ampopt.errors import AmpoptError, first_line
from ampopt.ir.graph import where
from ampopt.ir.judged import Judged
from ampopt.ir.lanes import Lane
from ampopt.ir.program import Program
from ampopt.ir.transform import Declined, Engine, Family, Numerics, Pass, Result, replay
from ampopt.measure.clocks import synchronize
from ampopt.measure.entry import Entry, Verdict
from ampopt.measure.ledger import BestSoFar, Ledger
from ampopt.measure.verifiers_judge import VerifiersJudge
from ampopt.measure.verify import Verifier
from ampopt.search.lane_state import LaneState
from ampopt.search.play_off import PLAY_OFF, note_rival
from ampopt.search.rehearsal import Sandbox
from ampopt.search.subject import Subject
from ampopt.search.trial import Trial
from ampopt.search.trial_timer import TrialTimer
from ampopt.system.budget import CALLS_OF_A_TRIAL
from ampopt.system.interrupts import check_interrupted, held, was_interrupted

logger = logging.getLogger("ampopt")

LEAST_ENABLING = 0.95
"""Largest loss of a pass that later passes build on; it is removed at the end if they gain nothing."""

SPENT = "the time budget was spent"
"""The reason of a trial that was not begun."""

CALLS_FOR_AN_ENGINE = 60
"""Number of calls in the trial of an engine.

On a CPU they include an untimed call before each timed one, and a repeated comparison if there is noise.
"""

GRACE_S = 3.0
"""Time in seconds to judge what an engine made that took longer than it was expected to."""

OWN_SHARE = 0.4
"""Share of a compiler's time that it takes in this process, after its rehearsal."""

SEARCHING = 0.25
"""The share of the time that is left in which a pass that searches may make programs."""

Progress = Callable[[str, str], None]
"""Called with (lane, pass) when work on a pass starts."""


def silent(_lane: str, _name: str) -> None:
    """A progress callback that does nothing."""


class PassManager:
    """Judges the passes of one captured model, one trial at a time; see the module.

    `lane_search.LaneSearch` decides what is tried, and in which order.
    """

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
    ) -> None:
        """`deadline` and `started` are on `time.perf_counter`'s clock; a comparison takes `sample_s`.

        Risky passes are rehearsed in the `sandbox` first, if there is one.
        """
        self._captured, self._verifier, self._ledger = captured, verifier, ledger
        self.deadline, self._timer = deadline, TrialTimer(sample_s)
        self._progress, self.sandbox = progress or silent, sandbox
        self._started = time.perf_counter() if started is None else started
        self._applied_s: dict[str, float] = {}
        """Time in seconds that an engine took to be applied the last time, by its name."""

    def open(self, lane: Lane, call_s: float = 0.0) -> LaneState:
        """Start a lane with the captured program, whose call takes about `call_s` seconds."""
        program = lane.start(self._captured)
        subject = Subject(program)
        return LaneState(lane, subject, subject, program, call_s)

    def rescue(self, state: LaneState, name: str, steps: Sequence[Pass], bound: float = math.inf) -> Entry:
        """Keep passes on a lane's first program, which is wrong, if they make it right; see `search.rescue`.

        All but the last one may have nothing to do. `bound` is the largest error that is right.
        """

        def work(trial: Trial) -> None:
            before = replay(tuple(steps[:-1]), state.best.program)
            judging = self._judging_s(state, steps[-1])
            program = self._apply(trial, steps[-1], before, judging, bound)
            if program is not None and self._is_right(trial, state, candidate := Subject(program)):
                if (error := trial.entry.error) is not None and error > bound:
                    self._end(trial, Verdict.REVERTED, f"its error {error:.2g} is over {bound:g}")
                    return
                with held():
                    state.best = state.graph = candidate
                    state.founded = len(program.recipe)
                    behind = " + ".join(step.name for step in before.recipe)
                    self._end(
                        trial, Verdict.KEPT, "it makes the lane right" + (behind and f" behind {behind}")
                    )

        return self._run(state, name, self.deadline, work).entry

    def recall(self, state: LaneState, recipe: tuple[Pass, ...]) -> bool:
        """Replay a cached recipe without timing; whether it is complete and correct.

        If so, it becomes the best.
        """

        def work(trial: Trial) -> None:
            program = _replayed(trial, recipe, state)
            if len(program.recipe) != len(recipe):
                raise AmpoptError("not every pass of it applies here")
            if self._is_right(trial, state, candidate := Subject(program)):
                with held():
                    state.best = candidate
                    self._end(trial, Verdict.KEPT, "it won before; the last comparison times it")

        if recipe:
            self._run(state, "tuned before", self.deadline, work)
        return state.best.program.recipe == recipe

    def settle(self, state: LaneState) -> None:
        """Verify a lane's winner also far outside of the examples' range; remove passes that are wrong there.

        The check of the remaining program is stored in `state.check`. Bisection of the recipe finds the wrong
        pass: the first one with which the recipe is wrong.
        """
        while True:
            began, recipe = time.perf_counter(), state.best.program.recipe
            check = self._verifier.check(state.best.run, state.lane, everywhere=True)
            if check.passed or len(recipe) <= state.founded:
                state.check = check
                return
            wrong = recipe[self._right_until(state, recipe)]
            state.best = Subject(state.replayed(tuple(step for step in recipe if step is not wrong)))
            row = Entry(
                state.lane.name, wrong.name, Verdict.NOT_TRIED, "", error=check.error, limit=check.limit
            )
            reason = f"it won, but is wrong elsewhere: {check.reason}"
            self._end(Trial(row, self.deadline, began), Verdict.REVERTED, reason)

    def _right_until(self, state: LaneState, recipe: tuple[Pass, ...]) -> int:
        """How many passes of a recipe that is wrong somewhere are right together."""
        right, wrong = state.founded, len(recipe)
        while wrong - right > 1:
            middle = (right + wrong) // 2
            program = state.replayed(recipe[:middle])
            check = self._verifier.check(executable(program), state.lane, everywhere=True)
            right, wrong = (middle, wrong) if check.passed else (right, middle)
        return right

    def try_passes(
        self, state: LaneState, name: str, steps: Sequence[Pass], program: Program, deadline: float
    ) -> Trial:
        """Try passes on a program, one on top of the other; the last one says how the outcome is judged."""

        def work(trial: Trial) -> None:
            changed: Program | None = program
            same_bits_as: Program | None = None
            for step in steps:
                before = changed
                assert before is not None
                changed = self._apply(trial, step, before, self._judging_s(state, steps[-1]))
                if changed is None:
                    return
                if isinstance(step, Engine):  # it has taken its time: what it made is judged
                    trial.deadline = max(trial.deadline, time.perf_counter() + GRACE_S)
                keeps_bits = step.numerics_on(before) is Numerics.BITWISE
                same_bits_as = (same_bits_as or before) if keeps_bits else None
            assert changed is not None
            self._judge(trial, state, Subject(changed), steps[-1], same_bits_as)

        needed = None
        if all(step.why_not(program) is None for step in steps):
            needed = self._judging_s(state, steps[-1]) + sum(self._applying_s(s, program) for s in steps)
        return self._run(state, name, deadline, work, needed)

    def try_in_place(
        self, state: LaneState, step: Pass, later: Sequence[Pass], deadline: float, name: str = ""
    ) -> Trial:
        """Try a pass in its own place in the recipe: before the passes that come `later` in the pipeline."""
        names = {each.name for each in later}
        recipe = state.graph.program.recipe
        after = tuple(each for each in recipe if each.name in names)
        if not after:
            return self.try_passes(state, name or step.name, [step], state.graph.program, deadline)

        def work(trial: Trial) -> None:
            before = state.replayed(tuple(each for each in recipe if each not in after))
            changed = self._apply(trial, step, before, self._judging_s(state, step))
            if changed is not None:
                self._judge(trial, state, Subject(replay(after, changed)), step)

        return self._run(state, name or step.name, deadline, work, self._judging_s(state, step))

    def try_recipe(
        self, state: LaneState, name: str, recipe: tuple[Pass, ...], deadline: float, step: Pass | None = None
    ) -> Trial:
        """Try a recipe on the lane's first program; it is judged as `step` is, or else as a rewrite."""

        def work(trial: Trial) -> None:
            self._judge(trial, state, Subject(_replayed(trial, recipe, state)), step)

        return self._run(state, name, deadline, work, self._judging_s(state, step))

    def try_graph(self, state: LaneState, name: str, deadline: float) -> Trial:
        """Try the lane's rewritten graph, run directly, against its best program."""

        def work(trial: Trial) -> None:
            self._judge(trial, state, state.graph, runs=True)

        return self._run(state, name, deadline, work, self._judging_s(state, None))

    def try_together(self, state: LaneState, name: str, steps: Sequence[Pass], deadline: float) -> Trial:
        """Try passes as one rewrite; if it is kept, each of them has a row that says what it did in it."""
        rows: list[Entry] = []

        def work(trial: Trial) -> None:
            program = state.graph.program
            for step in steps:
                before, began = program, time.perf_counter()
                program, row = self._part(trial, step, before, state.lane)
                rows.append(dataclasses.replace(row, took_s=time.perf_counter() - began))
                state.remember(program.recipe, program)
            changed = [row for row in rows if row.verdict is Verdict.KEPT]
            trial.note(rewrites=sum(row.rewrites for row in changed), seconds=trial.seconds)
            if not changed:
                self._end(trial, Verdict.DECLINED, "there is nothing to rewrite")
                return
            self._judge(trial, state, Subject(program))

        trial = self._run(state, name, deadline, work)  # each of them is tried by itself later
        if trial.entry.verdict in (Verdict.KEPT, Verdict.DECLINED):
            self._ledger.entries += rows
        return trial

    def _part(self, trial: Trial, step: Pass, program: Program, lane: Lane) -> tuple[Program, Entry]:
        """Apply a pass of several that are tried together; its row has what it did, and no times."""
        if (declined := step.why_not(program)) is not None:
            return program, Entry(lane.name, step.name, Verdict.DECLINED, declined)
        result = step.within(trial.deadline - time.perf_counter()).apply(program)
        left_alone = _with_places(result.declined, program)
        row = Entry(
            lane.name, step.name, Verdict.KEPT, f"part of {trial.entry.name}, which is timed as a whole",
            rewrites=result.rewrites, declined=left_alone, hints=result.hints,
        )  # fmt: skip
        if not result.modified:
            reason = _why_nothing(dataclasses.replace(result, declined=left_alone))
            return program, dataclasses.replace(row, verdict=Verdict.DECLINED, reason=reason)
        return result.program.replace(recipe=(*program.recipe, result.replay or step)), row

    def _run(
        self,
        state: LaneState,
        name: str,
        deadline: float,
        work: Callable[[Trial], None],
        needed_s: float | None = None,
    ) -> Trial:
        """Do the work of a trial, which ends it; what fails in it fails alone, and is its row.

        What there is no time left for is not begun; its row says what it needs, if anything is lost by that.
        """
        self._progress(state.lane.name, name)
        trial = Trial(Entry(state.lane.name, name, Verdict.NOT_TRIED, ""), deadline)
        check_interrupted()
        if trial.began > deadline:
            trial.note(needs_s=needed_s)
            self._end(trial, Verdict.NOT_TRIED, SPENT)
            return trial
        try:
            work(trial)
        except (Exception, KeyboardInterrupt) as error:
            if was_interrupted(error):
                if not trial.is_over:
                    self._end(trial, Verdict.NOT_TRIED, "interrupted")
                raise KeyboardInterrupt from error
            logger.debug("pass %s failed", name, exc_info=True)
            trial.program = None
            self._end(trial, Verdict.FAILED, first_line(error))
            self._check_device(name)
        return trial

    def leave_out(self, state: LaneState, name: str, reason: str) -> None:
        """Write down that something is not tried, and why."""
        row = Entry(state.lane.name, name, Verdict.NOT_TRIED, reason)
        self._ledger.entries.append(row)

    def needed_s(self, state: LaneState, step: Pass, program: Program) -> float:
        """The expected time in seconds to apply a pass to a program and judge the result."""
        return self._applying_s(step, program) + self._judging_s(state, step)

    def _judging_s(self, state: LaneState, step: Pass | None) -> float:
        """The time in seconds to judge a program: a minimum, or what it took in this lane so far."""
        is_engine = step is not None and step.family is Family.ENGINE
        calls = CALLS_FOR_AN_ENGINE if is_engine else CALLS_OF_A_TRIAL
        return max(state.call_s * calls, state.judging_s)

    def _applying_s(self, step: Pass, program: Program) -> float:
        """The time in seconds to apply a pass: what it took the last time, if it is an engine.

        A rehearsal that was begun ahead takes that much less; the pass itself takes a part of its own.
        """
        whole = self._applied_s.get(step.name, step.expected_seconds(program))
        ahead = self.sandbox.ahead_s(step, program) if self.sandbox is not None else 0.0
        return max(whole - ahead, OWN_SHARE * whole)

    def _apply(
        self, trial: Trial, step: Pass, program: Program, judging: float, bound: float = math.inf
    ) -> Program | None:
        """Apply a pass; None, and the trial's end, where it does nothing or there is no time to judge it.

        `judging` is what that takes at the least, in seconds; `bound` is the largest error that a pass which
        searches may leave.
        """
        if (declined := step.why_not(program)) is not None:
            self._end(trial, Verdict.DECLINED, declined)
            return None
        left = trial.deadline - time.perf_counter() - judging
        needed = self._applying_s(step, program)
        if isinstance(step, Engine) and needed > left and (hurried := step.hurried()) != step:
            step, needed, trial.hurried = hurried, hurried.expected_seconds(program), True
        if needed > left:
            more, rest = needed + judging, max(left + judging, 0.0)
            trial.note(needs_s=more)
            reason = f"it needs about {more:.3g} s, and {rest:.3g} s of the budget are left"
            self._end(trial, Verdict.NOT_TRIED, reason)
            return None
        step, began = step.within(left), time.perf_counter()
        if isinstance(step, Judged):
            judge = VerifiersJudge(self._verifier, program.lane, began + SEARCHING * left, bound)
            result, unrehearsed = step.apply_judged(program, judge), None
        elif self.sandbox is None:
            result, unrehearsed = step.apply(program), None
        else:
            result, unrehearsed = self.sandbox.apply(step, program, seconds=left)
        if isinstance(step, Engine) and not trial.hurried:
            self._applied_s[step.name] = time.perf_counter() - began
        result = dataclasses.replace(result, declined=_with_places(result.declined, program))
        hints = (*result.hints, *([f"not rehearsed: {unrehearsed}"] if unrehearsed else []))
        trial.note(rewrites=result.rewrites, declined=result.declined, hints=hints, seconds=trial.seconds)
        if not result.modified:
            self._end(trial, Verdict.DECLINED, _why_nothing(result))
            return None
        return result.program.replace(recipe=(*result.program.recipe, result.replay or step))

    def _is_right(
        self, trial: Trial, state: LaneState, candidate: Subject, same_bits_as: Program | None = None
    ) -> bool:
        """Verify; what is wrong ends the trial. `same_bits_as`: whose every bit must have stayed."""
        check = self._verifier.check(candidate.run, state.lane)
        trial.note(error=check.error, limit=check.limit)
        wrong = check.reason
        if wrong is None and check.error > state.bound:
            wrong = f"its error {check.error:.2g} is over the tolerance {state.bound:g}"
        if wrong is None and same_bits_as is not None:
            wrong = _differing_bits(same_bits_as, candidate)
        if wrong is not None:
            self._end(trial, Verdict.REVERTED, wrong)
        return wrong is None

    def _judge(
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
        if not self._is_right(trial, state, candidate, same_bits_as):
            return
        runs = runs or (step is not None and step.family in (Family.ENGINE, Family.LAUNCH))
        is_kept_anyway = step is not None and step.enables_others
        found = self._timer.time(
            trial, state.best if runs else state.graph, candidate, runs, not is_kept_anyway
        )
        mine = next((s for s in candidate.program.recipe if step is not None and s.name == step.name), None)
        if is_kept_anyway and (not found.is_loss or found.ratio >= LEAST_ENABLING):
            verdict, what = Verdict.KEPT, "later passes build on it"
            if found.is_loss and mine is not None:
                state.at_a_loss.append(mine)
        elif found.is_real:
            verdict, what = Verdict.KEPT, "faster"
        else:
            verdict, what = Verdict.REVERTED, "slower" if found.is_loss else "no gain outside the noise"
            if mine is not None and mine.family in (Family.REWRITE, Family.PLACEMENT):
                state.too_slow.append(mine)
        trial.program = candidate.program
        if runs or state.best is state.graph:
            before = state.best if runs else state.graph
            note_rival(state, before, candidate, found, kept=verdict is Verdict.KEPT)
        state.judging.append(time.perf_counter() - began)
        with held():  # the programs and the row belong together
            if verdict is Verdict.KEPT:
                assert trial.entry.after is not None
                self._keep(state, candidate, trial.entry, runs)
            pace = f"{what}: {found.ratio:.3f}x ({found.low:.3f} to {found.high:.3f})"
            self._end(trial, verdict, pace)

    def play_off(self, state: LaneState) -> None:
        """Let those that may have lost by noise alone meet the lane's best, if there are any."""
        rivals = [rival for rival in state.rivals if rival is not state.best]
        state.rivals = []

        def work(trial: Trial) -> None:
            fastest, state.rivals = self._timer.fastest(trial, state.best, rivals)
            found, after = trial.entry.gain, trial.entry.after
            assert found is not None
            assert after is not None
            pace = f"{found.ratio:.3f}x ({found.low:.3f} to {found.high:.3f})"
            if fastest is state.best:
                self._end(trial, Verdict.REVERTED, f"none of what had lost in noise is faster: {pace}")
                return
            with held():
                state.best, state.best_s = fastest, after.latency.median
                self._note_best(state.lane, PLAY_OFF, state.best_s)
                recipe = ", ".join(step.name for step in fastest.program.recipe)
                self._end(trial, Verdict.KEPT, f"it had lost in noise, and is faster: {pace}: {recipe}")

        if rivals:
            self._run(state, PLAY_OFF, self.deadline, work)

    def _note_best(self, lane: Lane, name: str, seconds: float) -> None:
        at = time.perf_counter() - self._started
        self._ledger.best_so_far.append(BestSoFar(at, lane.name, name, seconds))

    def _keep(self, state: LaneState, candidate: Subject, entry: Entry, runs: bool) -> None:
        """The candidate is the lane's best, or its graph, which may be the best itself."""
        assert entry.after is not None
        seconds, is_best = entry.after.latency.median, runs or state.best is state.graph
        if not runs:
            state.graph, state.call_s = candidate, seconds
        if is_best:
            state.best, state.best_s = candidate, seconds
            self._note_best(state.lane, entry.name, seconds)

    def _check_device(self, name: str) -> None:
        """Say so at once where a failed pass has left the CUDA context unusable."""
        try:
            synchronize(self._captured.device)
        except Exception as error:
            raise AmpoptError(
                f"pass {name} has broken this process's CUDA context: start again with exclude=[{name!r}]"
            ) from error

    def _end(self, trial: Trial, verdict: Verdict, reason: str) -> None:
        self._ledger.entries.append(trial.end(verdict, reason))


def _replayed(trial: Trial, recipe: tuple[Pass, ...], state: LaneState) -> Program:
    """A recipe replayed on the lane's first program, every pass of it within the time that is left.

    They follow each other, but few take any.
    """
    left = trial.deadline - trial.began - state.call_s * CALLS_OF_A_TRIAL
    program = state.replayed(tuple(step.within(left) for step in recipe))
    trial.note(rewrites=max(1, len(program.recipe)), seconds=trial.seconds)  # without any it is one, too
    return program


def _with_places(declined: Sequence[Declined], program: Program) -> tuple[Declined, ...]:
    """What a pass left alone, each node with where in the user's model it comes from."""
    named = {node.name: where(node) for node in program.graph.graph.nodes}
    return tuple(Declined(named.get(found.node, found.node), found.reason) for found in declined)


def _why_nothing(result: Result) -> str:
    if not result.declined:
        return "there is nothing to rewrite"
    first = result.declined[0]
    more = f" (and {len(result.declined) - 1} more)" if len(result.declined) > 1 else ""
    return f"{first.node}: {first.reason}{more}"


def _differing_bits(before: Program, candidate: Subject) -> str | None:
    examples = candidate.program.examples
    pairs = zip(before.run(*examples), candidate.run(*examples), strict=True)
    if all(a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs):
        return None  # NaN is the same as NaN, and as nothing else
    return "it claims to keep every bit and does not"
