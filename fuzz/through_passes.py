"""The passes oracle: every pass on random networks, each result judged; nothing is timed."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor, nn

from ampopt.capture import Captured, capture
from ampopt.errors import AmpoptError
from ampopt.executable import executable
from ampopt.group_forms import Form, GroupedConv
from ampopt.lanes import Lane
from ampopt.model_copy import device_of, private_copy
from ampopt.passes import PIPELINE, Degroup, Script, SearchConvAlgorithms
from ampopt.program import Program
from ampopt.transform import Numerics, Pass, replay
from fuzz.calls import Call, same_memory
from fuzz.judge import Answered, Judge, ask
from fuzz.network import Spec, build, make_call
from fuzz.outcome import Outcome, short
from fuzz.pick import Pick
from tests.helpers import apply_to_untouched, check_graph, check_ownership

LANES = (Lane("fp32", torch.float32), Lane("amp", torch.bfloat16), Lane("amp", torch.float16))


class Fault(Exception):  # noqa: N818  it carries an outcome out of nested calls
    """Something is wrong; `outcome` says what."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


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
    try:
        captured = _capture(model, calls[0])
        lanes = [lane for lane in LANES if judge.knows(lane.dtype)]
        for lane in lanes:
            _check_lane(judge, captured, lane, pick)
        if elsewhere is not None and pick.maybe(0.15):
            _check_replay(judge, captured, elsewhere, pick.one(*lanes))
    except AmpoptError as error:
        return Outcome("refused", _without_names(str(error)), "capture")
    except Fault as fault:
        return fault.outcome
    return Outcome("ok")


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
    steps = PIPELINE if pick.maybe() else tuple(step for step in PIPELINE if pick.maybe(0.6))
    return tuple(
        step if not isinstance(step, Degroup) else dataclasses.replace(step, least_gain=1e-9)
        for step in steps
        if not isinstance(step, SearchConvAlgorithms)
    )


def _check_lane(judge: Judge, captured: Captured, lane: Lane, pick: Pick) -> Program:
    program = lane.start(captured.program)
    _judge_program(judge, captured, program, lane, "capture")
    before = program
    steps = _steps(pick)
    if pick.maybe(0.06):
        steps = (*steps, Script())
    for step in steps:
        program = _apply(step, program, pick)
        if program.recipe is not before.recipe:
            _judge_program(judge, captured, program, lane, step.name)
            if step.numerics is Numerics.BITWISE:
                _judge_bits(judge, captured, before, program, step.name)
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


def _apply(step: Pass, program: Program, pick: Pick) -> Program:
    try:
        if step.why_not(program) is not None:
            return program
        with _any_form(pick):
            result = apply_to_untouched(step, program)
        if not result.modified:
            return program
        check_graph(result.program)
    except AmpoptError:
        return program
    except AssertionError as error:
        raise Fault(Outcome("wrong", short(error), step.name)) from error
    except Exception as error:
        raise Fault(raw(error, step.name)) from error
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


def _judge_program(judge: Judge, captured: Captured, program: Program, lane: Lane, stage: str) -> None:
    where = {"lane": lane.name, "dtype": str(lane.dtype), "recipe": _names(program)}
    try:
        answers = _ask(captured, program, judge.calls)
    except Exception as error:
        found = raw(error, stage)
        raise Fault(dataclasses.replace(found, details={**found.details, **where})) from error
    if reason := judge.objection(answers, lane.dtype):
        raise Fault(Outcome("wrong", reason, stage, where))


def _judge_bits(judge: Judge, captured: Captured, before: Program, after: Program, stage: str) -> None:
    pair = [_ask(captured, program, judge.calls) for program in (before, after)]
    for a, b in zip(*pair, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            if not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)):
                raise Fault(Outcome("wrong", "bits changed under a pass that promises to keep them", stage))


def _check_replay(judge: Judge, captured: Captured, call: Call, lane: Lane) -> None:
    """The recipe found for the example, on a capture of another shape."""
    try:
        there = Judge(judge.model, [call])
    except Exception:  # the model does not take this shape
        return
    if not there.knows(lane.dtype):
        return
    program = _check_lane(judge, captured, lane, Pick(0))
    try:
        other = _capture(judge.model, call)
        replayed = replay(tuple(s for s in program.recipe if not s.slow_to_apply), lane.start(other.program))
    except AmpoptError:
        return
    except Fault:
        raise
    except Exception as error:
        raise Fault(raw(error, "replay")) from error
    _judge_program(there, other, replayed, lane, "replay")
