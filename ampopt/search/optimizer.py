"""Optimizes one captured model: which lanes are searched, for how long, and what is served in the end."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping

from torch import nn
from torch.utils import _pytree as pytree

from ampopt.deploy.onnx_names import input_names_of
from ampopt.deploy.optimized import Optimized
from ampopt.deploy.runtime import OptimizedModule
from ampopt.deploy.sized_program import SizedProgram
from ampopt.errors import AmpoptError, InputError, first_line
from ampopt.ir.capture import Captured
from ampopt.ir.lanes import FP32, Lane, lanes_for
from ampopt.ir.program import Program
from ampopt.ir.signature import describe
from ampopt.ir.size_range import Sizes, shown
from ampopt.ir.size_ranges import sizes_of
from ampopt.ir.transform import Recipe
from ampopt.measure.degenerate import notes_on
from ampopt.measure.entry import ORIGINAL, Verdict
from ampopt.measure.ledger import Ledger
from ampopt.measure.sampling import gain
from ampopt.measure.verify import Verifier
from ampopt.search.foreseen import Foreseen
from ampopt.search.lane_probe import judgeable, seconds_of_a_call
from ampopt.search.lane_state import LaneState
from ampopt.search.last_comparison import LANES, LastComparison
from ampopt.search.options import Options, why_more
from ampopt.search.pass_manager import PassManager
from ampopt.search.rehearsal import Sandbox
from ampopt.search.search_plan import TRYING, Search, begin_ahead
from ampopt.search.size_search import SHARE, find_sized_program
from ampopt.search.trials import Progress
from ampopt.search.tuning_cache import default_cache, key_of
from ampopt.system.budget import CALLS_OF_A_TRIAL, COSTLY_PART, Budget, calls_to_verify, finish_of
from ampopt.system.environment import environment
from ampopt.system.flags import rounds_to_tf32
from ampopt.system.interrupts import check_interrupted, held, interruptible
from ampopt.system.wording import argument

logger = logging.getLogger("ampopt")

SETTLING = 0.1
"""Share of the time budget for verifying a winner after the budget is spent."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """Work of a search.

    `draws`: number of random inputs for verification in addition to the examples; `seconds`: time of the
    lanes' comparison.
    """

    draws: int
    seconds: float


SEARCH, RECALL = Effort(2, 3.0), Effort(1, 1.0)
"""The effort of a search, and that of checking a cached result."""

BRIEFLY_S = 1e-3
"""Time budget in seconds for the remaining work after Ctrl-C."""


class Optimizer:
    """The work of one `optimize` call for one captured model (or one captured submodule)."""

    def __init__(
        self,
        original: nn.Module,
        captured: Captured,
        options: Options,
        *,
        name: str,
        started: float,
        progress: Progress | None = None,
        sandbox: Sandbox | None = None,
        max_captures: int = 16,
        is_part: bool = False,
        call_s: float | None = None,
        rival: Callable[[], object] | None = None,
    ) -> None:
        """`original` is a private copy in evaluation mode; `started` is on `time.perf_counter`'s clock.

        `call_s` is the time of a call in seconds, if known. `is_part`: of a model that is compared at last.
        `rival` calls an optimized form of the model in FP32 that is there already: then only the lanes asked
        for are searched, and none far behind it.
        """
        if call_s is None:
            args, kwargs = pytree.tree_unflatten(list(captured.leaves), captured.spec)
            call_s = seconds_of_a_call(original, args, kwargs, options.budget_s)
        self._call_s, options = call_s, options.with_time_for(call_s)
        self._sizes: Sizes = ()
        self._whole_s = options.budget_s
        if options.dynamic is not None:
            names = input_names_of(captured)[: len(captured.inputs)]
            self._sizes = sizes_of(options.dynamic, names, captured.inputs)
            options = options.with_share(1 - SHARE)
        self._original, self._captured, self._options, self._started = original, captured, options, started
        self._progress, self._sandbox, self._max_captures = progress, sandbox, max_captures
        self._rival, self._finish = rival, finish_of(call_s, is_part=is_part)
        self._budget = Budget(started, options.budget_s)
        program = captured.program
        self.device = program.device
        inputs = tuple(describe(example) for example in program.examples)
        self.ledger = Ledger(name, environment(self.device), inputs, notes=[*filter(None, [captured.told])])
        self.interrupted = False
        """Whether Ctrl-C has ended the search."""
        self._states: list[LaneState] = []
        self._pipeline = options.pipeline()
        self._lanes = lanes_for(options.precision, program.device, options.amp_dtype)
        self._cache = default_cache() if options.is_cacheable else None
        facts = options.cache_facts() | ({"rival": True} if rival is not None else {})
        facts |= {"tf32": True} if rounds_to_tf32(self.device) else {}  # it decides what may be chosen
        self._key = key_of(program, facts) if self._cache else ""
        self._known = self._cache.find(self._key, self._pipeline) if self._cache else None
        self._begin(RECALL if self.is_tuned else SEARCH)

    def _begin(self, effort: Effort) -> None:
        """Prepare to verify and time programs, on fewer random inputs where a call takes long.

        Where not even the examples can be verified within the budget, the reason is noted instead.
        """
        options, captured = self._options, self._captured
        likeliest, foreseen = self._candidates[-1], Foreseen()
        if self._known is None or likeliest.name not in self._known.recipes:
            foreseen = begin_ahead(likeliest.start(captured.program), self._pipeline, self._sandbox)
        after = self._finish.calls + (0 if self.is_tuned else CALLS_OF_A_TRIAL)
        for draws in range(effort.draws, -1, -1):
            needed_s = self._call_s * (calls_to_verify(draws) + after)
            self._why_not = self._budget.why_not(needed_s, self._call_s, "verifying and judging one pass")
            if self._why_not is None:
                break
        else:
            return
        if draws < effort.draws:
            self.ledger.notes.append(
                f"verified on {draws} of {effort.draws} random inputs, because a call takes "
                f"{self._call_s:.2g} s here"
            )
        self._effort = dataclasses.replace(effort, draws=draws)
        try:
            self._verifier = Verifier(
                self._original,
                captured,
                tolerance=options.tolerance,
                metric=options.metric,
                draws=draws,
                faults=options.nan,
            )
            found, called = notes_on(self._verifier), self._verifier.called_error
        except InputError:
            raise  # of the user's metric
        except Exception as error:
            check_interrupted(error)
            self._why_not = f"nothing can be verified: {first_line(error)}"
            return
        found += [self._verifier.note] if self._verifier.note else []
        self.ledger.called_error, self._bound = called, options.bound(self._lanes, called)
        if called is not None and self._bound != options.bound(self._lanes):
            found.append(why_more(called))
        self.ledger.notes += [note for note in found if note not in self.ledger.notes]
        self._last = LastComparison(
            self._original, captured, self._verifier, self.ledger, self._lanes, self._bound
        )
        finishing_s = self._verifier.settling_s(self._call_s) + 2 * self._finish.calls * self._call_s
        shares = TRYING * options.budget_s, options.budget_s - finishing_s
        trying_s = max(min(shares), self._finish.least * options.budget_s)
        self._manager = PassManager(
            captured.program,
            self._verifier,
            self.ledger,
            deadline=self._started + trying_s,
            progress=self._progress,
            sandbox=self._sandbox,
            started=self._started,
            foreseen=foreseen,
        )

    @property
    def is_tuned(self) -> bool:
        """Whether the cache has what a search for this model came to that was not cut off."""
        return self._known is not None and self._known.complete

    @property
    def _candidates(self) -> tuple[Lane, ...]:
        """The lanes to search: those asked for, and FP32, whose program may answer for any of them."""
        return tuple(dict.fromkeys((FP32, *self._lanes))) if self._rival is None else self._lanes

    def run(self) -> OptimizedModule:
        """Try everything that the budget allows, and return the best result.

        Ctrl-C returns the best result so far, after a short comparison with the original; a second Ctrl-C
        returns the original, and so does any other error that prevents a result.
        """
        with held():
            try:
                self._finishes(self._try_everything, "interrupted: this is the best so far")
            except AmpoptError:
                raise  # the device is broken
            except Exception as error:
                logger.warning("ampopt: the search ended early", exc_info=True)
                self.ledger.notes.append(f"the search ended early, by an error in it: {first_line(error)}")
            best = self._last_comparison() if self._states else None
            if best is None:
                return self._unchanged()
            module = self._serve(None if self.ledger.chosen == ORIGINAL else best)
            self.ledger.seconds = time.perf_counter() - self._started
            return module

    def _try_everything(self) -> None:
        if self._why_not is not None:
            self.ledger.notes.append(self._why_not)
        elif not self._recall():
            seconds, notes = self._options.budget_s, self.ledger.notes
            self._search(judgeable(self._candidates, self._captured, self._verifier, seconds, notes))

    def _last_comparison(self) -> LaneState | None:
        """Summarize what was not summarized yet, and choose; None, and a note, where that cannot be.

        After an interruption it is brief, also where it is itself what was interrupted.
        """
        chosen: list[LaneState] = []

        def compare() -> None:
            if self.ledger.lanes.keys() != {state.lane.name for state in self._states}:
                self.ledger.lanes.clear()
                self._summarize()
            budget = Budget(self._started, self._options.budget_s)
            own = None if self._finish is COSTLY_PART else budget
            chosen.append(self._last.choose(self._states, self._module, own))

        for _ in range(1 if self.interrupted else 2):
            if self.interrupted:
                self._options = self._options.within(BRIEFLY_S)
            try:
                if self._finishes(compare, "interrupted in the last comparison"):
                    return chosen[0]
            except Exception as error:
                self.ledger.notes.append(f"the last comparison failed: {first_line(error)}")
                break
        self.ledger.lanes.clear()
        return None

    def _serve(self, state: LaneState | None) -> OptimizedModule:
        """The module for a lane; the original, with a note, where its best program cannot be made ready."""
        try:
            return self._module(state, self._sized(state))
        except (Exception, KeyboardInterrupt) as error:
            self.ledger.notes.append(
                f"the best program cannot be made ready to be served: {first_line(error)}"
            )
            return self._unchanged()

    def _summarize(self) -> None:
        self._last.summarize(self._states, min(self._effort.seconds, LANES * self._options.budget_s))

    def _recall(self) -> bool:
        """Take up every lane where an earlier call left it; False where that is unknown or not good now."""
        if self._known is None or not self._known.complete:
            return False
        known, lanes = self._known.recipes, self._candidates
        if not known or not known.keys() <= {lane.name for lane in lanes}:
            return False
        self._states = [self._manager.open(lane) for lane in lanes if lane.name in known]
        if not all(self._manager.recall(state, known[state.lane.name]) for state in self._states):
            return self._forget("is not right any more")
        try:
            self._settle()
            self._summarize()
        except Exception as error:
            check_interrupted(error)
            return self._forget(f"does not run any more ({first_line(error)})")
        if any(gain(lane.eager, lane.best).is_loss for lane in self.ledger.lanes.values()):
            return self._forget("is slower than the original now")
        for name in [lane.name for lane in self._lanes if lane.name not in known]:
            self.ledger.notes.append(
                f"the {name} lane was not tried: an earlier call could not judge it "
                f"({argument('cache', False)} looks again)"
            )
        self.ledger.notes.append("tuned by an earlier call (`ampopt cache` tells where that is kept)")
        return True

    def _forget(self, why: str) -> bool:
        """Start anew where what an earlier call had found is no good; False."""
        self.ledger.notes.append(f"what an earlier call had found {why}: tuned anew")
        self.ledger.lanes.clear()
        self._states, self._known = [], None
        self._begin(SEARCH)
        return self._why_not is not None

    def _search(self, lanes: Mapping[Lane, float]) -> None:
        """Search the lanes, and keep what was found for the next call."""
        if not lanes:
            return
        budget = Budget(self._started, self._options.budget_s)
        search = Search(
            self._manager, self._verifier, self.ledger, self._pipeline, budget, self._bound, self._rival
        )
        self._states = search.states  # they are there, too, if Ctrl-C ends the search
        search.run(lanes, {} if self._known is None else self._known.recipes)
        if FP32 not in self._lanes and [state.lane for state in self._states] == [FP32]:
            self.ledger.notes.append(
                f"{argument('precision', self._options.precision)} is answered in FP32: no lower one could "
                "be judged"
            )
        self._settle()
        is_whole = search.note_what_was_cut_off()
        tried = {entry.lane for entry in self.ledger.entries if entry.verdict is not Verdict.NOT_TRIED}
        if self._cache and self._verifier.is_sound and all(s.lane.name in tried for s in self._states):
            recipes = {s.lane.name: s.best.program.recipe for s in self._states}
            self._cache.store(self._key, recipes, self._pipeline, complete=is_whole)

    def _settle(self) -> None:
        """Verify each lane's winner outside of the examples' range, where the time budget has room for it."""
        budget = Budget(self._started, self._options.budget_s)
        for state in self._states:
            if self._last.is_too_inexact(state):
                continue
            call_s, what = state.call_s, "verifying outside of the examples' range"
            needed_s = self._verifier.settling_s(call_s)
            why_not = budget.why_not(needed_s, call_s, what)
            if why_not and needed_s > SETTLING * self._options.budget_s:
                self.ledger.notes.append(
                    f"the {state.lane.name} lane is verified in that range only: {why_not}"
                )
            else:
                self._manager.settle(state)

    def _unchanged(self) -> OptimizedModule:
        """The original under the interface of an optimized module."""
        why = "" if self.ledger.entries else ": nothing was tried"
        self.ledger.notes.append(f"the original answers every call{why}")
        self.ledger.chosen, self.ledger.seconds = ORIGINAL, time.perf_counter() - self._started
        return self._module(None)

    def _finishes(self, work: Callable[[], None], note: str) -> bool:
        """Do the work; False, and the note, where Ctrl-C ends it."""
        try:
            with interruptible():
                work()
        except KeyboardInterrupt:
            self.interrupted = True
            self.ledger.notes.append(note)
            return False
        return True

    def _sized(self, state: LaneState | None) -> SizedProgram | None:
        """A program for the ranges of sizes that were asked for; None, and a note, where there is none."""
        if not self._sizes:
            return None
        if state is None or self.interrupted:
            each = "interrupted: each size gets a program of its own"
            why = "the original answers" if state is None else each
            self.ledger.notes.append(f"there is no program for {shown(self._sizes)}: {why}")
            return None
        program = state.best.program
        made = Optimized(self._original, self._captured, program, self._recipe(program), self.ledger)
        end, found = self._started + self._whole_s, list[SizedProgram | None]()

        def search() -> None:
            sized, note = find_sized_program(made, state.best, self._sizes, lambda: end - time.perf_counter())
            self.ledger.notes.append(note)
            found.append(sized)

        self._finishes(search, f"interrupted: there is no program for {shown(self._sizes)}")
        return found[0] if found else None

    def _recipe(self, program: Program | None) -> Recipe:
        options = self._options
        bounds = options.tolerance, options.metric, options.nan
        return Recipe(FP32, (), *bounds) if program is None else Recipe(program.lane, program.recipe, *bounds)

    def _module(self, state: LaneState | None, sized: SizedProgram | None = None) -> OptimizedModule:
        """The module that runs a lane's best program; None: the original, which is then saved, too."""
        options, best = self._options, None if state is None else state.best
        program = (best or self._captured).program
        recipe = self._recipe(None if best is None else program)
        return OptimizedModule(
            self._original,
            self._captured,
            program,
            recipe,
            self.ledger,
            outputs=options.outputs,
            max_captures=self._max_captures,
            serve_original=best is None,
            ready=None if best is None else best.run,
            sized=sized,
        )
