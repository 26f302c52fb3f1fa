"""Searches for what stays in FP32 in a float16 lane, and what their results hold."""

from __future__ import annotations

import math
import time
from typing import Any

from torch import Tensor, nn

from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.ir.transform import Result
from ampopt.measure.verifiers_judge import VerifiersJudge
from ampopt.measure.verify import Verifier
from ampopt.passes import KeepFp32
from tests.helpers import FP16
from tests.support.planted import captured_of


def judged(model: nn.Module, *inputs: Tensor, **options: Any) -> tuple[Verifier, Program, Result]:
    """What a search finds for the float16 lane, with its verifier and the program that it was given."""
    original, captured = captured_of(model, *inputs)
    verifier = Verifier(original, captured, **options)
    program = FP16.start(captured.program)
    judge = VerifiersJudge(verifier, FP16, time.perf_counter() + 60.0)
    return verifier, program, KeepFp32().apply_judged(program, judge)


def stays(result: Result) -> tuple[str, ...]:
    assert isinstance(result.replay, KeepFp32)
    return tuple(name for name, what in result.replay.choices or () if what != "back")


def kinds(result: Result) -> set[str]:
    assert isinstance(result.replay, KeepFp32)
    return {what for _, what in result.replay.choices or () if what != "back"}


class Counting:
    """Counts what a judge is asked, which has time for `most_s` seconds at once."""

    exact_s = 0.0

    def __init__(self, judge: VerifiersJudge, most_s: float = math.inf) -> None:
        self.judge, self.most_s, self.asked = judge, most_s, 0

    @property
    def calls(self) -> list[tuple[Tensor, ...]]:
        return self.judge.calls

    def check(self, program: Program) -> Check:
        self.asked += 1
        return self.judge.check(program)

    def has_time(self, seconds: float = 0.0) -> bool:
        return seconds <= self.most_s and self.judge.has_time(seconds)
