"""`ampopt.compare`: measures each pass alone, in sequence, and left out of the pipeline, in every lane."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ampopt.api import mode_note, prepare_call
from ampopt.engines.executable import executable
from ampopt.errors import CaptureError, InputError
from ampopt.ir.arguments import refuse_more
from ampopt.ir.capture import Captured, capture
from ampopt.ir.lanes import Lane, lanes_for
from ampopt.ir.model_copy import device_of
from ampopt.ir.program import Program
from ampopt.ir.signature import describe, flatten_call
from ampopt.ir.transform import Family, Pass
from ampopt.measure.clocks import engine_latency
from ampopt.measure.headline import compare_fairly
from ampopt.measure.report import cell, interval
from ampopt.measure.sampling import Gain, Measurement
from ampopt.measure.verify import Faults, Verifier
from ampopt.search.named_passes import Passes
from ampopt.search.options import Options
from ampopt.search.progress import progress_line
from ampopt.search.rehearsal import Sandbox
from ampopt.system.environment import environment
from ampopt.system.interrupts import interruptible, watched
from ampopt.system.process_state import process_kept
from ampopt.system.turns import optimizing

INTERRUPTED = "not tried: interrupted"
"""The reason in rows that were not measured because of Ctrl-C."""

MODES = ("alone", "cumulative", "left out")


@dataclasses.dataclass(frozen=True)
class ComparedPass:
    """One pass in one lane and one mode: median latency and gain over the mode's baseline, or a reason.

    The gain's interval is that of `headline.sure_gain`.

    The baseline is the captured program for "alone", the program one pass earlier for "cumulative", and for
    "left out" the program *without* the pass, so that a gain above 1 always means that the pass helps.
    """

    lane: str
    mode: str
    name: str
    latency: Measurement | None
    gain: Gain | None
    error: float | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`. `print` it for a table."""

    model: str
    environment: dict[str, str]
    inputs: tuple[str, ...]
    rows: tuple[ComparedPass, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON data, times in milliseconds."""
        return {
            "model": self.model,
            "environment": self.environment,
            "inputs": list(self.inputs),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 2),
            "rows": [
                {
                    **dataclasses.asdict(row),
                    "latency": None if row.latency is None else row.latency.to_dict(),
                }
                for row in self.rows
            ],
        }

    def to_markdown(self) -> str:
        """A Markdown table for each lane: a row for each pass, a column for each mode."""
        lines = [f"{self.model} on {self.environment['device']}, inputs {', '.join(self.inputs)}", ""]
        for note in self.notes:
            lines += [f"note: {note}", ""]
        for lane in dict.fromkeys(row.lane for row in self.rows):
            lines += [f"**{lane}**", "", "| pass | " + " | ".join(MODES) + " |", "|---" * 4 + "|"]
            for name in dict.fromkeys(row.name for row in self.rows if row.lane == lane):
                lines.append(
                    "| " + " | ".join([name, *(cell(self._cell(lane, name, m)) for m in MODES)]) + " |"
                )
            lines.append("")
        lines.append(
            "Median latency in ms and the factor that the pass brings (above 1: it helps) with its interval; "
            'where that holds 1 there is "no difference", and where it is too wide the machine is too busy.'
        )
        return "\n".join(lines) + "\n"

    def _cell(self, lane: str, name: str, mode: str) -> str:
        found = [r for r in self.rows if (r.lane, r.name, r.mode) == (lane, name, mode)]
        if not found:
            return "–"
        row = found[0]
        if row.latency is None or row.gain is None:
            return row.reason
        reason = f" {row.reason}" if row.reason else ""
        return f"{1e3 * row.latency.median:.3f} ({_factor(row.gain)}){reason}"

    def __str__(self) -> str:
        return self.to_markdown()


def _factor(gain: Gain) -> str:
    """What may be said of a gain in a cell of the table."""
    if gain.is_vague:
        return f"too busy to tell: {interval(gain)}"
    if gain.at_least > 1 or gain.is_loss:
        return f"{gain.ratio:.2f}x, {interval(gain)}"
    return f"no difference: {interval(gain)}"


@dataclasses.dataclass
class _Comparer:
    """The work of one `compare` call in one lane."""

    captured: Captured
    verifier: Verifier
    lane: Lane
    passes: tuple[Pass, ...]
    deadline: float
    sandbox: Sandbox
    sample_s: float = 0.4
    broken: set[str] = dataclasses.field(default_factory=set)

    def build(self, passes: Sequence[Pass]) -> tuple[Program, list[str]]:
        """The program with these passes, and the names of those that changed something."""
        program, applied = self.lane.start(self.captured.program), list[str]()
        for step in passes:
            if step.why_not(program) is not None:
                continue
            result, _ = self.sandbox.apply(step, program, seconds=self.deadline - time.perf_counter())
            if result.modified:
                program = result.program.replace(recipe=(*program.recipe, result.replay or step))
                applied.append(step.name)
        return program, applied

    def compare(self, mode: str, name: str, without: Program, with_pass: Program) -> ComparedPass:
        """Time two programs side by side and verify the one that has the pass."""
        check = self.verifier.check(run := executable(with_pass), self.lane)
        plain, device = executable(without), with_pass.device
        examples = with_pass.examples
        found = compare_fairly(
            engine_latency(lambda: plain(*examples), device),
            engine_latency(lambda: run(*examples), device),
            seconds=self.sample_s,
        )
        return ComparedPass(
            self.lane.name,
            mode,
            name,
            found.after,
            found.gain,
            check.error,
            f"({check.reason})" if check.reason else "",
        )

    def row(self, mode: str, step: Pass, before: Sequence[Pass], after: Sequence[Pass]) -> ComparedPass:
        """The row of one pass, given the passes without it and with it."""
        if time.perf_counter() > self.deadline:
            return self.not_compared(mode, step, "not tried: no time left")
        try:
            with interruptible():
                without, _ = self.build([s for s in before if s.name not in self.broken])
                with_pass, applied = self.build([s for s in after if s is step or s.name not in self.broken])
                if step.name not in applied:
                    return self.not_compared(mode, step, "nothing to do")
                return self.compare(mode, step.name, without, with_pass)
        except KeyboardInterrupt:
            return self.not_compared(mode, step, INTERRUPTED)
        except Exception as error:
            self.broken.add(step.name)
            return self.not_compared(mode, step, f"failed: {error}")

    def not_compared(self, mode: str, step: Pass, reason: str) -> ComparedPass:
        """The row of a pass that could not be measured."""
        return ComparedPass(self.lane.name, mode, step.name, None, None, None, reason)


@optimizing.taken()
@watched()
@process_kept()
def compare(
    model: nn.Module,
    example_inputs: Any = None,
    *more: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    precision: str = "auto",
    tolerance: float | None = None,
    budget_s: float = 120.0,
    device: torch.device | str | None = None,
    policy: str = "amp",
    amp_dtype: torch.dtype | None = None,
    exclude: Sequence[str] = (),
    nan: Faults = "keep",
    progress: bool | None = None,
    passes: Passes | None = None,
) -> Comparison:
    """Measure what each pass does to a model: alone, added in sequence, and left out of the whole pipeline.

    "alone" applies one pass to the captured model (with the lane's precision baked in); "cumulative" adds the
    passes one after another; "left out" takes one pass out of the full sequence. Every program is verified,
    and none is kept. The arguments are those of `optimize`. It waits for other `optimize` and `compare` calls
    in the process.

    Raises InputError if the arguments do not fit the model, or if it cannot be captured as one graph;
    Interrupted if Ctrl-C is pressed before the first row. Later Ctrl-C leaves out the remaining rows.
    """
    started = time.perf_counter()
    with interruptible():
        options = Options(
            precision=precision,
            tolerance=tolerance,
            budget_s=budget_s,
            policy=policy,
            amp_dtype=amp_dtype,
            exclude=exclude,
            nan=nan,
            passes=passes,
        )
        refuse_more(more)
        given = {} if example_kwargs is None else example_kwargs
        original, args, kwargs, _ = prepare_call(model, example_inputs, given, device)
        where = device_of(original, flatten_call(args, kwargs)[0])
        try:
            captured = capture(original, args, kwargs, where)
        except CaptureError as error:
            raise InputError(f"compare needs a model that is one graph: {error}") from error
        verifier = Verifier(original, captured, tolerance=options.tolerance, faults=options.nan)
    steps = tuple(options.pipeline())
    rows: list[ComparedPass] = []
    lanes = lanes_for(precision, where, amp_dtype)
    with progress_line(progress, started, options.budget_s) as tell, Sandbox(where) as sandbox:
        for number, lane in enumerate(lanes):
            share = started + options.budget_s * (number + 1) / len(lanes)
            comparer = _Comparer(captured, verifier, lane, steps, share, sandbox)
            for mode, step, before, after in _plan(steps, lane):
                if rows and rows[-1].reason == INTERRUPTED:
                    rows.append(comparer.not_compared(mode, step, INTERRUPTED))
                    continue
                tell(lane.name, f"{step.name} ({mode})")
                rows.append(comparer.row(mode, step, before, after))
    inputs = tuple(describe(t) for t in captured.program.examples)
    name, note = type(original).__name__, mode_note(model)
    notes = () if note is None else (note,)
    return Comparison(name, environment(where), inputs, tuple(rows), time.perf_counter() - started, notes)


Planned = tuple[str, Pass, tuple[Pass, ...], tuple[Pass, ...]]


def _plan(passes: tuple[Pass, ...], lane: Lane) -> list[Planned]:
    """(mode, pass, the passes without it, the passes with it), the cheap modes first.

    An engine replaces another: in sequences, of the engines only the one in question is there. Alone, a pass
    stands on the one that bakes the lane's precision.
    """
    engines = {step.name for step in passes if step.family is Family.ENGINE}
    precision = tuple(step for step in passes if step.name == lane.baked_by)

    def sequence(until: Pass | None, engine: Pass | None) -> tuple[Pass, ...]:
        kept = [s for s in passes if s.name not in engines or s is engine]
        return tuple(kept if until is None else kept[: kept.index(until)])

    plan: list[Planned] = []
    for step in passes:
        needs = () if step in precision else precision
        plan.append(("alone", step, needs, (*needs, step)))
    for step in passes:
        engine = step if step.name in engines else None
        before = sequence(step, engine)
        plan.append(("cumulative", step, before, (*before, step)))
    for step in passes:
        engine = step if step.name in engines else None
        full = sequence(None, engine)
        plan.append(("left out", step, tuple(s for s in full if s is not step), full))
    return plan
