"""The last comparison: the best of every lane beside eager, the choice between them, and its speedup."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampopt.ir.capture import Captured
from ampopt.ir.graph_listing import listed
from ampopt.ir.lane_io import original_call
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.model_copy import untouched_rng, working_copy
from ampopt.measure.clocks import engine_latency, peak_memory
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.headline import compare_fairly, load_now, sure_gain, told_within
from ampopt.measure.ledger import LaneSummary, Ledger, OutputError
from ampopt.measure.sampling import Gain, Measurement, gain, interleave
from ampopt.measure.verify import Verifier
from ampopt.search.lane_state import LaneState
from ampopt.search.subject import rest_s
from ampopt.system.budget import Budget
from ampopt.system.wording import argument

HEADLINE = 0.1
"""Share of the time budget for comparing the result with the original, if the machine is busy."""

LANES = 0.05
"""Share of the time budget for comparing the lanes."""


class LastComparison:
    """Compares the lanes' best programs with the original, and chooses one."""

    def __init__(
        self,
        original: nn.Module,
        captured: Captured,
        verifier: Verifier,
        ledger: Ledger,
        asked: Sequence[Lane],
        bound: float | None,
    ) -> None:
        """`asked` are the lanes that may be chosen; FP32 may answer for any of them.

        `bound` is the largest error of a lane of lower precision; None: no limit beyond verification.
        """
        self._original, self._captured, self._verifier = original, captured, verifier
        self._ledger, self._asked, self._bound = ledger, asked, bound
        self._device = captured.program.device
        self._answers: dict[str, LaneState] = {}
        self._told: dict[str, str | None] = {}
        """What is told of the best program of each lane."""
        self._beside: Measurement | None = None
        """Times of the original in the rounds of the lanes."""

    def summarize(self, states: Sequence[LaneState], seconds: float) -> None:
        """Time eager and the best of every lane side by side, verify the best once more, write it down.

        The original is called as its user does, with nothing around it that the user has not: what makes a
        call of a small network repeatable takes as long as half of it. It is sampled twice, see `headline`.
        """
        original = self._call_of_user()

        def eager(lane: Lane, call: Callable[[], object]) -> object:
            with lane.scope(self._device):
                return call()

        calls: dict[str, Any] = {"baseline": original, "baseline again": original}
        for state in states:
            own = self._call_of_user()  # what a model keeps from a call has the dtypes of its lane
            calls[f"eager {state.lane.name}"] = functools.partial(eager, state.lane, own)
            calls[f"best {state.lane.name}"] = state.best.call

        def is_told(timed: Mapping[str, Measurement]) -> bool:
            control = gain(timed["baseline"], timed["baseline again"])
            pairs = [(timed[f"eager {s.lane.name}"], timed[f"best {s.lane.name}"]) for s in states]
            return enough(len(timed["baseline"].samples), [sure_gain(*pair, control) for pair in pairs])

        with torch.no_grad(), untouched_rng(self._device):
            rests = {f"best {state.lane.name}": rest_s(state.best.program) for state in states}
            samplers = {
                name: engine_latency(call, self._device, rest_s=rests.get(name, 0.0))
                for name, call in calls.items()
            }
            enough = told_within(seconds)
            timed = interleave(samplers, seconds=seconds, until=is_told)
        self._ledger.baseline = self._beside = timed["baseline"]
        self._ledger.control = control = gain(timed["baseline"], timed["baseline again"])
        self._ledger.load = load_now()
        for state in states:
            self._write_down(state, timed, control)
        self._answers = {state.lane.name: state for state in states}
        self._let_fp32_answer(timed, control)
        self._ledger.notes += [
            f"in the {name} lane {note}"
            for name, note in self._told.items()
            if note is not None and self._answers[name].lane.name == name
        ]

    def _call_of_user(self) -> Callable[[], object]:
        """A call of a copy of the original as its user makes it, in the dtypes that the original takes."""
        args, kwargs = pytree.tree_unflatten(self._captured.leaves, self._captured.spec)
        model, args, kwargs = original_call(working_copy(self._original), args, kwargs)
        return functools.partial(model, *args, **kwargs)

    def _write_down(self, state: LaneState, timed: Mapping[str, Measurement], control: Gain) -> None:
        lane = state.lane
        check = state.check or self._verifier.check(state.best.run, lane)
        if check.spread:
            self._ledger.notes.append(
                f"in the {lane.name} lane {check.spread}; {argument('nan', 'exact')} forbids that"
            )
        self._told[lane.name] = check.note
        before, after = timed[f"eager {lane.name}"], timed[f"best {lane.name}"]
        self._ledger.lanes[lane.name] = LaneSummary(
            lane=lane.name,
            dtype=str(lane.dtype).removeprefix("torch."),
            eager=before,
            eager_error=self._verifier.own_error(lane),
            best=after,
            error=check.error,
            passes=tuple(step.name for step in state.best.program.recipe),
            memory=peak_memory(state.best.call, self._device),
            refused=check.reason or self._why_over(lane, check.error),
            gain=sure_gain(before, after, control),
            outputs=() if check.reason else self._output_errors(state),
        )

    def _output_errors(self, state: LaneState) -> tuple[OutputError, ...]:
        """The errors of the model's outputs, and of its state's, on the example inputs."""
        draw = self._verifier.draws[0]
        values = self._verifier.reference(draw)[0]
        errors = self._verifier.output_errors(state.best.run, state.lane, draw)
        returned: Any = self._captured.program.graph.graph.output_node().args[0]
        names = [node.name for node in returned]
        return tuple(
            OutputError(name, tuple(value.shape), *each)
            for name, value, each in zip(names, values, errors, strict=False)
        )

    def is_too_inexact(self, state: LaneState) -> bool:
        """Whether a lane's winner is right, and over the tolerance: that is told, and it is not chosen."""
        if self._bound is None or not state.lane.is_mixed:
            return False
        check = self._verifier.check(state.best.run, state.lane)
        if not check.passed or check.error <= self._bound:
            return False
        state.check = check
        return True

    def _why_over(self, lane: Lane, error: float) -> str | None:
        """Why a lane is refused for its error, with what would accept it."""
        if self._bound is None or error <= self._bound or lane == FP32:
            return None
        accept = f"{argument('tolerance', _round_up(error))} or {argument('precision', lane.name)}"
        return f"its error {error:.2g} is over the tolerance {self._bound:g}: accept it with {accept}"

    def _let_fp32_answer(self, timed: Mapping[str, Measurement], control: Gain) -> None:
        """FP32's program answers for a lane of lower precision where that lane's own is slower.

        A lane says which precision is allowed, so no lane is slower than a stricter one.
        """
        fp32 = self._ledger.lanes.get(FP32.name)
        if fp32 is None or fp32.refused is not None:
            return
        for name, lane in self._ledger.lanes.items():
            if lane is fp32 or lane.refused is not None or not gain(lane.best, fp32.best).is_real:
                continue
            self._answers[name] = self._answers[FP32.name]
            self._ledger.lanes[name] = dataclasses.replace(
                lane,
                best=fp32.best,
                error=fp32.error,
                outputs=fp32.outputs,
                passes=fp32.passes,
                memory=fp32.memory,
                gain=sure_gain(lane.eager, fp32.best, control),
                answered_by=FP32.name,
            )

    def choose(
        self, states: Sequence[LaneState], serve: Callable[[LaneState], nn.Module], budget: Budget | None
    ) -> LaneState:
        """The fastest lane whose error is within tolerance; say so where a faster one was refused.

        A lane of lower precision is not chosen where it is no faster outside the noise. The result is then
        compared with the original by times of its own, of calls as the user makes them: those that a lane
        was chosen for are too good to judge it by. `serve` makes the module for a lane. Without a `budget`
        there is no such comparison: the whole, of which this is a part, has one.
        """
        summaries = self._ledger.lanes
        usable = [lane.name for lane in self._asked if lane.name in summaries]
        usable = [name for name in usable if summaries[name].refused is None]
        fp32 = summaries.get(FP32.name)
        if not usable and fp32 is not None and fp32.refused is None:
            usable = [FP32.name]
            if asked := ", ".join(lane.name for lane in self._asked if lane.name in summaries):
                self._ledger.notes.append(f"FP32 answers for {asked}, which could not be verified")
        if not usable:
            reasons = "; ".join(f"{name}: {lane.refused}" for name, lane in summaries.items())
            self._ledger.notes.append(
                f"the original answers every call: no lane could be verified. {reasons}"
            )
            self._ledger.chosen = ORIGINAL
            return states[0]
        best = usable[0]
        for other in usable[1:]:
            if gain(summaries[best].best, summaries[other].best).is_real:
                best = other
        self._ledger.chosen, chosen = best, self._answers[best]
        self._ledger.graphs = listed(self._captured.program.graph), listed(chosen.best.program.graph)
        fastest, control, beside = summaries[best].best, self._ledger.control, self._beside
        assert control is not None
        assert beside is not None
        if budget is None:
            self._ledger.gain = sure_gain(beside, fastest, control)
            self._leave_if_loss(gain(beside, fastest))
        else:
            self._compare_with_original(serve(chosen), rest_s(chosen.best.program), budget)
        if self._ledger.chosen == ORIGINAL:
            fastest = beside
        for name, lane in summaries.items():
            if lane.refused and (more := sure_gain(fastest, lane.best, control).at_least) > 1:
                self._ledger.notes.append(
                    f"the {name} lane would be at least {more:.2f}x faster still, but {lane.refused}"
                )
        return chosen

    def _compare_with_original(self, module: nn.Module, rest: float, budget: Budget) -> None:
        """The headline: the module, each time after a rest, beside the original, chosen where it is faster.

        It takes what is left of the time budget, and no more.
        """
        args, kwargs = pytree.tree_unflatten(self._captured.leaves, self._captured.spec)
        ours: Callable[[], object] = functools.partial(module, *args, **kwargs)
        left = budget.started + budget.seconds - time.perf_counter()
        with torch.no_grad(), untouched_rng(self._device):
            own = engine_latency(ours, self._device, rest_s=rest)
            original = engine_latency(self._call_of_user(), self._device)
            found = compare_fairly(original, own, seconds=min(HEADLINE * budget.seconds, max(left, 0.0)))
        self._ledger.baseline, self._ledger.gain, self._ledger.load = found.before, found.gain, found.load
        self._leave_if_loss(gain(found.before, found.after))

    def _leave_if_loss(self, told: Gain) -> None:
        if told.is_loss:
            self._ledger.chosen = ORIGINAL
            self._ledger.notes.append(
                "the original answers every call: called in turn with it, the best program takes "
                f"{1 / told.ratio:.2f} times as long"
            )


def _round_up(error: float) -> float:
    """An error with two digits, rounded up, to be used as a tolerance."""
    return float(f"{1.05 * error:.1e}")
