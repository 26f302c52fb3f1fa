"""The pass manager: tries one pass or recipe, and keeps or reverts it with a reason."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from ampopt.errors import AmpoptError
from ampopt.ir.lanes import Lane
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Numerics, Pass, exits_failed, replay
from ampopt.measure.entry import Entry, Verdict
from ampopt.measure.report import interval
from ampopt.search.estimates import why_not
from ampopt.search.lane_state import LaneState
from ampopt.search.play_off import PLAY_OFF
from ampopt.search.subject import Subject
from ampopt.search.trial import Trial
from ampopt.search.trials import Trials, why_nothing, with_places
from ampopt.system.budget import CALLS_OF_A_TRIAL
from ampopt.system.interrupts import held

GRACE_S = 3.0
"""Time in seconds to judge what an engine made that took longer than it was expected to."""


class PassManager(Trials):
    """Judges the passes of one captured model, one trial at a time.

    `lane_search.LaneSearch` decides what is tried, and in which order.
    """

    def open(self, lane: Lane, call_s: float = 0.0) -> LaneState:
        """Start a lane with the captured program, whose call takes about `call_s` seconds."""
        program = lane.start(self.captured)
        subject = Subject(program)
        return LaneState(lane, subject, subject, program, call_s)

    def rescue(self, state: LaneState, name: str, steps: Sequence[Pass], bound: float = math.inf) -> Entry:
        """Keep passes on a lane's first program, which is wrong, if they make it right; see `search.rescue`.

        All but the last one may have nothing to do. `bound` is the largest error that is right.
        """

        def work(trial: Trial) -> None:
            before = replay(tuple(steps[:-1]), state.best.program)
            judging = self.judging_s(state, steps[-1])
            program = self.apply(trial, steps[-1], before, judging, bound)
            if program is not None and self.is_right(trial, state, candidate := Subject(program)):
                if (error := trial.entry.error) is not None and error > bound:
                    self.end(trial, Verdict.REVERTED, f"its error {error:.2g} is over {bound:g}")
                    return
                with held():
                    state.best = state.graph = candidate
                    state.founded = len(program.recipe)
                    behind = " + ".join(step.name for step in before.recipe)
                    self.end(
                        trial, Verdict.KEPT, "it makes the lane right" + (behind and f" behind {behind}")
                    )

        return self.run(state, name, self.deadline, work).entry

    def recall(self, state: LaneState, recipe: tuple[Pass, ...]) -> bool:
        """Replay a cached recipe without timing; whether it is complete and correct.

        If so, it becomes the best.
        """

        def work(trial: Trial) -> None:
            program = _replayed(trial, recipe, state)
            if len(program.recipe) != len(recipe):
                raise AmpoptError("not every pass of it applies here")
            if self.is_right(trial, state, candidate := Subject(program)):
                with held():
                    state.best = candidate
                    self.end(trial, Verdict.KEPT, "it won before; the last comparison times it")

        if recipe:
            self.run(state, "tuned before", self.deadline, work)
        return state.best.program.recipe == recipe

    def settle(self, state: LaneState) -> None:
        """Verify a lane's winner also far outside of the examples' range; remove passes that are wrong there.

        The check of the remaining program is stored in `state.check`. Bisection of the recipe finds the wrong
        pass: the first one with which the recipe is wrong. An engine gives way to what was the best before
        it: the same with other choices, or another one.
        """
        while True:
            began, recipe = time.perf_counter(), state.best.program.recipe
            best = state.best
            check = best.settled or self.check(best, state.lane, everywhere=True)
            if check.passed or len(recipe) <= state.founded:
                state.check, state.former = check, []
                return
            wrong = recipe[self._right_until(state, recipe)]
            before = None
            if isinstance(wrong, Engine):
                state.former = [each for each in state.former if wrong not in each.program.recipe]
                before = state.former.pop() if state.former else None
            rest = tuple(step for step in recipe if step is not wrong)
            state.best = before or Subject(state.replayed(rest))
            row = Entry(
                state.lane.name, wrong.name, Verdict.NOT_TRIED, "", error=check.error, limit=check.limit
            )
            reason = f"it won, but is wrong elsewhere: {check.reason}"
            self.end(Trial(row, self.deadline, began), Verdict.REVERTED, reason)

    def _right_until(self, state: LaneState, recipe: tuple[Pass, ...]) -> int:
        """How many passes of a recipe that is wrong somewhere are right together."""
        right, wrong = state.founded, len(recipe)
        while wrong - right > 1:
            middle = (right + wrong) // 2
            check = self.check(Subject(state.replayed(recipe[:middle])), state.lane, everywhere=True)
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
                changed = self.apply(trial, step, before, self.judging_s(state, steps[-1]))
                if changed is None:
                    return
                if isinstance(step, Engine):  # it has taken its time: what it made is judged
                    trial.deadline = max(trial.deadline, time.perf_counter() + GRACE_S)
                keeps_bits = step.numerics_on(before) is Numerics.BITWISE
                same_bits_as = (same_bits_as or before) if keeps_bits else None
            assert changed is not None
            self.judge(trial, state, Subject(changed), steps[-1], same_bits_as)

        needed = None
        if all(why_not(step, program) is None for step in steps):
            needed = self.judging_s(state, steps[-1]) + sum(self.applying_s(s, program) for s in steps)
        return self.run(state, name, deadline, work, needed, steps)

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
            changed = self.apply(trial, step, before, self.judging_s(state, step))
            if changed is not None:
                self.judge(trial, state, Subject(replay(after, changed)), step)

        return self.run(state, name or step.name, deadline, work, self.judging_s(state, step), [step])

    def try_recipe(
        self, state: LaneState, name: str, recipe: tuple[Pass, ...], deadline: float, step: Pass | None = None
    ) -> Trial:
        """Try a recipe on the lane's first program; it is judged as `step` is, or else as a rewrite."""

        def work(trial: Trial) -> None:
            self.judge(trial, state, Subject(_replayed(trial, recipe, state)), step)

        return self.run(state, name, deadline, work, self.judging_s(state, step))

    def try_graph(self, state: LaneState, name: str, deadline: float) -> Trial:
        """Try the lane's rewritten graph, run directly, against its best program."""

        def work(trial: Trial) -> None:
            self.judge(trial, state, state.graph, runs=True)

        return self.run(state, name, deadline, work, self.judging_s(state, None))

    def try_together(self, state: LaneState, name: str, steps: Sequence[Pass], deadline: float) -> Trial:
        """Try passes as one rewrite; if it is kept, each of them has a row that says what it did in it.

        It is judged as each of them is, if later passes build on all that rewrote something.
        """
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
                self.end(trial, Verdict.DECLINED, "there is nothing to rewrite")
                return
            applied = [step for step, row in zip(steps, rows, strict=True) if row in changed]
            all_enable = all(step.enables_others for step in applied)
            self.judge(trial, state, Subject(program), applied[-1] if all_enable else None)

        trial = self.run(state, name, deadline, work, of=steps)  # each is tried by itself later
        if trial.entry.verdict in (Verdict.KEPT, Verdict.DECLINED):
            self.ledger.entries += rows
        return trial

    @exits_failed()
    def _part(self, trial: Trial, step: Pass, program: Program, lane: Lane) -> tuple[Program, Entry]:
        """Apply a pass of several that are tried together; its row has what it did, and no times."""
        if (declined := step.why_not(program)) is not None:
            return program, Entry(lane.name, step.name, Verdict.DECLINED, declined)
        left = trial.deadline - time.perf_counter()
        result = self.foreseen.take(step, program)
        if result is None:
            result = self.applied(step.within(left), program, left)[0]
        left_alone = with_places(result.declined, program)
        row = Entry(
            lane.name, step.name, Verdict.KEPT, f"part of {trial.entry.name}, which is timed as a whole",
            rewrites=result.rewrites, declined=left_alone, hints=result.hints,
        )  # fmt: skip
        if not result.modified:
            reason = why_nothing(dataclasses.replace(result, declined=left_alone))
            return program, dataclasses.replace(row, verdict=Verdict.DECLINED, reason=reason)
        return result.program.replace(recipe=(*program.recipe, result.replay or step)), row

    def play_off(self, state: LaneState) -> None:
        """Let those that may have lost by noise alone meet the lane's best, if there are any."""
        rivals = [rival for rival in state.rivals if rival is not state.best]
        state.rivals = []

        def work(trial: Trial) -> None:
            fastest, state.rivals = self.timer.fastest(trial, state.best, rivals)
            found, after = trial.entry.gain, trial.entry.after
            assert found is not None
            assert after is not None
            pace = f"{found.ratio:.3f}x ({interval(found, 3)})"
            if fastest is state.best:
                self.end(trial, Verdict.REVERTED, f"none of what had lost in noise is faster: {pace}")
                return
            with held():
                self.lead(state, fastest, PLAY_OFF, after.latency.median)
                recipe = ", ".join(step.name for step in fastest.program.recipe)
                self.end(trial, Verdict.KEPT, f"it had lost in noise, and is faster: {pace}: {recipe}")

        if rivals:
            self.run(state, PLAY_OFF, self.deadline, work)


def _replayed(trial: Trial, recipe: tuple[Pass, ...], state: LaneState) -> Program:
    """A recipe replayed on the lane's first program, every pass of it within the time that is left.

    They follow each other, but few take any.
    """
    left = trial.deadline - trial.began - state.call_s * CALLS_OF_A_TRIAL
    program = state.replayed(tuple(step.within(left) for step in recipe))
    trial.note(rewrites=max(1, len(program.recipe)), seconds=trial.seconds)  # without any it is one, too
    return program
