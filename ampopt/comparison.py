"""`ampopt.compare`: measures each pass alone, in sequence, and left out of the pipeline, in every lane."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ampopt.errors import CaptureError, InputError, LackError
from ampopt.ir.arguments import progress_flag, refuse_more
from ampopt.ir.capture import Captured, capture
from ampopt.ir.lanes import lanes_for
from ampopt.ir.model_copy import device_of
from ampopt.ir.outside import keeps_variables
from ampopt.ir.signature import describe, flatten_call
from ampopt.ir.transform import Pass
from ampopt.measure.architecture import architecture_of
from ampopt.measure.compared import ComparedPass, Comparison
from ampopt.measure.fault_check import Faults
from ampopt.measure.verify import Verifier
from ampopt.search.ahead import Ahead
from ampopt.search.choices import Choices
from ampopt.search.compare_plan import Plan
from ampopt.search.comparer import Comparer
from ampopt.search.example_call import mode_note, prepare_call
from ampopt.search.lane_probe import judgeable, seconds_of_a_call
from ampopt.search.named_passes import Passes
from ampopt.search.options import Options
from ampopt.search.program_store import ProgramStore
from ampopt.search.progress import progress_line
from ampopt.search.rehearsal import Sandbox
from ampopt.search.tuning_cache import default_cache, key_of
from ampopt.search.waiting_threads import fewer_threads_if_they_wait
from ampopt.system.budget import calls_to_verify
from ampopt.system.environment import environment
from ampopt.system.exits import exits_refused
from ampopt.system.garbage import old_left_aside
from ampopt.system.interrupts import interruptible, watched
from ampopt.system.memory import release
from ampopt.system.process_state import process_kept
from ampopt.system.turns import optimizing

__all__ = ["ComparedPass", "Comparison", "compare"]

DRAWS = 2
"""Random inputs for verification, where a call is short."""

VERIFYING = 0.3
"""Share of the time budget for the first verification; where it takes more, on fewer random inputs."""

MEASURING = 0.25
"""Share of the time budget that passes which measure are told to be left."""


@optimizing.taken()
@old_left_aside()
@watched()
@exits_refused()
@process_kept()
@keeps_variables
def compare(
    model: nn.Module,
    example_inputs: Any = None,
    *more: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    precision: str = "auto",
    tolerance: float | None = None,
    budget_s: float | None = None,
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
    passes one after another; "left out" takes one pass out of the full sequence. On a GPU the programs of
    both are launched as CUDA graphs, where they can be. Every program is built and verified once, and none is
    kept. What passes measure for themselves is measured once in a lane, or taken from an earlier `optimize`
    with the same options. The arguments are those of `optimize`. It waits for other `optimize` and `compare`
    calls in the process.

    Every cell is measured briefly at first, and again while the time budget has room and its interval is
    wide. A cell that no time is left for says which budget would do.

    Raises InputError if the arguments do not fit the model, or if it cannot be captured as one graph;
    Interrupted if Ctrl-C is pressed before the first row. Later Ctrl-C leaves out the remaining rows.
    """
    started = time.perf_counter()
    with contextlib.ExitStack() as threads:
        with interruptible():
            options = Options(
                precision=precision,
                tolerance=tolerance,
                policy=policy,
                amp_dtype=amp_dtype,
                exclude=exclude,
                nan=nan,
                passes=passes,
            ).within(budget_s)
            progress = progress_flag(progress)
            refuse_more(more)
            given = {} if example_kwargs is None else example_kwargs
            original, args, kwargs, _ = prepare_call(model, example_inputs, given, device)
            where = device_of(original, flatten_call(args, kwargs)[0])
            architecture = architecture_of(original)
            try:
                captured = capture(original, args, kwargs, where)
            except LackError as error:
                raise InputError(str(error)) from error
            except CaptureError as error:
                raise InputError(f"compare needs a model that is one graph: {error}") from error
            again = functools.partial(seconds_of_a_call, original, args, kwargs, options.budget_s)
            call_s, busy = threads.enter_context(fewer_threads_if_they_wait(again(), where, again))
            options = options.with_time_for(call_s)
            needed_s = [call_s * calls_to_verify(draws) for draws in range(DRAWS + 1)]
            draws = max((n for n, s in enumerate(needed_s) if s <= VERIFYING * options.budget_s), default=0)
            tolerance, faults = options.tolerance, options.nan
            verifier = Verifier(original, captured, tolerance=tolerance, draws=draws, faults=faults)
            notes = [note for note in (busy, mode_note(model, original), captured.told) if note is not None]
            lanes = dict.fromkeys(lanes_for(precision, where, amp_dtype), call_s)
            if time.perf_counter() < started + options.budget_s:
                lanes = judgeable(tuple(lanes), captured, verifier, options.budget_s, notes)
        with (
            progress_line(progress, started, options.budget_s) as tell,
            Sandbox(where) as sandbox,
            Ahead(sandbox) as ahead,
        ):
            choices = Choices(known_choices(captured, options), MEASURING * options.budget_s)
            store = ProgramStore(
                captured.program, verifier, ahead, choices, calls_to_check=calls_to_verify(draws)
            )
            for lane, seconds in lanes.items():
                store.start(lane, seconds)
            deadline = started + options.budget_s
            plan = Plan(options.pipeline(), tuple(lanes))
            comparer = Comparer(plan, store, device=where, started=started, deadline=deadline, tell=tell)
            comparer.run()
        inputs, facts = tuple(describe(t) for t in captured.program.examples), environment(where)
        notes += comparer.notes()
        rows, interrupted = comparer.rows(), comparer.interrupted
        del comparer, store, ahead
        release(where)
    return Comparison(
        model=type(original).__name__,
        environment=facts,
        inputs=inputs,
        rows=rows,
        seconds=time.perf_counter() - started,
        notes=tuple(notes),
        architecture=architecture,
        interrupted=interrupted,
    )


def known_choices(captured: Captured, options: Options) -> dict[tuple[str, str], Pass]:
    """What an earlier `optimize` call with the same options measured, by lane and pass."""
    cache, pipeline = default_cache(), options.pipeline()
    if cache is None or not options.is_cacheable:
        return {}
    found = cache.find(key_of(captured.program, options.cache_facts()), pipeline)
    usual = {step.name: step for step in pipeline}
    recipes = {} if found is None else found.recipes
    return {
        (lane, step.name): step
        for lane, recipe in recipes.items()
        for step in recipe
        if step != usual[step.name]
    }
