"""The passes oracle: every pass on random networks, each result judged; nothing is timed.

The judge sees a program before ampopt's own verification does, and on other draws. What it objects to is put
to that verification, too: what that refuses, or what raises where the pass manager catches it, no user gets.
It is undone here as there, the other passes go on, and the network counts as reverted, with the reason. What
the verification accepts and the judge does not is a fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor, nn

from ampopt.engines.executable import executable
from ampopt.errors import AmpoptError
from ampopt.ir.capture import Captured, capture
from ampopt.ir.lanes import FP32, Lane, mixed
from ampopt.ir.model_copy import device_of, private_copy
from ampopt.ir.narrow_convs import why_it_may_crash
from ampopt.ir.program import Program
from ampopt.ir.transform import Numerics, Pass, is_slow, replay
from ampopt.kernels.group_forms import Form, GroupedConv
from ampopt.measure.verify import Verifier
from ampopt.passes import PIPELINE, Degroup, Script, SearchConvAlgorithms
from fuzz.calls import Call, same_memory
from fuzz.judge import REPEATS, Answered, Judge, ask
from fuzz.network import Spec, build, make_call
from fuzz.outcome import REVERTED, Outcome, short
from fuzz.pick import Pick
from tests.helpers import apply_to_untouched, check_graph, check_origins, check_ownership

LANES = (FP32, mixed("amp", torch.bfloat16), mixed("amp", torch.float16))


class Fault(Exception):  # noqa: N818  it carries an outcome out of nested calls
    """Something is wrong; `outcome` says what."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class Hearing:
    """A network's judge, its capture, and what ampopt itself would have reverted so far."""

    def __init__(self, judge: Judge, captured: Captured) -> None:
        self.judge, self.captured = judge, captured
        self.reverted: list[Outcome] = []

    @functools.cached_property
    def _verifier(self) -> Verifier:
        """ampopt's own verification; it takes long to make, and is made where it is needed."""
        return Verifier(private_copy(self.judge.model), self.captured)

    def appeal(self, found: Outcome, program: Program, lane: Lane) -> None:
        """Note what ampopt's verification refuses, too, or fails on; raise Fault with what it accepts."""
        try:
            run = executable(program)
            reason = self._verifier.check(run, lane, everywhere=True).reason
        except Exception as error:  # what the pass manager and the optimizer record
            reason = short(error)
        if reason is None:
            raise Fault(found)
        self.revert(found, reason)

    def revert(self, found: Outcome, why: str) -> None:
        """Note that ampopt would not serve this."""
        self.reverted.append(dataclasses.replace(found, kind=REVERTED, details={**found.details, "why": why}))

    @property
    def outcome(self) -> Outcome:
        """What became of the network; a wrong capture comes before a wrong pass."""
        if not self.reverted:
            return Outcome("ok")
        first, *others = sorted(self.reverted, key=lambda found: found.stage != "capture")
        also = [f"{other.stage}: {other.reason}" for other in others]
        return dataclasses.replace(first, details={**first.details, "also": also})


def check(spec: Spec, device: str = "cpu") -> Outcome:
    """What becomes of a network in every lane under the passes, in order or some of them."""
    network = build(spec).to(device)
    draws = (make_call(spec), make_call(spec, 1, values="normal"), make_call(spec, 2, values="nan"))
    calls = [call.map(lambda t: t.to(device)) for call in draws]
    elsewhere = make_call(spec, 3, shape=(spec.shape[0] + 1, *spec.shape[1:])) if spec.shape else None
    if elsewhere is not None:
        elsewhere = elsewhere.map(lambda t: t.to(device))
    return check_model(network, calls, Pick(spec.seed), elsewhere)


def check_model(
    model: nn.Module, calls: Sequence[Call], pick: Pick, elsewhere: Call | None = None
) -> Outcome:
    """The same for any model and its calls; the first is the example, `elsewhere` one of another shape."""
    try:
        judge = Judge(model, calls)
    except Exception as error:  # whatever it is: it comes from PyTorch
        return Outcome("skipped", f"eager fails: {short(error, 120)}")
    if not judge.repeats():
        return Outcome("skipped", "eager gives another answer each time")
    lanes: list[Lane] = []
    try:
        captured = _capture(model, calls[0])
        if captured.lifted is not None and not captured.lifted.from_start:
            judge = Judge(captured.lifted.model, calls)  # the original answers the first calls
        hearing = Hearing(judge, captured)
        safe = LANES if why_it_may_crash(captured.program) is None else LANES[:1]
        lanes = [lane for lane in safe if judge.knows(lane.dtype)]
        for lane in lanes:
            _check_lane(hearing, lane, pick)
        if elsewhere is not None and pick.maybe(0.15):
            _check_replay(hearing, elsewhere, pick.one(*lanes))
    except AmpoptError as error:
        return Outcome("refused", _without_names(str(error)), "capture")
    except Fault as fault:
        unsteady = [str(lane.dtype) for lane in lanes if not judge.repeats(lane.dtype, REPEATS)]
        if unsteady:
            why = f"eager itself gives another answer each time in {', '.join(unsteady)}"
            return Outcome("skipped", why, fault.outcome.stage, {"found": fault.outcome.reason})
        return fault.outcome
    return hearing.outcome


def _without_names(text: str) -> str:
    """A refusal's reason without what differs from model to model, so that equal ones can be counted."""
    return " ".join(text.split())[:160]


def _capture(model: nn.Module, call: Call) -> Captured:
    own = call.map(same_memory)
    try:
        original = private_copy(model)
        return capture(original, own.args, own.kwargs, device_of(original, own.tensors))
    except AmpoptError:
        raise
    except Exception as error:
        raise Fault(raw(error, "capture")) from error


def raw(error: BaseException, stage: str) -> Outcome:
    """The outcome of an exception that is no AmpoptError."""
    trace = "".join(traceback.format_exception(error))[-3000:]
    return Outcome("raw", short(error), stage, {"trace": trace})


def _steps(pick: Pick) -> Sequence[Pass]:
    """The passes in their order, all or some."""
    whole = PIPELINE.rewrites
    steps = whole if pick.maybe() else tuple(step for step in whole if pick.maybe(0.6))
    return tuple(
        step if not isinstance(step, Degroup) else dataclasses.replace(step, least_gain=1e-9)
        for step in steps
        if not isinstance(step, SearchConvAlgorithms)
    )


def _check_lane(hearing: Hearing, lane: Lane, pick: Pick) -> Program:
    captured, judge = hearing.captured, hearing.judge
    program = lane.start(captured.program)
    if not _is_right(hearing, program, lane, "capture"):
        return program
    before = program
    steps = _steps(pick)
    if pick.maybe(0.06):
        steps = (*steps, Script())
    for step in steps:
        program = _apply(step, program, pick, hearing)
        if program.recipe is not before.recipe and not (
            _is_right(hearing, program, lane, step.name)
            and (step.numerics is not Numerics.BITWISE or _has_its_bits(hearing, before, program, step.name))
        ):
            program = before
        before = program
    plain = judge.calls[1 % len(judge.calls)].map(lambda t: torch.nan_to_num(same_memory(t).detach()))
    try:
        check_ownership(
            executable(lane.start(captured.program)),
            executable(program),
            [*plain.tensors, *captured.initial_state],
        )
    except AssertionError as error:
        raise Fault(Outcome("wrong", str(error), _names(program))) from error
    return program


def _apply(step: Pass, program: Program, pick: Pick, hearing: Hearing) -> Program:
    try:
        if step.why_not(program) is not None:
            return program
        with _any_form(pick):
            result = apply_to_untouched(step, program)
        if not result.modified:
            return program
        check_graph(result.program)
        check_origins(program, result.program)
    except AmpoptError:
        return program
    except AssertionError as error:
        raise Fault(Outcome("wrong", short(error), step.name)) from error
    except Exception as error:
        hearing.revert(raw(error, step.name), "the pass fails")
        return program
    return result.program.replace(recipe=(*program.recipe, result.replay or step))


def _any_form(pick: Pick) -> contextlib.AbstractContextManager[object]:
    """Within it `degroup` measures nothing: any form of a convolution may be the fastest."""

    def measure(_: GroupedConv, forms: Sequence[Form], *__: object) -> list[tuple[Form, float]]:
        return [(form, 1e-6 + pick.fraction()) for form in forms]

    return mock.patch("ampopt.passes.degroup.measure_forms", measure)


def _names(program: Program) -> str:
    return "+".join(step.name for step in program.recipe) or "capture"


def _ask(captured: Captured, program: Program, calls: Sequence[Call]) -> list[Answered]:
    """A program's answers to a sequence of calls; what one leaves in the state, the next one finds."""
    run, state = executable(program), list(captured.initial_state)

    def answer(call: Call) -> Sequence[Tensor]:
        outputs = run(*call.tensors, *state)
        results = len(outputs) - len(state)
        state[:] = outputs[results:]
        return outputs[:results]

    return ask(answer, calls)


def _is_right(hearing: Hearing, program: Program, lane: Lane, stage: str) -> bool:
    """Whether the judge accepts a program; raises Fault where it does not, and ampopt would serve it."""
    judge = hearing.judge
    where = {"lane": lane.name, "dtype": str(lane.dtype), "recipe": _names(program)}
    try:
        answers = _ask(hearing.captured, program, judge.calls)
    except Exception as error:
        found = raw(error, stage)
        hearing.appeal(dataclasses.replace(found, details={**found.details, **where}), program, lane)
        return False
    if reason := judge.objection(answers, lane.dtype):
        hearing.appeal(Outcome("wrong", reason, stage, where), program, lane)
        return False
    return True


def _has_its_bits(hearing: Hearing, before: Program, after: Program, stage: str) -> bool:
    """Whether a pass keeps every bit; the pass manager sees to it on the example, which is the first call."""
    pair = [_ask(hearing.captured, program, hearing.judge.calls) for program in (before, after)]
    for number, (a, b) in enumerate(zip(*pair, strict=True)):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            if not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)):
                found = Outcome("wrong", "bits changed under a pass that promises to keep them", stage)
                if number > 0:
                    raise Fault(found)
                hearing.revert(found, "they do on the example")
                return False
    return True


def _check_replay(hearing: Hearing, call: Call, lane: Lane) -> None:
    """The recipe found for the example, on a capture of another shape."""
    judge = hearing.judge
    try:
        there = Judge(judge.model, [call])
    except Exception:  # the model does not take this shape
        return
    if not there.knows(lane.dtype):
        return
    program = _check_lane(hearing, lane, Pick(0))
    try:
        other = _capture(judge.model, call)
        replayed = replay(tuple(s for s in program.recipe if not is_slow(s)), lane.start(other.program))
    except AmpoptError:
        return
    except Fault:
        raise
    except Exception as error:
        raise Fault(raw(error, "replay")) from error
    elsewhere = Hearing(there, other)
    _is_right(elsewhere, replayed, lane, "replay")
    hearing.reverted += elsewhere.reverted
