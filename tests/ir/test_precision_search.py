"""The search for what stays in FP32, where values can be compared and where they cannot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt.ir.precision_search as precision_search
from ampopt.ir.baking import bake
from ampopt.ir.graph import calls
from ampopt.ir.judged import OwnJudge
from ampopt.ir.numerics import Check
from ampopt.ir.precision_search import Found, PrecisionSearch
from ampopt.ir.program import Program
from tests.helpers import FP16, dtypes_of, program_of
from tests.support import overflowing

X = torch.randn(2, 8)


def linears(count: int) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))
    return program_of(model.eval(), X, lane=FP16)


class Asked:
    """A judge that passes the programs that `accepts` does, by the names of calls that are in FP32."""

    exact_s = 0.0

    def __init__(self, accepts: Callable[[set[str]], bool], *, most: float = math.inf) -> None:
        self.calls: Sequence[Sequence[Tensor]] = [(X,), (torch.randn(2, 8),)]
        self.accepts, self.most, self.asked = accepts, most, 0

    def check(self, program: Program) -> Check:
        self.asked += 1
        kept = {name for name, dtype in dtypes_of(program).items() if dtype is torch.float32}
        passed = self.accepts({name for name in kept if name.startswith("linear")})
        return Check(0.01, 0.001, None if passed else "it is wrong")

    def has_time(self, seconds: float = 0.0) -> bool:
        return self.asked < self.most


def unknown(*_: object) -> dict[str, object]:
    raise NotImplementedError("no kernel for Double")


@pytest.mark.parametrize("wrong", [(5,), (3, 4), (0,), (15,), (2, 9)])
def test_where_no_values_can_be_compared_bisection_finds_the_part_of_the_graph(
    wrong: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision_search, "observe", unknown)
    program = linears(16)
    names = [node.name for node in calls(program.graph)]
    needed = {names[place] for place in wrong}
    judge = Asked(needed.issubset)
    found = PrecisionSearch(program, "amp", judge, 1.0).find()
    assert isinstance(found, Found)
    assert found.names == tuple(names[min(wrong) : max(wrong) + 1])
    assert found.reasons[0].endswith("found by bisection: NotImplementedError: no kernel for Double")
    assert judge.asked <= 2 + 2 * 4


def test_what_is_wrong_in_fp32_too_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_search, "observe", unknown)
    found = PrecisionSearch(linears(4), "amp", Asked(lambda _: False), 1.0).find()
    assert found == "it is wrong with every operator in FP32, too: it is wrong"


@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_the_fewest_of_a_ranking_are_kept(count: int) -> None:
    judge = Asked(lambda kept: len(kept) >= count)
    found = PrecisionSearch(linears(24), "amp", judge, 1.0).find()
    assert isinstance(found, Found)
    assert count <= len(found.names) <= count * 1.2
    assert judge.asked <= precision_search.TRIALS + 1


def test_more_than_the_largest_share_is_not_kept() -> None:
    judge = Asked(lambda kept: len(kept) >= 8)
    found = PrecisionSearch(linears(10), "amp", judge, 0.5).find()
    assert isinstance(found, str)
    assert "with 5 of 10 operators in FP32 for their precision: it is wrong" in found
    assert "with more, 6 of its 10 matrix products and convolutions would have to stay in FP32" in found


def test_when_the_time_is_over_the_best_so_far_is_the_answer() -> None:
    judge = Asked(lambda kept: len(kept) >= 2, most=2)
    found = PrecisionSearch(linears(24), "amp", judge, 1.0).find()
    assert isinstance(found, Found)
    assert judge.asked == 2


def test_where_nothing_has_a_derivative_each_operators_own_error_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision_search, "contributions", unknown)
    found = PrecisionSearch(linears(12), "amp", Asked(lambda kept: len(kept) >= 3), 1.0).find()
    assert isinstance(found, Found)
    assert 3 <= len(found.names) <= 4
    assert "which changes the outputs by" not in found.reasons[0]


def test_programs_that_cannot_be_made_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(overflowing.one_branch(), torch.randn(overflowing.IMAGE), lane=FP16)
    judge = OwnJudge(program)

    def fails(*given: object) -> object:
        if len(given) > 2:
            raise RuntimeError("no such kernel")
        return bake(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(precision_search, "bake", fails)
    found = PrecisionSearch(program, "amp", judge, 0.9).find()
    assert isinstance(found, str)
    assert "it fails (RuntimeError: no such kernel)" in found


class Hurried(Asked):
    """One that has no time for anything that takes any."""

    def has_time(self, seconds: float = 0.0) -> bool:
        return seconds == 0.0


def test_what_would_take_longer_than_there_is_time_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """With time for one input alone, the operators' own errors rank."""
    looked = list[str]()
    monkeypatch.setattr(precision_search, "LOOKING", 0.0)

    def spied(name: str) -> Callable[..., Any]:
        inner = getattr(precision_search, name)

        def spy(program: Program, calls: Sequence[Sequence[Tensor]]) -> Any:
            looked.append(name)
            return inner(program, calls)

        return spy

    for name in ("observe", "contributions"):
        monkeypatch.setattr(precision_search, name, spied(name))
    judge = Hurried(lambda kept: len(kept) >= 2)
    found = PrecisionSearch(linears(8), "amp", judge, 1.0).find()
    assert isinstance(found, Found)
    assert looked == ["observe"]
    looked.clear()
    PrecisionSearch(linears(8), "amp", Asked(lambda kept: len(kept) >= 2), 1.0).find()
    assert looked == ["observe", "observe", "contributions", "contributions"]


def test_without_time_to_observe_an_input_nothing_is_looked_for() -> None:
    judge = Hurried(lambda kept: len(kept) >= 2)
    judge.exact_s = 5.0
    found = PrecisionSearch(linears(8), "amp", judge, 1.0).find()
    assert found == "it is wrong; there is no time to look for the operators that make it so"
    assert judge.asked == 1
