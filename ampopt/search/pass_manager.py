"""The pass manager: applies, verifies and times every pass, and keeps or reverts it with a reason."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from ampopt.engines.executable import executable
from ampopt.errors import AmpoptError, first_line
from ampopt.ir.graph import where
from ampopt.ir.judged import Judged
from ampopt.ir.lanes import Lane
from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.ir.transform import Declined, Engine, Family, Numerics, Pass, Result, is_slow, replay
from ampopt.measure.clocks import device_time, engine_latency, latency, peak_memory, synchronize
from ampopt.measure.entry import Entry, Timing, Verdict
from ampopt.measure.ledger import Ledger
from ampopt.measure.sampling import Gain, Measurement, Sampler, gain, interleave, joined
from ampopt.measure.verifiers_judge import VerifiersJudge
from ampopt.measure.verify import Verifier
from ampopt.search.rehearsal import Sandbox
from ampopt.search.subject import Subject
from ampopt.search.trial import Trial
from ampopt.system.budget import CALLS_OF_A_TRIAL
from ampopt.system.interrupts import check_interrupted, held, was_interrupted

logger = logging.getLogger("ampopt")

LEAST_ENABLING = 0.95
"""Largest loss of a pass that later passes build on; it is removed at the end if they gain nothing."""

HOST_SHARE = 0.25
"""Share of a comparison's time for the host's clock, if another clock judges."""

DEVICE_S = 0.15
"""Time in seconds of a comparison on the device clock, whose samples agree within a thousandth."""

CALLS_FOR_AN_ENGINE = 60
"""Number of calls in the trial of an engine.

On a CPU they include an untimed call before each timed one, and a repeated comparison if there is noise.
"""

LARGE_GAIN, MORE_ROUNDS = 1.1, 3
"""A gain of 1.1x or more that lies inside the noise is sampled again, at most 3 times."""

SEARCHING = 0.25
"""The share of the time that is left in which a pass that searches may make programs."""

Progress = Callable[[str, str], None]
"""Called with (lane, pass) when work on a pass starts."""


def silent(_lane: str, _name: str) -> None:
    """A progress callback that does nothing."""


@dataclasses.dataclass
class LaneState:
    """The state of a lane: the best program so far, and the best one without opaque operators."""

    lane: Lane
    best: Subject
    base: Program
    rewritten: Program
    call_s: float = 0.0
    """Time in seconds of a call of the best program, as far as known; it estimates the time of trials."""
    too_slow: list[Pass] = dataclasses.field(default_factory=list)
    """Passes that were correct but gained nothing, with their measurements in their fields."""
    at_a_loss: list[Pass] = dataclasses.field(default_factory=list)
    """Passes that were kept with a small loss, because later ones may build on them."""
    founded: int = 0
    """The number of first passes in its recipes without which the lane is wrong."""
    check: Check | None = None
    """The final check of the best program by `PassManager.settle`; None before."""


class PassManager:
    """Runs the passes of one captured model through one lane at a time; see the module."""

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
    ) -> None:
        """`deadline` is on `time.perf_counter`'s clock; `sample_s` is the time of a comparison on each clock.

        Risky passes are rehearsed in the `sandbox` first, if there is one.
        """
        self._captured, self._verifier, self._ledger = captured, verifier, ledger
        self._deadline, self._sample_s = deadline, sample_s
        self._progress, self._sandbox = progress or silent, sandbox

    def open(self, lane: Lane, call_s: float = 0.0) -> LaneState:
        """Start a lane with the captured program, whose call takes about `call_s` seconds."""
        program = lane.start(self._captured)
        return LaneState(lane, Subject(program), program, program, call_s)

    def rewrite(self, state: LaneState, passes: Sequence[Pass], *, deadline: float) -> None:
        """Apply rewrites, placement and kernels, one on top of another, then retry passes without a gain.

        `deadline` is before the manager's own, so that engines get their share of the time.
        """
        already = {step.name for step in state.best.program.recipe}
        for step in (each for each in passes if each.name not in already):
            self._try(state, step.name, [step], state.best.program, deadline)
        self._give_second_chances(state, passes, deadline)
        for step in (s for s in state.at_a_loss if s in state.best.program.recipe):
            recipe = tuple(s for s in state.best.program.recipe if s != step)
            self._try_recipe(state, f"without {step.name}", recipe, deadline)
        state.rewritten = state.best.program

    def rescue(self, state: LaneState, name: str, steps: Sequence[Pass]) -> Entry:
        """Keep passes on a lane's first program, which is wrong, if they make it right; see `search.rescue`.

        All but the last one may have nothing to do.
        """

        def work(trial: Trial) -> None:
            before = replay(tuple(steps[:-1]), state.best.program)
            program = self._apply(trial, steps[-1], before, judging_s(steps[-1], state.call_s))
            if program is not None and self._is_right(trial, state, candidate := Subject(program)):
                with held():
                    state.best, state.founded = candidate, len(program.recipe)
                    behind = " + ".join(step.name for step in before.recipe)
                    self._end(
                        trial, Verdict.KEPT, "it makes the lane right" + (behind and f" behind {behind}")
                    )

        return self._run(state, name, self._deadline, work).entry

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
            self._run(state, "tuned before", self._deadline, work)
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
            state.best = Subject(replay(tuple(step for step in recipe if step is not wrong), state.base))
            row = Entry(
                state.lane.name, wrong.name, Verdict.NOT_TRIED, "", error=check.error, limit=check.limit
            )
            reason = f"it won, but is wrong elsewhere: {check.reason}"
            self._end(Trial(row, self._deadline, began), Verdict.REVERTED, reason)

    def _right_until(self, state: LaneState, recipe: tuple[Pass, ...]) -> int:
        """How many passes of a recipe that is wrong somewhere are right together."""
        right, wrong = state.founded, len(recipe)
        while wrong - right > 1:
            middle = (right + wrong) // 2
            program = replay(recipe[:middle], state.base)
            check = self._verifier.check(executable(program), state.lane, everywhere=True)
            right, wrong = (middle, wrong) if check.passed else (right, middle)
        return right

    def _give_second_chances(self, state: LaneState, passes: Sequence[Pass], deadline: float) -> None:
        """Try passes that were right but too slow again, where those that come after them are there.

        A pass may lose in its place and win in company: folded biases and channels_last each cost time
        until the fused kernels that want them both are there. So all of them are tried together, every
        kernel pass applied anew on top, and the ones that do not help are then taken out; where the
        company is no gain, each is tried alone, in its own place in the recipe.
        """
        order = [step.name for step in passes]
        kernels = [step for step in passes if step.family is Family.KERNEL]
        slow, state.too_slow = state.too_slow, []

        def attempt(name: str, steps: Sequence[Pass]) -> bool:
            before, recipe = state.best, sorted(steps, key=lambda step: order.index(step.name))
            self._try_recipe(state, name, tuple(recipe), deadline)
            return state.best is not before

        def with_added(added: Sequence[Pass]) -> list[Pass]:
            return list({s.name: s for s in (*kernels, *state.best.program.recipe, *added)}.values())

        if len(slow) > 1 and attempt("all of these again, together", with_added(slow)):
            for step in slow:
                attempt(f"the same without {step.name}", [s for s in state.best.program.recipe if s != step])
            return
        for step in slow:
            attempt(f"{step.name} (again)", with_added([step]))

    def choose_engine(
        self, state: LaneState, engines: Sequence[Pass | None], launches: Sequence[Pass]
    ) -> None:
        """Try engines, with each launch pass, against the best program so far.

        None stands for running the graph directly. An engine that cannot read native kernels gets the program
        without them. It is tried without a launch pass only if it cannot be launched, or if launching fails.
        """
        for engine in engines:
            if engine is None:
                for launch in launches:
                    self._try(state, launch.name, [launch], state.rewritten, self._deadline)
                continue
            for suffix, program in self._readable_forms(state, engine):
                name = engine.name + suffix
                usable = [launch for launch in launches if launch.why_not(program) is None]
                trials = [
                    self._try(state, f"{name} + {each.name}", [engine, each], program, self._deadline)
                    for each in usable
                ]
                if not trials or (trials[-1].is_wrong and all(trial.program is None for trial in trials)):
                    self._try(state, name, [engine], program, self._deadline)

    def _readable_forms(self, state: LaneState, engine: Pass) -> list[tuple[str, Program]]:
        """The rewritten program as the engine can take it: with native kernels, or else without them.

        An engine that is worth more time is tried without them all the same, and without each kind of them:
        where it fuses by itself, a kernel that was faster before it may not be so any more.
        """
        kernels = [step for step in state.rewritten.recipe if step.family is Family.KERNEL]
        left_out = {"": list[Pass]()} | ({" (unfused)": kernels} if kernels else {})
        if is_slow(engine) and len(kernels) > 1:
            left_out |= {f" (without {kernel.name})": [kernel] for kernel in kernels}
        forms = [
            (suffix, self._without(state, missing) if missing else state.rewritten)
            for suffix, missing in left_out.items()
        ]
        readable = [form for form in forms if engine.why_not(form[1]) is None] or forms[:1]
        return readable if is_slow(engine) else readable[:1]

    def _without(self, state: LaneState, missing: Sequence[Pass]) -> Program:
        """The rewritten program without some of its passes."""
        recipe = tuple(step for step in state.rewritten.recipe if step not in missing)
        return replay(recipe, state.base)

    def _run(self, state: LaneState, name: str, deadline: float, work: Callable[[Trial], None]) -> Trial:
        """Do the work of a trial, which ends it; what fails in it fails alone, and is its row.

        What there is no time left for is not begun.
        """
        self._progress(state.lane.name, name)
        trial = Trial(Entry(state.lane.name, name, Verdict.NOT_TRIED, ""), deadline)
        check_interrupted()
        if trial.began > deadline:
            self._end(trial, Verdict.NOT_TRIED, "the time budget was spent")
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

    def _try(
        self, state: LaneState, name: str, steps: Sequence[Pass], program: Program, deadline: float
    ) -> Trial:
        """Try passes on a program, one on top of the other; the last one says how the outcome is judged."""

        def work(trial: Trial) -> None:
            changed: Program | None = program
            same_bits_as: Program | None = None
            for step in steps:
                before = changed
                assert before is not None
                changed = self._apply(trial, step, before, judging_s(steps[-1], state.call_s))
                if changed is None:
                    return
                keeps_bits = step.numerics_on(before) is Numerics.BITWISE
                same_bits_as = (same_bits_as or before) if keeps_bits else None
            assert changed is not None
            self._judge(trial, state, Subject(changed), steps[-1], same_bits_as)

        return self._run(state, name, deadline, work)

    def _try_recipe(self, state: LaneState, name: str, recipe: tuple[Pass, ...], deadline: float) -> Trial:
        """Try a recipe on the lane's first program, as one rewrite."""

        def work(trial: Trial) -> None:
            self._judge(trial, state, Subject(_replayed(trial, recipe, state)))

        return self._run(state, name, deadline, work)

    def _apply(self, trial: Trial, step: Pass, program: Program, judging: float) -> Program | None:
        """Apply a pass; None, and the trial's end, where it does nothing or there is no time to judge it.

        `judging` is what that takes at the least, in seconds.
        """
        if (declined := step.why_not(program)) is not None:
            self._end(trial, Verdict.DECLINED, declined)
            return None
        left = trial.deadline - trial.began - judging
        if isinstance(step, Engine) and step.expected_seconds(program) > left:
            step = step.hurried()
        if (needed := step.expected_seconds(program)) > left:
            more, rest = needed + judging, max(left + judging, 0.0)
            reason = f"it needs about {more:.3g} s, and {rest:.3g} s of the budget are left"
            self._end(trial, Verdict.NOT_TRIED, reason)
            return None
        step = step.within(left)
        if isinstance(step, Judged):
            judge = VerifiersJudge(self._verifier, program.lane, trial.began + SEARCHING * left)
            result, unrehearsed = step.apply_judged(program, judge), None
        elif self._sandbox is None:
            result, unrehearsed = step.apply(program), None
        else:
            result, unrehearsed = self._sandbox.apply(step, program, seconds=left)
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
    ) -> None:
        """Verify, time, decide: the lane's best program is the candidate where that is right and faster.

        It is judged as `step` is; None: as a rewrite.
        """
        if not self._is_right(trial, state, candidate, same_bits_as):
            return
        found = self._time(trial, step, state.best, candidate)
        if step is not None and step.enables_others and (not found.is_loss or found.ratio >= LEAST_ENABLING):
            verdict, what = Verdict.KEPT, "later passes build on it"
            if found.is_loss:
                state.at_a_loss.append(candidate.program.recipe[-1])
        elif found.is_real:
            verdict, what = Verdict.KEPT, "faster"
        else:
            verdict, what = Verdict.REVERTED, "slower" if found.is_loss else "no gain outside the noise"
            if step is not None and step.family in (Family.REWRITE, Family.PLACEMENT):
                state.too_slow.append(candidate.program.recipe[-1])
        trial.program = candidate.program
        with held():  # the best program and its row belong together
            if verdict is Verdict.KEPT:
                assert trial.entry.after is not None
                state.best, state.call_s = candidate, trial.entry.after.latency.median
            pace = f"{what}: {found.ratio:.3f}x ({found.low:.3f} to {found.high:.3f})"
            self._end(trial, verdict, pace)

    def _time(self, trial: Trial, step: Pass | None, best: Subject, candidate: Subject) -> Gain:
        """Both clocks for the best so far and for the candidate, sampled in turn."""
        device = candidate.device
        subjects = {"before": best, "after": candidate}
        is_of_host = step is not None and step.family in (Family.ENGINE, Family.LAUNCH)
        sampler = engine_latency if is_of_host else latency
        calls = {name: sampler(subject.call, device) for name, subject in subjects.items()}
        graphs = {name: graph for name, s in subjects.items() if (graph := s.replayed()) is not None}
        replays = {name: device_time(graph.replay, device) for name, graph in graphs.items()}
        judged_on_host = is_of_host or len(replays) < 2
        share = 1.0 if judged_on_host else HOST_SHARE
        patient = judged_on_host and not (step is not None and step.enables_others)  # kept all the same
        on_host = self._on_host(calls, share * self._sample_s, trial.deadline if patient else 0.0)
        on_device: dict[str, Measurement] = interleave(replays, seconds=DEVICE_S) if replays else {}
        judge = on_host if judged_on_host else on_device
        found = gain(judge["before"], judge["after"])
        trial.note(
            before=Timing(on_host["before"], on_device.get("before")),
            after=Timing(on_host["after"], on_device.get("after")),
            gain=found,
            memory=peak_memory(candidate.call, device),
        )
        return found

    def _on_host(
        self, calls: Mapping[str, Sampler], seconds: float, deadline: float
    ) -> dict[str, Measurement]:
        """`before` and `after`, in turn; until `deadline` for longer where a large gain lies in the noise."""
        timed = interleave(calls, seconds=seconds)
        for _ in range(MORE_ROUNDS):
            found = gain(timed["before"], timed["after"])
            if time.perf_counter() > deadline or found.is_real or found.ratio < LARGE_GAIN:
                break
            more = interleave(calls, seconds=seconds)
            timed = {name: joined(first, more[name]) for name, first in timed.items()}
        return timed

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
    program = replay(tuple(step.within(left) for step in recipe), state.base)
    trial.note(rewrites=max(1, len(program.recipe)), seconds=trial.seconds)  # without any it is one, too
    return program


def judging_s(step: Pass, call_s: float) -> float:
    """The minimum time in seconds to judge a step, if a call of a program takes `call_s`."""
    return call_s * (CALLS_FOR_AN_ENGINE if step.family is Family.ENGINE else CALLS_OF_A_TRIAL)


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
