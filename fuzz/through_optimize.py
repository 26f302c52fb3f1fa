"""The optimize oracle: `ampopt.optimize` on random networks, and what it gives back called in every way."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import ampopt
from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import AmpoptError
from ampopt.ir.model_copy import private_copy
from ampopt.ir.numerics import least_error, relative_error
from ampopt.ir.signature import flatten_outputs
from ampopt.measure.entry import ORIGINAL
from ampopt.search.partly_optimized import PartlyOptimizedModule
from fuzz.calls import Call, same_memory
from fuzz.judge import Answered, Judge, ask
from fuzz.network import Spec, build, make_call
from fuzz.outcome import Outcome, short
from fuzz.pick import Pick
from fuzz.through_passes import raw
from tests.support import snapshot

BUDGET_S = 10.0

Served = OptimizedModule | PartlyOptimizedModule


def check(spec: Spec, device: str = "cpu") -> Outcome:
    """What becomes of a network under `optimize`, and of sequences of calls of the result."""
    pick = Pick(spec.seed)
    user = build(spec).to(device)
    pristine, calls = private_copy(user), [call.map(lambda t: t.to(device)) for call in _calls(spec, pick)]
    try:
        judge = Judge(pristine, [call for call in calls if _answers(pristine, call)])
    except Exception as error:  # whatever it is: it comes from PyTorch
        return Outcome("skipped", f"eager fails: {short(error, 120)}")
    if not judge.repeats():
        return Outcome("skipped", "eager gives another answer each time")
    precision = pick.weighted({"auto": 7, "fp32": 2, "amp": 1})
    before = snapshot.of_model(user), snapshot.of_torch()
    example = calls[0].map(same_memory)
    kept = [t.detach().clone() for t in example.tensors]
    try:
        served = optimize(user, example, BUDGET_S, precision=precision)
    except AmpoptError as error:
        return Outcome("refused", f"{type(error).__name__}: {short(error, 120)}", "optimize")
    except Exception as error:
        return raw(error, "optimize")
    changed = [n for b, a in zip(before, (snapshot.of_model(user), snapshot.of_torch()), strict=True)
               for n in snapshot.differences(b, a)]  # fmt: skip
    if changed:
        return Outcome("changed", f"optimize changes {', '.join(sorted(changed)[:5])}", "optimize")
    if any(
        not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(kept, example.tensors, strict=True)
    ):
        return Outcome("changed", "optimize writes to the example inputs", "optimize")
    return judge_served(served, judge, pick, precision)


def optimize(model: nn.Module, call: Call, budget_s: float, **options: Any) -> Served:
    """`ampopt.optimize` on the example call, silent and without a memory of earlier ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ampopt.optimize(
            model,
            call.args,
            example_kwargs=call.kwargs,
            budget_s=budget_s,
            cache=False,
            progress=False,
            **options,
        )


def _calls(spec: Spec, pick: Pick) -> list[Call]:
    """The example first and last, and between them other numbers, shapes, memory, NaN."""
    calls = [make_call(spec), make_call(spec, 1, values="normal"), make_call(spec, 2, values="nan")]
    if spec.shape:
        calls.append(make_call(spec, 3, shape=(spec.shape[0] + 1, *spec.shape[1:])))
        calls.append(make_call(spec, 4, shape=(*spec.shape[:-1], spec.shape[-1] + 1)))
    memories = [m for m in ("transposed", "sliced", "expanded", "channels_last") if pick.maybe(0.4)]
    calls += [make_call(spec, 5, memory=memory) for memory in memories]
    return [*calls, make_call(spec, 1, values="large"), make_call(spec)]


def _answers(model: nn.Module, call: Call) -> bool:
    """Whether the original can be called so."""
    try:
        Judge(model, [call])
    except Exception:  # whatever it is: it comes from PyTorch
        return False
    return True


def dtype_of(served: Served, precision: str) -> torch.dtype:
    """The precision in which a result has to be right."""
    if isinstance(served, PartlyOptimizedModule):
        return torch.bfloat16 if precision == "amp" else torch.float32
    chosen = served.report.chosen
    return torch.float32 if chosen in (ORIGINAL, "fp32") else served.program.lane.dtype


def judge_served(served: Served, judge: Judge, pick: Pick, precision: str) -> Outcome:
    """What becomes of the judge's calls when an optimized module answers them, one after the other."""
    stage = type(served).__name__
    recipe = [step.name for step in served.program.recipe] if isinstance(served, OptimizedModule) else []
    details = {"chosen": served.report.chosen, "recipe": recipe, "precision": precision}
    dtype = dtype_of(served, precision)
    if not judge.knows(dtype):
        dtype = torch.float32
    answers: list[Answered] = []
    for number, call in enumerate(judge.calls):
        try:
            with _mode(pick):
                answers += ask(lambda call: served(*call.args, **call.kwargs), [call])
        except Exception as error:
            lost = raw(error, stage)
            return Outcome("lost", f"call {number}: {lost.reason}", stage, {**lost.details, **details})
    if reason := judge.objection(answers, dtype):
        return Outcome("wrong", reason, stage, details)
    if reason := _keeps_memory(served, judge.calls[-1], dtype):
        return Outcome("wrong", reason, stage, details)
    return Outcome("ok", str(served.report.chosen), stage, details)


def _mode(pick: Pick) -> contextlib.AbstractContextManager[object]:
    """One of the modes of PyTorch in which a user may call a module."""
    modes: list[contextlib.AbstractContextManager[object]] = [
        contextlib.nullcontext(),
        contextlib.nullcontext(),
        torch.no_grad(),
        torch.inference_mode(),
    ]
    return pick.one(*modes)


def _keeps_memory(served: Served, call: Call, dtype: torch.dtype) -> str | None:
    """Whether a caller who writes to a result changes later ones; where the original may answer, it may."""
    if served.report.chosen == ORIGINAL or isinstance(served, PartlyOptimizedModule):
        return None
    untouched = touched = served
    if served._optimized.captured.state:
        untouched, touched = copy.deepcopy(served), copy.deepcopy(served)  # both in the state of now

    def twice(module: Served, *, writes: bool) -> list[Tensor]:
        own = call.map(same_memory)
        for output in flatten_outputs(module(*own.args, **own.kwargs))[0] if writes else ():
            output.detach().zero_()
        if not writes:
            module(*own.args, **own.kwargs)
        own = call.map(same_memory)
        return [output.clone() for output in flatten_outputs(module(*own.args, **own.kwargs))[0]]

    with torch.no_grad():
        expected, found = twice(untouched, writes=False), twice(touched, writes=True)
    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    worst = max(errors, default=0.0)
    return f"after a result was written to: error {worst:.2g}" if worst > least_error(dtype) else None
