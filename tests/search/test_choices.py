"""What a pass measured is replayed, what it took is expected again, and what it cannot do is not repeated."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from ampopt.ir.lanes import FP32
from ampopt.ir.program import Program
from ampopt.ir.transform import Declined, Pass, Result
from ampopt.search.choices import CHEAP_S, Choices, why_nothing
from tests.helpers import BF16, program_of
from tests.support.comparing import Toy, ToyCompiler, ToyEngine

MEASURING = Toy("measuring", measures=True)
ENGINE = ToyEngine("engine", measures=True, said=10.0)


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(nn.ReLU(), torch.ones(2))


def noted(program: Program, step: Pass, took_s: float, result: Result | None = None) -> Choices:
    choices = Choices({}, 15.0)
    choices.note(FP32, step, step, program, result or step.apply(program), took_s=took_s, call_s=0.01)
    return choices


def test_what_was_measured_is_replayed_in_its_lane(program: Program) -> None:
    choices = noted(program, MEASURING, 9.0)
    found = dataclasses.replace(MEASURING, found="best")
    assert choices.pick(FP32, MEASURING, program, math.inf, anew=False) == found
    assert choices.pick(BF16, MEASURING, program, math.inf, anew=False) == MEASURING


def test_what_is_known_from_before_is_replayed(program: Program) -> None:
    known = dataclasses.replace(MEASURING, found="earlier")
    choices = Choices({("fp32", "measuring"): known}, 15.0)
    assert choices.pick(FP32, MEASURING, program, math.inf, anew=False) == known


@pytest.mark.parametrize(("took_s", "found"), [(CHEAP_S / 2, None), (2 * CHEAP_S, "best")])
def test_alone_a_pass_measures_anew_if_that_is_quick(
    program: Program, took_s: float, found: str | None
) -> None:
    picked = noted(program, MEASURING, took_s).pick(FP32, MEASURING, program, 100.0, anew=True)
    assert picked == dataclasses.replace(MEASURING, found=found)


def test_an_engine_does_not_measure_where_there_is_no_time_for_it(program: Program) -> None:
    choices = Choices({}, 15.0)
    assert choices.pick(FP32, ENGINE, program, 11.0, anew=False) == ENGINE
    assert choices.pick(FP32, ENGINE, program, 9.0, anew=False) == ENGINE.hurried()


def test_an_engine_that_did_not_measure_runs_the_same_way_everywhere(program: Program) -> None:
    choices, hurried = Choices({}, 15.0), ENGINE.hurried()
    choices.note(FP32, ENGINE, hurried, program, hurried.apply(program), took_s=1.0, call_s=0.01)
    assert choices.pick(FP32, ENGINE, program, math.inf, anew=False) == hurried


def test_a_pass_measures_within_its_share(program: Program) -> None:
    @dataclasses.dataclass(frozen=True)
    class Within(Toy):
        budget: float = math.inf

        def within(self, seconds: float) -> Pass:
            return dataclasses.replace(self, budget=seconds)

    choices, step = Choices({}, 15.0), Within("within")
    picked = [choices.pick(FP32, step, program, seconds, anew=False) for seconds in (100.0, 4.0)]
    assert [getattr(each, "budget", None) for each in picked] == [15.0, 4.0]


def test_a_measurement_without_a_finding_is_not_repeated(program: Program) -> None:
    nothing = Result(program, 0, (Declined("conv", "it is the fastest form"),))
    choices = noted(program, MEASURING, 9.0, nothing)
    assert choices.futile(FP32, MEASURING, 100.0, anew=False) == "conv: it is the fastest form"
    assert choices.futile(FP32, MEASURING, 100.0, anew=True) is not None
    assert choices.futile(BF16, MEASURING, 100.0, anew=False) is None
    quick = noted(program, MEASURING, 2.0, nothing)
    assert quick.futile(FP32, MEASURING, 100.0, anew=False) is not None
    assert quick.futile(FP32, MEASURING, 100.0, anew=True) is None


def test_a_pass_that_found_nothing_at_once_looks_again_elsewhere(program: Program) -> None:
    assert (
        noted(program, Toy("idle"), 0.1, Result(program, 0)).futile(FP32, Toy("idle"), 9.0, anew=False)
        is None
    )


def test_times_are_expected_again(program: Program) -> None:
    assert Choices({}, 15.0).expected_s(FP32, Toy("new"), program) == 0.0
    assert noted(program, Toy("slow"), 3.0).expected_s(FP32, Toy("slow"), program) == 3.0
    larger = dataclasses.replace(ENGINE, said=20.0)
    assert noted(program, ENGINE, 15.0).expected_s(BF16, larger, program) == 30.0


def test_a_replay_is_expected_to_be_as_quick_as_it_says(program: Program) -> None:
    choices = noted(program, ENGINE, 15.0)
    replay = choices.pick(FP32, ENGINE, program, math.inf, anew=False)
    assert choices.expected_s(FP32, replay, program) == 0.0


def test_what_is_rehearsed_is_repeated(program: Program) -> None:
    compiler = ToyCompiler("compiler", said=4.0)
    assert Choices({}, 15.0).expected_s(FP32, compiler, program) == 5.0
    assert noted(program, compiler, 7.0).expected_s(FP32, compiler, program) == 7.0


def test_only_what_may_use_the_clock_needs_silence(program: Program) -> None:
    choices = noted(program, MEASURING, 9.0)
    replay = choices.pick(FP32, MEASURING, program, math.inf, anew=False)
    steps = (MEASURING, replay, ToyCompiler("c"), ToyEngine("plain"), ENGINE, ENGINE.hurried())
    assert [choices.may_measure(FP32, step) for step in steps] == [True, False, False, False, True, False]


def test_the_reason_for_nothing_is_that_of_the_first_place(program: Program) -> None:
    assert why_nothing(Result(program, 0)) == ""
    assert why_nothing(Result(program, 0, (Declined("a", "b"), Declined("c", "d")))) == "a: b"
