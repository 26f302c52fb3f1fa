"""Optimizes one captured model in all lanes: baseline, passes, engines, choice of the lane, result."""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import first_line
from ampopt.ir.capture import Captured
from ampopt.ir.lanes import FP32, Lane, lanes_for
from ampopt.ir.model_copy import device_of, untouched_rng, working_copy
from ampopt.ir.settings import Settings
from ampopt.ir.signature import describe, flatten_call
from ampopt.ir.transform import Pass, Recipe
from ampopt.measure.clocks import engine_latency, latency, peak_memory, synchronize
from ampopt.measure.degenerate import notes_on
from ampopt.measure.entry import ORIGINAL, Verdict
from ampopt.measure.headline import compare_fairly, load_now, sure_gain
from ampopt.measure.ledger import LaneSummary, Ledger
from ampopt.measure.sampling import gain, interleave
from ampopt.measure.verify import Verifier
from ampopt.search.lane_probe import LOADING, REWRITING, judgeable
from ampopt.search.options import Options
from ampopt.search.pass_manager import LaneState, PassManager, Progress, judging_s
from ampopt.search.rehearsal import Sandbox
from ampopt.search.rescue import in_order, rescued
from ampopt.search.tuning_cache import default_cache, key_of
from ampopt.system.budget import (
    CALLS_OF_A_TRIAL,
    CALLS_TO_COMPARE,
    CALLS_TO_LOOK,
    CALLS_TO_SETTLE,
    Budget,
    calls_to_verify,
)
from ampopt.system.environment import environment
from ampopt.system.interrupts import check_interrupted, held, interruptible

TRYING = 0.85
"""Share of the time budget after which no step at all is started."""

SETTLING = 0.1
"""Share of the time budget for verifying a winner after the budget is spent."""

LEAST_REWRITING, LAUNCHING = 0.25, 0.1
"""Shares of the time budget: minimum for rewrites if engines take long; capture of the rewritten program."""

HEADLINE = 0.1
"""Share of the time budget for comparing the result with the original, if the machine is busy."""

LOOKING = 0.03
"""Share of the time budget for measuring the time of a call."""

AUTO_TOLERANCE = 1e-2
"""Largest relative error of a lane that `precision="auto"` chooses, if the user gives no tolerance."""


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


def seconds_of_a_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], budget_s: float
) -> float:
    """Time in seconds of a call of a copy of a model: the shortest of three, or of fewer (see `LOOKING`).

    A single call may be disturbed by other load, and the first one of a process loads libraries: it is
    repeated within `LOADING`. Each call gets its own tensors, as it may write to them.
    """

    def own(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    device, times = device_of(model, flatten_call(args, kwargs)[0]), list[float]()
    model = working_copy(model)
    while len(times) < CALLS_TO_LOOK and (
        sum(times) < LOOKING * budget_s or (len(times) == 1 and times[0] < LOADING * budget_s)
    ):
        own_args, own_kwargs = pytree.tree_map(own, (args, dict(kwargs)))
        with Settings().scope(device), untouched_rng(device):
            synchronize(device)
            began = time.perf_counter()
            model(*own_args, **own_kwargs)
            synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


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
        call_s: float | None = None,
    ) -> None:
        """`original` is a private copy in evaluation mode; `started` is on `time.perf_counter`'s clock.

        `call_s` is the time of a call in seconds, if known.
        """
        self._original, self._captured, self._options, self._started = original, captured, options, started
        self._progress, self._sandbox, self._max_captures = progress, sandbox, max_captures
        self._budget = Budget(started, options.budget_s)
        program = captured.program
        self.device = program.device
        inputs = tuple(describe(example) for example in program.examples)
        self.ledger = Ledger(name, environment(self.device), inputs)
        self.interrupted = False
        """Whether Ctrl-C has ended the search."""
        self._states: list[LaneState] = []
        self._pipeline = options.pipeline()
        self._lanes = lanes_for(options.precision, program.device, options.amp_dtype)
        self._cache = default_cache() if options.is_cacheable else None
        self._key = key_of(program, options.cache_facts()) if self._cache else ""
        self._known = self._cache.find(self._key, self._pipeline) if self._cache else None
        if call_s is None:
            args, kwargs = pytree.tree_unflatten(list(captured.leaves), captured.spec)
            call_s = seconds_of_a_call(original, args, kwargs, options.budget_s)
        self._call_s = call_s
        self._begin(SEARCH if self._known is None else RECALL)

    def _begin(self, effort: Effort) -> None:
        """Prepare to verify and time programs, on fewer random inputs where a call takes long.

        Where not even the examples can be verified within the budget, the reason is noted instead.
        """
        options, captured = self._options, self._captured
        after = CALLS_TO_COMPARE + (0 if self.is_tuned else CALLS_OF_A_TRIAL)
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
            found = notes_on(self._verifier)
        except Exception as error:
            check_interrupted(error)
            self._why_not = f"nothing can be verified: {first_line(error)}"
            return
        found += [self._verifier.note] if self._verifier.note else []
        self.ledger.notes += [note for note in found if note not in self.ledger.notes]
        deadline = self._started + TRYING * options.budget_s  # the rest is for the last comparison
        self._manager = PassManager(
            captured.program,
            self._verifier,
            self.ledger,
            deadline=deadline,
            progress=self._progress,
            sandbox=self._sandbox,
        )

    @property
    def is_tuned(self) -> bool:
        """Whether the cache has a recipe for this model."""
        return self._known is not None

    def run(self) -> OptimizedModule:
        """Try everything that the budget allows, and return the best result.

        Ctrl-C returns the best result so far, after a short comparison with the original; a second Ctrl-C
        returns the original, and so does any other error that prevents a result.
        """
        lanes = self._lanes
        with held():
            self._finishes(lambda: self._try_everything(lanes), "interrupted: this is the best so far")
            best = self._last_comparison() if self._states else None
            if best is None:
                return self._unchanged()
            self.ledger.seconds = time.perf_counter() - self._started
            return self._serve(None if self.ledger.chosen == ORIGINAL else best)

    def _try_everything(self, lanes: Sequence[Lane]) -> None:
        if self._why_not is not None:
            self.ledger.notes.append(self._why_not)
        elif not self._recall(lanes):
            self._open(lanes)
            if not self._states and FP32 not in lanes:
                self._open((FP32,))
                if self._states:
                    asked = f"precision={self._options.precision!r}"
                    self.ledger.notes.append(f"{asked} is answered in FP32: no lower one could be judged")
            if self._states:
                self._search()

    def _open(self, lanes: Sequence[Lane]) -> None:
        """Open the lanes that can be judged and are right, or can be made so; notes say why not others."""
        verifier, notes = self._verifier, self.ledger.notes
        kept = judgeable(lanes, self._captured, verifier, self._options.budget_s, notes)
        for lane, call_s in kept.items():
            state = self._manager.open(lane, call_s)
            if rescued(self._manager, state, verifier, self._pipeline.rewrites, notes):
                self._states.append(state)

    def _last_comparison(self) -> LaneState | None:
        """Summarize what was not summarized yet, and choose; None, and a note, where that cannot be.

        After an interruption it is brief, also where it is itself what was interrupted.
        """
        chosen: list[LaneState] = []

        def compare() -> None:
            if self.ledger.lanes.keys() != {state.lane.name for state in self._states}:
                self.ledger.lanes.clear()
                self._summarize()
            chosen.append(self._choose())

        for _ in range(1 if self.interrupted else 2):
            if self.interrupted:
                self._options = dataclasses.replace(self._options, budget_s=BRIEFLY_S)
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
            return self._module(state)
        except (Exception, KeyboardInterrupt) as error:
            self.ledger.notes.append(
                f"the best program cannot be made ready to be served: {first_line(error)}"
            )
            return self._unchanged()

    def _recall(self, lanes: Sequence[Lane]) -> bool:
        """Take up every lane where an earlier call left it; False where that is unknown or not good now."""
        known = self._known
        possible = dict.fromkeys((*lanes, FP32))  # which answers where none of the lanes could be judged
        if not known or not known.keys() <= {lane.name for lane in possible}:
            return False
        self._states = [self._manager.open(lane) for lane in possible if lane.name in known]
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
        for name in [lane.name for lane in lanes if lane.name not in known]:
            self.ledger.notes.append(
                f"the {name} lane was not tried: an earlier call could not judge it (cache=False looks again)"
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

    def _search(self) -> None:
        """Try everything in every lane, and keep what was found for the next call."""
        rewriting = self._seconds_for_rewriting()
        for place, state in enumerate(self._states, start=1):
            deadline = self._started + rewriting * place / len(self._states)
            passes = in_order(state, self._pipeline.rewrites)
            self._manager.rewrite(state, passes, deadline=deadline)
        self._try_engines([None])
        self._try_engines(self._pipeline.engines)
        self._settle()
        tried = {entry.lane for entry in self.ledger.entries if entry.verdict is not Verdict.NOT_TRIED}
        if self._cache is not None and all(state.lane.name in tried for state in self._states):
            recipes = {s.lane.name: s.best.program.recipe for s in self._states}
            self._cache.store(self._key, recipes, self._pipeline)

    def _settle(self) -> None:
        """Verify each lane's winner outside of the examples' range, where the time budget has room for it."""
        budget = Budget(self._started, self._options.budget_s)
        for state in self._states:
            call_s, what = state.call_s, "verifying outside of the examples' range"
            needed_s = CALLS_TO_SETTLE * call_s
            why_not = budget.why_not(needed_s, call_s, what)
            if why_not and needed_s > SETTLING * self._options.budget_s:
                self.ledger.notes.append(
                    f"the {state.lane.name} lane is verified in that range only: {why_not}"
                )
            else:
                self._manager.settle(state)

    def _seconds_for_rewriting(self) -> float:
        """What rewrites may take, of all lanes together, so that the slowest way to run still gets a turn."""
        whole, program = self._options.budget_s, self._captured.program
        call_s = max(state.call_s for state in self._states)
        longest = max(
            (e.expected_seconds(program) + judging_s(e, call_s) for e in self._pipeline.engines), default=0.0
        )
        rest = (TRYING - LAUNCHING) * whole - longest
        return min(REWRITING * whole, max(LEAST_REWRITING * whole, rest))

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

    def _try_engines(self, engines: Sequence[Pass | None]) -> None:
        """Ways to run for every lane, the lane that is ahead first."""
        calls = {s.lane.name: latency(s.best.call, self.device) for s in self._states}
        timed = interleave(calls, seconds=0.2, least=3)
        for state in sorted(self._states, key=lambda s: timed[s.lane.name].median):
            self._manager.choose_engine(state, engines, self._pipeline.launches)

    def _summarize(self) -> None:
        """Time eager and the best of every lane side by side, verify the best once more, write it down.

        The original is called as its user does, with nothing around it that the user has not: what makes a
        call of a small network repeatable takes as long as half of it. It is sampled twice, see `headline`.
        """
        args, kwargs = pytree.tree_unflatten(self._captured.leaves, self._captured.spec)
        original = functools.partial(working_copy(self._original), *args, **kwargs)

        def eager(lane: Lane) -> object:
            with lane.scope(self.device):
                return original()

        calls: dict[str, Any] = {"baseline": original, "baseline again": original}
        for state in self._states:
            calls[f"eager {state.lane.name}"] = functools.partial(eager, state.lane)
            calls[f"best {state.lane.name}"] = state.best.call
        with torch.no_grad(), untouched_rng(self.device):
            samplers = {name: engine_latency(call, self.device) for name, call in calls.items()}
            seconds = min(self._effort.seconds, 0.05 * self._options.budget_s)
            order = random.Random(0)
            timed = interleave(samplers, seconds=seconds, order=order)
        self.ledger.baseline = timed["baseline"]
        self.ledger.control = control = gain(timed["baseline"], timed["baseline again"])
        self.ledger.load = load_now()
        for state in self._states:
            lane = state.lane
            check = state.check or self._verifier.check(state.best.run, lane)
            if check.spread:
                self.ledger.notes.append(f'in the {lane.name} lane {check.spread}; nan="exact" forbids that')
            before, after = timed[f"eager {lane.name}"], timed[f"best {lane.name}"]
            self.ledger.lanes[lane.name] = LaneSummary(
                lane=lane.name,
                dtype=str(lane.dtype).removeprefix("torch."),
                eager=before,
                eager_error=self._verifier.own_error(lane),
                best=after,
                error=check.error,
                passes=tuple(step.name for step in state.best.program.recipe),
                memory=peak_memory(state.best.call, self.device),
                refused=check.reason,
                gain=sure_gain(before, after, control),
            )

    def _choose(self) -> LaneState:
        """The fastest lane whose error is within tolerance; say so where a faster one was refused.

        A lane of lower precision is not chosen where it is no faster outside the noise. The result is then
        compared with the original by times of its own, of calls as the user makes them: those that a lane
        was chosen for are too good to judge it by.
        """
        bound = self._options.tolerance
        if bound is None and len(self._lanes) > 1 and self._options.metric is None:
            bound = AUTO_TOLERANCE
        summaries = self.ledger.lanes
        for name, lane in summaries.items():
            if lane.refused is None and bound is not None and lane.error > bound and name != FP32.name:
                accept = f"accept it with tolerance={_round_up(lane.error)} or precision={name!r}"
                reason = f"its error {lane.error:.2g} is over the tolerance {bound:g}: {accept}"
                summaries[name] = dataclasses.replace(lane, refused=reason)
        usable = [s for s in self._states if summaries[s.lane.name].refused is None]
        if not usable:
            reasons = "; ".join(f"{name}: {lane.refused}" for name, lane in summaries.items())
            self.ledger.notes.append(f"the original answers every call: no lane could be verified. {reasons}")
            self.ledger.chosen = ORIGINAL
            return self._states[0]
        best = usable[0]
        for other in usable[1:]:
            if gain(summaries[best.lane.name].best, summaries[other.lane.name].best).is_real:
                best = other
        fastest, now, control = summaries[best.lane.name].best, self.ledger.baseline, self.ledger.control
        assert now is not None
        assert control is not None
        self.ledger.chosen = best.lane.name
        args, kwargs = pytree.tree_unflatten(self._captured.leaves, self._captured.spec)
        modules = working_copy(self._original), self._module(best)
        calls = [functools.partial(each, *args, **kwargs) for each in modules]
        with torch.no_grad(), untouched_rng(self.device):
            samplers = [engine_latency(call, self.device) for call in calls]
            found = compare_fairly(*samplers, seconds=HEADLINE * self._options.budget_s)
        self.ledger.baseline, self.ledger.gain, self.ledger.load = found.before, found.gain, found.load
        if gain(found.before, found.after).is_loss:
            self.ledger.chosen = ORIGINAL
            self.ledger.notes.append("the original answers every call: nothing that was tried is faster")
            fastest = now
        for name, lane in summaries.items():
            if lane.refused and (more := sure_gain(fastest, lane.best, control).at_least) > 1:
                self.ledger.notes.append(
                    f"the {name} lane would be at least {more:.2f}x faster still, but {lane.refused}"
                )
        return best

    def _module(self, state: LaneState | None) -> OptimizedModule:
        """The module that runs a lane's best program; None: the original, which is then saved, too."""
        options = self._options
        bounds = options.tolerance, options.metric, options.nan
        if state is None:
            program, ready = self._captured.program, None
            recipe = Recipe(FP32, (), *bounds)
        else:
            program, ready = state.best.program, state.best.run
            recipe = Recipe(state.lane, program.recipe, *bounds)
        return OptimizedModule(
            self._original,
            self._captured,
            program,
            recipe,
            self.ledger,
            outputs=options.outputs,
            max_captures=self._max_captures,
            serve_original=state is None,
            ready=ready,
        )


def _round_up(error: float) -> str:
    """An error with one digit, rounded up, to be used as a tolerance."""
    text = f"{1.05 * error:.1e}"
    return text.replace("e-0", "e-").replace("e+0", "e")
