"""The order in which passes are tried in one lane: the opening, other rewrites, variations, ways to run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from ampopt.ir.pipeline import Pipeline
from ampopt.ir.program import Program
from ampopt.ir.transform import Family, Pass, replay
from ampopt.measure.entry import Verdict
from ampopt.search.estimates import why_not
from ampopt.search.lane_engines import LaneEngines
from ampopt.search.lane_state import LaneState
from ampopt.search.openings import UNLIKELY, opening_of
from ampopt.search.pass_manager import PassManager
from ampopt.search.rescue import in_order
from ampopt.search.subject import Subject
from ampopt.search.trial import Trial

OPENING = "the opening"
"""The row of the passes that are tried together first."""

PLAIN_OPENING = "the opening without layouts and kernels"
"""The row of those that are tried together if that loses."""

LESS_LIKELY = "it seldom gains, and would have taken longer than a compiler that is likelier to"
"""The reason of an unlikely trial for which the result of a compiler would have had to wait."""

Until = Callable[[float], bool]
"""Whether a trial of so many seconds is to be left out for the sake of something likelier."""


class LaneSearch:
    """The search in one lane; `state` holds what it has found."""

    def __init__(
        self, manager: PassManager, state: LaneState, pipeline: Pipeline, patience: float = math.inf
    ) -> None:
        """`patience` is on `time.perf_counter`'s clock: what is unlikely to gain is not begun after it."""
        self.state, self._manager, self._pipeline, self._patience = state, manager, pipeline, patience
        self._opening = opening_of(state.base, pipeline.rewrites)
        self._rewrites = in_order(state, pipeline.rewrites)
        self._handled = {step.name for step in state.graph.program.recipe}
        self.opened = state.best
        """What the opening came to, which is compared with that of other lanes."""
        self.is_too_inexact = False
        """Whether the opening lost by its error alone, and nothing of it was kept."""
        self.engines = LaneEngines(manager, state, pipeline, self._opening, patience)
        self._launched: Subject | None = None
        self._has_new_kernels = False
        """Whether native kernels were kept that the graph was not launched with."""

    @staticmethod
    def expected(program: Program, pipeline: Pipeline) -> tuple[Pass, ...]:
        """The passes of the opening of a lane's first program on whose result compilers can begin.

        They are without native kernels, which need measurements, and without what stands with those.
        """
        opening = opening_of(program, pipeline.rewrites)
        names = {*opening.rewrites} - {*opening.inseparable, *(step.name for step in program.recipe)}
        steps = (step for step in pipeline.rewrites if step.name in names)
        return tuple(step for step in steps if step.family is not Family.KERNEL)

    @property
    def name(self) -> str:
        """The lane's name."""
        return self.state.lane.name

    def resume(self, recipe: tuple[Pass, ...]) -> bool:
        """Go on from a recipe at which an earlier search was cut off; False if it is not right any more."""
        rewrites = {step.name for step in self._rewrites}
        if not self._manager.recall(self.state, recipe):
            return False
        mine = tuple(step for step in recipe if step.name in rewrites)
        self.state.graph = self._launched = Subject(replay(mine, self.state.base))
        self._handled = {step.name for step in mine}
        self.engines.note_first()
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

        If they lose, those that others build on are tried without layouts and kernels; if they were exact
        enough, layouts and kernels follow with one of the opening's helpers, where there is time for it: they
        may be slower, or lose infinities, without it. What was not kept `rewrite` tries one by one. Not
        `with_engine`: the engine waits for its turn.
        """
        steps = [step for step in self._left() if step.name in self._opening.rewrites]
        plain = [step for step in steps if step.family is Family.REWRITE or step.enables_others]
        trial = self._open_with(OPENING, steps, deadline)
        if trial is not None and trial.entry.verdict is not Verdict.NOT_TRIED:
            self._open_with(PLAIN_OPENING, plain, self._manager.deadline)  # it takes little time
            is_too_inexact = trial.is_too_inexact(self.state.bound)
            if trial.entry.verdict is Verdict.REVERTED and not is_too_inexact:
                self._open_with_helpers(deadline)
            has_nothing = self.state.graph.program is self.state.base
            self.is_too_inexact = has_nothing and is_too_inexact
        self.launch(self._manager.deadline)  # without it lanes cannot be compared
        if with_engine:
            self.engines.run_first(deadline)
        self.opened = self.state.best

    def _open_with_helpers(self, deadline: float) -> None:
        """Try the opening with each of its helpers, until one makes it a gain."""
        for name in self._opening.helpers:
            steps = [step for step in self._left() if step.name in (*self._opening.rewrites, name)]
            program, helper = self.state.graph.program, next((s for s in steps if s.name == name), None)
            if helper is None or why_not(helper, program) is not None:
                continue
            if time.perf_counter() + self._manager.needed_s(self.state, helper, program) > deadline:
                continue
            if self._open_with(f"{OPENING} with {name}", steps, deadline) is None:
                return

    def reopen(self, deadline: float) -> None:
        """Look again, before lanes are compared, at what the opening has come to."""
        before = self.state.best
        self.engines.look_again(deadline)
        if self.opened is before:
            self.opened = self.state.best

    def fuse(self, deadline: float) -> None:
        """Try the native kernels that are not in the opening, and launch the result."""
        for step in [step for step in self._left() if not self._is_late(step)]:
            program = self.state.graph.program
            if step.family is Family.KERNEL:
                if time.perf_counter() + self._manager.needed_s(self.state, step, program) > deadline:
                    break
                self._rewrite([step], deadline)
            elif why_not(step, program) is None:
                break  # kernels may build on it
        self.launch(self._manager.deadline)

    def _open_with(self, name: str, steps: Sequence[Pass], deadline: float) -> Trial | None:
        """Try passes as one; the trial if it was one and lost."""
        if len(steps) < 2:
            return None
        trial = self._manager.try_together(self.state, name, steps, deadline)
        recipe, gain = self.state.graph.program.recipe, trial.entry.gain
        if trial.entry.verdict is Verdict.KEPT and gain is not None and self._has_measured_kernels(recipe):
            self.engines.kernels_gain = gain.ratio
            self.engines.begin()
        if trial.entry.verdict not in (Verdict.KEPT, Verdict.DECLINED):
            return trial
        self._handled = self._handled | {step.name for step in steps}
        return None

    def rewrite(self, deadline: float, until: Until = lambda _: False) -> None:
        """Try the rewrites that the opening has not tried, each in its place, those that seldom win last.

        The latter are left out when `until` says so of the seconds that one takes: what that waits for is
        likelier to gain. What compilers have made by then comes first.
        """
        self._rewrite(sorted(self._left(), key=self._is_late), deadline, until)

    def _left(self) -> list[Pass]:
        """The rewrites that were not tried yet."""
        return [step for step in self._rewrites if step.name not in self._handled]

    def _rewrite(self, steps: Sequence[Pass], deadline: float, until: Until = lambda _: False) -> None:
        self._handled |= {step.name for step in steps}
        for step in steps:
            self.engines.take_made(is_launched=not self._has_new_kernels)
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
                self.engines.kernels_gain *= entry.gain.ratio
                self._has_new_kernels = True
                self.engines.begin()  # what comes next takes seconds, in which a compiler can work

    def vary(self, deadline: float, until: Until = lambda _: False) -> None:
        """Try what may help in company: the recipe without some pass, and passes that gained nothing, again.

        It ends when `until` says so: what that waits for is likelier to gain. What compilers have made by
        then comes first.
        """
        self._without_losses(deadline)
        for attempt in (self._without_openers, self._again):
            self.engines.take_made()
            if not until(0.0):
                attempt(deadline)

    def launch(self, deadline: float) -> None:
        """Launch the rewritten graph, if that is not done, or try it directly where it has no launch."""
        graph, first = self.state.graph, self._launched is None
        if graph is self._launched:
            return
        self._launched = graph
        usable = [step for step in self._pipeline.launches if why_not(step, graph.program) is None]
        for launch in self._pipeline.launches if first else usable:
            trial = self._manager.try_passes(self.state, launch.name, [launch], graph.program, deadline)
            if trial.entry.verdict is Verdict.NOT_TRIED:
                self._launched = None
        self._has_new_kernels = self._has_new_kernels and self._launched is None
        if not usable and self.state.best is not graph:
            self._manager.try_graph(self.state, "the rewritten graph", deadline)

    @property
    def opens_with_kernels(self) -> bool:
        """Whether the opening has kernels that are measured, which takes seconds."""
        return bool(self._opening.inseparable)

    @property
    def is_launched(self) -> bool:
        """Whether there was time to launch the rewritten graph."""
        return self._launched is not None

    def _has_measured_kernels(self, recipe: Sequence[Pass]) -> bool:
        names = {step.name for step in recipe if step.family is Family.KERNEL}
        return not names.isdisjoint(self._opening.inseparable)

    def _is_late(self, step: Pass) -> bool:
        return step.name in self._opening.late

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
            is_separable = step.name not in self._opening.inseparable
            if step.family is not Family.REWRITE and is_separable and not step.enables_others:
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
