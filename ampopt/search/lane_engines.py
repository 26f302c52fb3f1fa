"""The engines of one lane: which forms of its program each of them gets, and in which order."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from ampopt.ir.pipeline import Pipeline
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Family, Pass, is_slow
from ampopt.measure.entry import Verdict
from ampopt.search.estimates import why_not
from ampopt.search.lane_state import LaneState
from ampopt.search.openings import UNLIKELY, Opening
from ampopt.search.pass_manager import PassManager

UNFUSED = " (unfused)"
"""What is added to the name of an engine that gets the program without native kernels."""

EARLIER = " (begun ahead)"
"""What is added to it where a compiler had begun on the graph before its last changes."""

AGAIN = ", again"
"""What ends it where the machine was too busy to tell how fast the engine is."""

MUCH = 1.05
"""From this gain of kernels on, an engine is likely to be faster with them than without, and else without.

With a gain of 1.09x EdgeNeXt-XXS compiled with its kernels was 1.25x faster than without them on an H100.
"""


SPARE = 2.0
"""A compiler is waited for, and nothing is tried before, if this many times its time is left."""

LOOK_S = 0.01
"""Seconds after which it is looked again whether a compiler is done."""

FAR = 1.3
"""From this gain of kernels on, an engine without them is tried only where nothing likelier is left.

With gains of 1.6x and 1.7x EfficientNet-B0 and GhostNet compiled without their kernels took 1.3 and 1.5 times
as long on an H100 as with them.
"""


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of the rewritten program for an engine; `suffix` is added to the engine's name.

    `is_begun`: the engine is being rehearsed, or was, with it. `is_made`: that has ended well. `is_likely`:
    it is the likeliest to gain.
    """

    suffix: str
    program: Program
    is_begun: bool
    is_made: bool
    is_likely: bool


class LaneEngines:
    """The engines of one lane; `state` holds what they have found."""

    def __init__(
        self,
        manager: PassManager,
        state: LaneState,
        pipeline: Pipeline,
        opening: Opening,
        patience: float = math.inf,
    ) -> None:
        """`patience` is on `time.perf_counter`'s clock: what is unlikely to gain is not begun after it."""
        self._manager, self.state, self._pipeline, self._patience = manager, state, pipeline, patience
        self._first = [engine for engine in pipeline.engines if engine.name == opening.engine]
        self._late, self._outdone = frozenset(opening.late), frozenset(opening.outdone)
        self._inseparable = frozenset(opening.inseparable)
        self._tried: list[tuple[Engine, tuple[Pass, ...]]] = []
        self._put_off: list[tuple[Engine, tuple[Pass, ...]]] = []
        """What there was no time for when it was made: it waits for the turn of its engine."""
        self._hurried: list[Engine] = []
        self._doubtful: list[Engine] = []
        self.kernels_gain = 1.0
        """How many times faster native kernels have made the rewritten graph."""
        self.first_tried = False
        """Whether the opening's engine had its turn."""

    @property
    def lead(self) -> float:
        """How many times longer a call of the rewritten graph takes than one of the best engine's program.

        It is 1 where the graph can be launched: only then it shows how fast it is.
        """
        graph, best = self.state.graph.program, self.state.best.program
        if best.engine is None or self.state.best_s is None:
            return 1.0
        if any(why_not(launch, graph) is None for launch in self._pipeline.launches):
            return 1.0
        return self.state.call_s / self.state.best_s

    @property
    def is_hurried(self) -> bool:
        """Whether a right engine was applied in its form for little time, and may be faster in full."""
        return bool(self._hurried)

    def run(self, deadline: float) -> None:
        """Try the engines that were not tried in the opening: its own first, those that seldom win last.

        One for which there was little time in the opening is tried in full, or, where there was none, now.
        """
        if not self.first_tried:
            self.run_first(deadline)
        self.run_put_off(deadline)
        hurried, self._hurried = self._hurried, []
        self.run_in(hurried, deadline, ", in full")
        others = [engine for engine in self._pipeline.engines if engine not in self._first]
        self.run_in(sorted(others, key=self._is_late), deadline)
        self.look_again(deadline)

    def run_first(self, deadline: float) -> None:
        """Try the opening's engine."""
        self.run_in(self._first, deadline)
        self.note_first()

    def run_put_off(self, deadline: float) -> None:
        """Try the opening's engine where there was no time for it when it was made, in its opening or now."""
        self.run_in([engine for engine in self._first if engine in dict(self._put_off)], deadline)

    def note_first(self) -> None:
        """The opening's engine had its turn. Where it can be tried, some others are seldom faster."""
        self.first_tried = True
        if any(why_not(engine, self.unfused()) is None for engine in self._first):
            self._late |= self._outdone

    def look_again(self, deadline: float) -> None:
        """Where a busy machine has left open how fast engines are, tune and time those once more."""
        doubtful, self._doubtful = self._doubtful, []
        self.run_in(doubtful, deadline, AGAIN)
        self._manager.play_off(self.state)
        self._doubtful = []

    def run_in(self, engines: Sequence[Engine], deadline: float, again: str = "") -> None:
        """Try engines, in each form of the program, against the best one so far.

        `again` ends the name of a second trial.
        """
        for engine in engines:
            is_outdone = False  # by one that was begun on the graph before its last changes
            for form in self.forms(engine):
                if again or not self._was_tried(engine, form.program):
                    is_right = self._try(engine, form, deadline, again, is_outdone=is_outdone)
                    is_outdone = is_outdone or (form.suffix == EARLIER and is_right)

    def _try(
        self, engine: Engine, form: Form, deadline: float, again: str = "", *, is_outdone: bool = False
    ) -> bool:
        """Try an engine with each launch pass; whether what it made is right.

        It is tried without a launch pass only if it cannot be launched, or if launching fails.
        """
        name, program = engine.name + form.suffix + again, form.program
        likely = form.is_begun or (form.is_likely and not is_outdone)
        unlikely = self._is_late(engine) or not likely or self._lacks(form)
        unlikely = unlikely and not (form.is_made and self._waits_too_long(engine, deadline))
        needed_s = self._manager.needed_s(self.state, engine, program)
        if unlikely and time.perf_counter() + needed_s > self._patience:
            self._manager.leave_out(self.state, name, UNLIKELY)
            return False
        usable = [step for step in self._pipeline.launches if why_not(step, program) is None]
        trials = [
            self._manager.try_passes(self.state, f"{name} + {each.name}", [engine, each], program, deadline)
            for each in usable
        ]
        if not trials or (trials[-1].is_wrong and all(trial.program is None for trial in trials)):
            trials.append(self._manager.try_passes(self.state, name, [engine], program, deadline))
        was_tried = any(trial.entry.verdict is not Verdict.NOT_TRIED for trial in trials)
        (self._tried if was_tried else self._put_off).append((engine, program.recipe))
        if any(trial.hurried and not trial.is_wrong for trial in trials):
            self._hurried.append(engine)
        elif any(trial.is_doubtful for trial in trials) and engine not in self._doubtful:
            self._doubtful.append(engine)
        return any(trial.program is not None for trial in trials)

    def _was_tried(self, engine: Engine, program: Program) -> bool:
        return (engine, program.recipe) in self._tried

    def take_made(self, *, is_launched: bool = True) -> None:
        """Try what compilers that were begun ahead have made by now: it takes little more, and wins often.

        Where the rewritten graph was not launched since kernels made it faster, it is likelier to win than
        what has none of them, which waits.
        """
        least = FAR if is_launched else MUCH
        for engine in self._pipeline.engines:
            if self._has_made(engine):
                made = [form for form in self.forms(engine) if form.is_made]
                for form in [form for form in made if not self._lacks(form, least)]:
                    if (engine, form.program.recipe) not in self._put_off:
                        self._try(engine, form, self._manager.deadline)

    def await_made(self, until: float) -> None:
        """Wait until a time for compilers that work on the likeliest form, and try what is made.

        It is likelier to gain than what another lane could try in the meantime.
        """
        sandbox = self._manager.sandbox
        forms = [(engine, form) for engine in self._pipeline.engines for form in self.forms(engine)]
        awaited = [(engine, form.program) for engine, form in forms if form.is_begun and form.is_likely]
        while time.perf_counter() < until and any(
            sandbox is not None and sandbox.is_working(*each) for each in awaited
        ):
            time.sleep(LOOK_S)
        self.take_made()

    def _waits_too_long(self, engine: Engine, deadline: float) -> bool:
        """Whether what is likelier than a form that is made may not be made in time."""
        left = deadline - time.perf_counter()
        likelier = [form for form in self.forms(engine) if not form.is_made and not self._lacks(form)]
        needed = [self._manager.needed_s(self.state, engine, form.program) for form in likelier]
        return min(needed, default=0.0) * SPARE > left

    def _lacks(self, form: Form, least: float = FAR) -> bool:
        """Whether a form is without the kernels that have made the graph faster by more than `least`."""
        has_kernels = any(step.family is Family.KERNEL for step in form.program.recipe)
        return self.kernels_gain > least and not has_kernels

    def _has_made(self, engine: Engine) -> bool:
        sandbox = self._manager.sandbox
        return sandbox is not None and any(sandbox.has_made(engine, p) for p in self._begun(engine))

    def begin(self) -> None:
        """Let compilers start, in processes of their own, on the program without kernels.

        The one with kernels follows it where these have gained much.
        """
        sandbox = self._manager.sandbox
        if sandbox is None or not sandbox.works_beside or time.perf_counter() > self._manager.deadline:
            return
        forms = [self.unfused(), *([self.state.graph.program] if self.kernels_gain > MUCH else [])]
        for engine in self._pipeline.engines:
            for program in forms:
                if not self._was_tried(engine, program):
                    sandbox.begin(engine, program)

    def unfused(self) -> Program:
        """The rewritten program without its native kernels, and without the layout that is only for those."""
        return self._without(self._fused())

    def _fused(self) -> list[Pass]:
        recipe = self.state.graph.program.recipe
        return [s for s in recipe if s.family is Family.KERNEL or s.name in self._inseparable]

    def compiling_s(self) -> float:
        """Seconds until the first result that a compiler was asked for ahead; infinite where none was."""
        sandbox, program = self._manager.sandbox, self.unfused()
        asked = [e for e in self._pipeline.engines if sandbox and sandbox.is_rehearsing(e, program)]
        return min((self._manager.needed_s(self.state, e, program) for e in asked), default=math.inf)

    def longest_s(self) -> float:
        """Seconds that the engine takes which takes longest."""
        program = self.unfused()
        engines = [engine for engine in self._pipeline.engines if why_not(engine, program) is None]
        return max((self._manager.needed_s(self.state, e, program) for e in engines), default=0.0)

    def _is_late(self, engine: Engine) -> bool:
        return engine.name in self._late

    def forms(self, engine: Engine) -> list[Form]:
        """The rewritten program as the engine can take it: with native kernels, or else without them.

        An engine that is worth more time is tried without them all the same, and without each kind of them:
        where it fuses by itself, a kernel that was faster before it may not be so any more. Forms that are
        being rehearsed already come first, also those of a graph before its last changes: then another one
        is not worth the time of a compiler. Before them is what has ended, the likely one first.
        """
        sandbox = self._manager.sandbox
        kernels = self._fused()
        left_out = {"": list[Pass]()} | ({UNFUSED: kernels} if kernels else {})
        if is_slow(engine) and len(kernels) > 1:
            alone = [kernel for kernel in kernels if kernel.name not in self._inseparable]
            left_out |= {f" (without {kernel.name})": [kernel] for kernel in alone}
        readable: dict[str, Program] = {}
        for suffix, missing in left_out.items():
            program = self._without(missing)
            if why_not(engine, program) is None:
                readable[suffix] = program
                if not is_slow(engine):
                    break
        if not readable:
            return [Form("", self.unfused(), is_begun=False, is_made=False, is_likely=True)]  # says why not
        wanted = UNFUSED if kernels and self.kernels_gain <= MUCH else ""
        likely = wanted if wanted in readable else next(iter(readable))
        begun = self._begun(engine)
        made = {p.recipe for p in begun if sandbox is not None and sandbox.has_made(engine, p)}
        places = {program.recipe: place for place, program in enumerate(begun)}
        earlier = places.keys() - {program.recipe for program in readable.values()}
        forms = [
            Form(suffix, p, p.recipe in places, p.recipe in made, suffix == likely)
            for suffix, p in readable.items()
        ]
        forms += [
            Form(EARLIER, p, is_begun=True, is_made=p.recipe in made, is_likely=False)
            for p in begun
            if p.recipe in earlier
        ]

        def order(form: Form) -> tuple[bool, bool, int, bool]:
            place = 0 if form.is_made else places.get(form.program.recipe, 0)
            return not form.is_begun, not form.is_made, place, not form.is_likely

        return sorted(forms, key=order)

    def _begun(self, engine: Engine) -> list[Program]:
        """The lane's programs on which a compiler was begun, and which have what makes the lane right."""
        rewritten, founded = self.state.graph.program, self.state.founded
        begun = [] if (sandbox := self._manager.sandbox) is None else sandbox.begun(engine, rewritten)
        return [p for p in begun if p.recipe[:founded] == rewritten.recipe[:founded]]

    def _without(self, missing: Sequence[Pass]) -> Program:
        """The rewritten program without some of its passes."""
        rewritten = self.state.graph.program
        recipe = tuple(step for step in rewritten.recipe if step not in missing)
        return rewritten if recipe == rewritten.recipe else self.state.replayed(recipe)
