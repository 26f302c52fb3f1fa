"""The order in which passes are tried in one lane: the opening, other rewrites, variations, ways to run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from ampopt.ir.pipeline import Pipeline
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Family, Pass, is_slow, replay
from ampopt.measure.entry import Verdict
from ampopt.search.lane_state import LaneState
from ampopt.search.openings import opening_of
from ampopt.search.pass_manager import PassManager
from ampopt.search.rescue import in_order
from ampopt.search.subject import Subject
from ampopt.search.trial import Trial

OPENING = "the opening"
"""The row of the passes that are tried together first."""

PLAIN_OPENING = "the opening without layouts and kernels"
"""The row of those that are tried together if that loses."""

UNFUSED = " (unfused)"
"""What is added to the name of an engine that gets the program without native kernels."""

EARLIER = " (begun ahead)"
"""What is added to it where a compiler had begun on the graph before its last changes."""

AGAIN = ", again"
"""What ends it where the machine was too busy to tell how fast the engine is."""

MUCH = 1.1
"""From this gain of kernels on, an engine is likely to be faster with them than without, and else without."""

UNLIKELY = "it seldom gains, and the time for that was over: a larger time budget tries it"
"""The reason of what was not tried after the time for unlikely trials."""

LESS_LIKELY = "it seldom gains, and would have taken longer than a compiler that is likelier to"
"""The reason of an unlikely trial for which the result of a compiler would have had to wait."""

Until = Callable[[float], bool]
"""Whether a trial of so many seconds is to be left out for the sake of something likelier."""


@dataclasses.dataclass(frozen=True)
class _Form:
    """A form of the rewritten program for an engine; `suffix` is added to the engine's name.

    `is_begun`: the engine is being rehearsed, or was, with it. `is_likely`: it is the likeliest to gain.
    """

    suffix: str
    program: Program
    is_begun: bool
    is_likely: bool


class LaneSearch:
    """The search in one lane; `state` holds what it has found."""

    def __init__(
        self, manager: PassManager, state: LaneState, pipeline: Pipeline, patience: float = float("inf")
    ) -> None:
        """`patience` is on `time.perf_counter`'s clock: what is unlikely to gain is not begun after it."""
        self.state, self._manager, self._pipeline, self._patience = state, manager, pipeline, patience
        self._opening = opening_of(state.lane, state.base.device)
        self._rewrites = in_order(state, pipeline.rewrites)
        self._handled = {step.name for step in state.graph.program.recipe}
        self.opened = state.best
        """What the opening came to, which is compared with that of other lanes."""
        self._launched: Subject | None = None
        self._engine_tried = False
        self._hurried: list[Engine] = []
        self._doubtful: list[Engine] = []
        self._late = frozenset(self._opening.late)
        self._kernels_gain = 1.0

    @staticmethod
    def expected(program: Program, pipeline: Pipeline) -> Program:
        """What the opening of a lane's first program should come to, if all of it is right and a gain.

        It is without native kernels, which need measurements.
        """
        names = {*opening_of(program.lane, program.device).rewrites} - {step.name for step in program.recipe}
        steps = (step for step in pipeline.rewrites if step.name in names)
        return replay(tuple(step for step in steps if step.family is not Family.KERNEL), program)

    @property
    def name(self) -> str:
        """The lane's name."""
        return self.state.lane.name

    @property
    def engines_lead(self) -> float:
        """How many times longer a call of the rewritten graph takes than one of the best engine's program."""
        if self.state.best.program.engine is None or self.state.best_s is None:
            return 1.0
        return self.state.call_s / self.state.best_s

    def resume(self, recipe: tuple[Pass, ...]) -> bool:
        """Go on from a recipe at which an earlier search was cut off; False if it is not right any more."""
        rewrites = {step.name for step in self._rewrites}
        if not self._manager.recall(self.state, recipe):
            return False
        mine = tuple(step for step in recipe if step.name in rewrites)
        self.state.graph = self._launched = Subject(replay(mine, self.state.base))
        self._handled, self._engine_tried = {step.name for step in mine}, True
        self._note_outdone()
        self.opened = self.state.best
        return True

    def leave_rewrites(self, reason: str) -> None:
        """Write down why the rewrites that the opening has not tried are not tried."""
        for step in self._rewrites:
            if step.name not in self._handled:
                self._manager.leave_out(self.state, step.name, reason)
        self._handled |= {step.name for step in self._rewrites}

    def open(self, deadline: float, *, with_engine: bool = True) -> None:
        """Try the passes that won most often as one, then launch and run the result.

        If they are right and slower together, they are tried with the opening's helpers; if that loses, too,
        or they are wrong, those that others build on are tried without layouts and kernels. What was not kept
        `rewrite` tries one by one. Not `with_engine`: the engine waits for `run`.
        """
        left = [step for step in self._rewrites if step.name not in self._handled]
        steps = [step for step in left if step.name in self._opening.rewrites]
        helped = [step for step in left if step in steps or step.name in self._opening.helpers]
        plain = [step for step in steps if step.family is Family.REWRITE or step.enables_others]
        trial = self._open_with(OPENING, steps, deadline)
        if trial is not None and trial.program is not None and len(helped) > len(steps):
            trial = self._open_with(f"{OPENING} with {', '.join(self._opening.helpers)}", helped, deadline)
        if trial is not None:
            self._open_with(PLAIN_OPENING, plain, deadline)
        self.launch(self._manager.deadline)  # without it lanes cannot be compared
        if with_engine:
            self._run_first(deadline)
        self.opened = self.state.best

    def look_again(self, deadline: float) -> None:
        """Where a busy machine has left open how fast engines are, tune and time those once more."""
        doubtful, self._doubtful = self._doubtful, []
        self.run_in(doubtful, deadline, AGAIN)
        self._manager.play_off(self.state)
        self._doubtful = []

    def reopen(self, deadline: float) -> None:
        """Look again, before lanes are compared, at what the opening has come to."""
        before = self.state.best
        self.look_again(deadline)
        if self.state.best is not before:
            self.opened = self.state.best

    def fuse(self, deadline: float) -> None:
        """Try the native kernels that are not in the opening, and launch the result."""
        for step in [step for step in self._left() if not self._is_late(step)]:
            program = self.state.graph.program
            if step.family is Family.KERNEL:
                if time.perf_counter() + self._manager.needed_s(self.state, step, program) > deadline:
                    break
                self._rewrite([step], deadline)
            elif step.why_not(program) is None:
                break  # kernels may build on it
        self.launch(self._manager.deadline)

    def _open_with(self, name: str, steps: Sequence[Pass], deadline: float) -> Trial | None:
        """Try passes as one; the trial if it was one and lost."""
        if len(steps) < 2:
            return None
        trial = self._manager.try_together(self.state, name, steps, deadline)
        if trial.entry.verdict not in (Verdict.KEPT, Verdict.DECLINED):
            return trial
        self._handled = self._handled | {step.name for step in steps}
        return None

    def rewrite(self, deadline: float, until: Until = lambda _: False) -> None:
        """Try the rewrites that the opening has not tried, each in its place, those that seldom win last.

        The latter are left out when `until` says so of the seconds that one takes: what that waits for is
        likelier to gain.
        """
        self._rewrite(sorted(self._left(), key=self._is_late), deadline, until)

    def _left(self) -> list[Pass]:
        """The rewrites that were not tried yet."""
        return [step for step in self._rewrites if step.name not in self._handled]

    def _rewrite(self, steps: Sequence[Pass], deadline: float, until: Until = lambda _: False) -> None:
        self._handled |= {step.name for step in steps}
        for step in steps:
            if self._is_late(step) and time.perf_counter() <= deadline:
                needed_s = self._manager.needed_s(self.state, step, self.state.graph.program)
                if self._would_be_late(needed_s):
                    self._manager.leave_out(self.state, step.name, UNLIKELY)
                    continue
                if until(needed_s):
                    self._manager.leave_out(self.state, step.name, LESS_LIKELY)
                    continue
            later = self._rewrites[self._rewrites.index(step) + 1 :]
            entry = self._manager.try_in_place(self.state, step, later, deadline).entry
            if step.family is Family.KERNEL and entry.verdict is Verdict.KEPT and entry.gain is not None:
                self._kernels_gain *= entry.gain.ratio

    def vary(self, deadline: float, until: Until = lambda _: False) -> None:
        """Try what may help in company: the recipe without some pass, and passes that gained nothing, again.

        It ends when `until` says so: what that waits for is likelier to gain.
        """
        self._without_losses(deadline)
        for attempt in (self._without_openers, self._again):
            if not until(0.0):
                attempt(deadline)

    def launch(self, deadline: float) -> None:
        """Launch the rewritten graph, if that is not done, or try it directly where it has no launch."""
        graph, first = self.state.graph, self._launched is None
        if graph is self._launched:
            return
        self._launched = graph
        usable = [step for step in self._pipeline.launches if step.why_not(graph.program) is None]
        for launch in self._pipeline.launches if first else usable:
            trial = self._manager.try_passes(self.state, launch.name, [launch], graph.program, deadline)
            if trial.entry.verdict is Verdict.NOT_TRIED:
                self._launched = None
        if not usable and self.state.best is not graph:
            self._manager.try_graph(self.state, "the rewritten graph", deadline)

    @property
    def is_launched(self) -> bool:
        """Whether there was time to launch the rewritten graph."""
        return self._launched is not None

    def run(self, deadline: float) -> None:
        """Try the engines that were not tried in the opening: its own first, those that seldom win last.

        One for which there was little time in the opening is tried in full.
        """
        if not self._engine_tried:
            self._run_first(deadline)
        hurried, self._hurried = self._hurried, []
        self.run_in(hurried, deadline, ", in full")
        others = [engine for engine in self._pipeline.engines if engine not in self._first_engines]
        self.run_in(sorted(others, key=self._is_late), deadline)
        self.look_again(deadline)

    @property
    def is_hurried(self) -> bool:
        """Whether a right engine was applied in its form for little time, and may be faster in full."""
        return bool(self._hurried)

    @property
    def _first_engines(self) -> list[Engine]:
        """The opening's engine, if the pipeline has it."""
        return [engine for engine in self._pipeline.engines if engine.name == self._opening.engine]

    def _run_first(self, deadline: float) -> None:
        """Try the opening's engine."""
        self._engine_tried = True
        self.run_in(self._first_engines, deadline)
        self._note_outdone()

    def _note_outdone(self) -> None:
        """Where the opening's engine can be tried, some others are seldom faster."""
        if any(engine.why_not(self.unfused()) is None for engine in self._first_engines):
            self._late |= {*self._opening.outdone}

    def run_in(self, engines: Sequence[Engine], deadline: float, again: str = "") -> None:
        """Try engines, with each launch pass, against the best program so far.

        `again` ends the name of a second trial. An engine that cannot read native kernels gets the program
        without them. It is tried without a launch pass only if it cannot be launched, or if launching fails.
        """
        for engine in engines:
            is_outdone = False  # by one that was begun on the graph before its last changes
            for form in self._readable_forms(engine):
                name, program = engine.name + form.suffix + again, form.program
                is_worth_it = form.is_begun or (form.is_likely and not is_outdone)
                unlikely = self._is_late(engine) or not is_worth_it
                needed_s = self._manager.needed_s(self.state, engine, program)
                if unlikely and self._would_be_late(needed_s):
                    self._manager.leave_out(self.state, name, UNLIKELY)
                    continue
                usable = [step for step in self._pipeline.launches if step.why_not(program) is None]
                trials = [
                    self._manager.try_passes(
                        self.state, f"{name} + {each.name}", [engine, each], program, deadline
                    )
                    for each in usable
                ]
                if not trials or (trials[-1].is_wrong and all(trial.program is None for trial in trials)):
                    trials.append(self._manager.try_passes(self.state, name, [engine], program, deadline))
                is_right = any(trial.program is not None for trial in trials)
                is_outdone = is_outdone or (form.suffix == EARLIER and is_right)
                if any(trial.hurried and not trial.is_wrong for trial in trials):
                    self._hurried.append(engine)
                elif any(trial.is_doubtful for trial in trials) and engine not in self._doubtful:
                    self._doubtful.append(engine)

    def begin(self) -> None:
        """Let compilers start, in a process of their own, on the program without kernels.

        The one with kernels follows it where these have gained much.
        """
        sandbox = self._manager.sandbox
        if sandbox is None or not sandbox.works_beside:
            return
        forms = [self.unfused(), *([self.state.graph.program] if self._kernels_gain > MUCH else [])]
        for engine in self._pipeline.engines:
            for program in forms:
                sandbox.begin(engine, program)

    def unfused(self) -> Program:
        """The rewritten program without its native kernels."""
        return self._without([s for s in self.state.graph.program.recipe if s.family is Family.KERNEL])

    def _is_late(self, step: Pass) -> bool:
        return step.name in self._late

    def _is_too_late(self, deadline: float) -> bool:
        """Whether the time for unlikely trials is over, and only that."""
        return self._patience < time.perf_counter() <= deadline

    def _would_be_late(self, needed_s: float) -> bool:
        """Whether an unlikely trial that takes so many seconds would end after the time for such trials."""
        return time.perf_counter() + needed_s > self._patience

    def _vary(self, name: str, recipe: tuple[Pass, ...], deadline: float) -> None:
        if self._is_too_late(deadline):
            self._manager.leave_out(self.state, name, UNLIKELY)
        else:
            self._manager.try_recipe(self.state, name, recipe, deadline)

    def _without_losses(self, deadline: float) -> None:
        """The recipe without each pass that was kept with a small loss for the sake of later ones."""
        for step in self.state.at_a_loss:
            self._leave_one_out(step, deadline)

    def _without_openers(self, deadline: float) -> None:
        """The recipe without each pass of the opening that may cost time: layouts, algorithms, kernels."""
        openers = [step for step in self.state.graph.program.recipe if step.name in self._opening.rewrites]
        for step in openers:
            if step.family in (Family.PLACEMENT, Family.KERNEL) and not step.enables_others:
                self._leave_one_out(step, deadline)

    def _leave_one_out(self, step: Pass, deadline: float) -> None:
        recipe = self.state.graph.program.recipe
        if step in recipe:
            rest = tuple(each for each in recipe if each != step)
            self._vary(f"without {step.name}", rest, deadline)

    def _again(self, deadline: float) -> None:
        """Try passes that were right but too slow again, where those that come after them are there.

        A pass may lose in its place and win in company: folded biases and channels_last each cost time
        until the fused kernels that want them both are there. So all of them are tried together, every
        kernel pass applied anew on top, and the ones that do not help are then taken out; where the
        company is no gain, each is tried alone, in its own place in the recipe.
        """
        order = [step.name for step in self._rewrites]
        kernels = [step for step in self._rewrites if step.family is Family.KERNEL]
        slow, self.state.too_slow = self.state.too_slow, []

        def attempt(name: str, steps: Sequence[Pass]) -> bool:
            before, recipe = self.state.graph, sorted(steps, key=lambda step: order.index(step.name))
            self._vary(name, tuple(recipe), deadline)
            return self.state.graph is not before

        def with_added(added: Sequence[Pass]) -> list[Pass]:
            mine = self.state.graph.program.recipe
            return list({step.name: step for step in (*kernels, *mine, *added)}.values())

        if len(slow) > 1 and attempt("all of these again, together", with_added(slow)):
            for step in slow:
                mine = [s for s in self.state.graph.program.recipe if s != step]
                attempt(f"the same without {step.name}", mine)
            return
        for step in slow:
            attempt(f"{step.name} (again)", with_added([step]))

    def _readable_forms(self, engine: Engine) -> list[_Form]:
        """The rewritten program as the engine can take it: with native kernels, or else without them.

        An engine that is worth more time is tried without them all the same, and without each kind of them:
        where it fuses by itself, a kernel that was faster before it may not be so any more. Forms that are
        being rehearsed already come first, also those of a graph before its last changes: then another one
        is not worth the time of a compiler. Before them is what has ended, the likely one first.
        """
        rewritten, sandbox = self.state.graph.program, self._manager.sandbox
        kernels = [step for step in rewritten.recipe if step.family is Family.KERNEL]
        left_out = {"": list[Pass]()} | ({UNFUSED: kernels} if kernels else {})
        if is_slow(engine) and len(kernels) > 1:
            left_out |= {f" (without {kernel.name})": [kernel] for kernel in kernels}
        readable: dict[str, Program] = {}
        for suffix, missing in left_out.items():
            program = self._without(missing)
            if engine.why_not(program) is None:
                readable[suffix] = program
                if not is_slow(engine):
                    break
        if not readable:
            return [_Form("", rewritten, is_begun=False, is_likely=True)]
        wanted = UNFUSED if kernels and self._kernels_gain <= MUCH else ""
        likely = wanted if wanted in readable else next(iter(readable))
        begun = self._begun(engine)
        places = {program.recipe: place for place, program in enumerate(begun)}
        earlier = places.keys() - {program.recipe for program in readable.values()}
        forms = [
            _Form(suffix, program, program.recipe in places, suffix == likely)
            for suffix, program in readable.items()
        ]
        forms += [_Form(EARLIER, p, is_begun=True, is_likely=False) for p in begun if p.recipe in earlier]

        def order(form: _Form) -> tuple[bool, bool, int, bool]:
            is_made = sandbox is not None and sandbox.has_made(engine, form.program)
            place = 0 if is_made else places.get(form.program.recipe, 0)
            return not form.is_begun, not is_made, place, not form.is_likely

        return sorted(forms, key=order)

    def _begun(self, engine: Engine) -> list[Program]:
        """The lane's programs on which a compiler was begun, and which have what makes the lane right."""
        rewritten, founded = self.state.graph.program, self.state.founded
        begun = [] if (sandbox := self._manager.sandbox) is None else sandbox.begun(engine, rewritten)
        return [p for p in begun if p.recipe[:founded] == rewritten.recipe[:founded]]

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler that was begun ahead has made something of the lane that was not tried yet."""
        sandbox, engines = self._manager.sandbox, self._pipeline.engines
        return sandbox is not None and any(
            sandbox.has_made(engine, program) for engine in engines for program in self._begun(engine)
        )

    def _without(self, missing: Sequence[Pass]) -> Program:
        """The rewritten program without some of its passes."""
        rewritten = self.state.graph.program
        recipe = tuple(step for step in rewritten.recipe if step not in missing)
        return rewritten if recipe == rewritten.recipe else self.state.replayed(recipe)
