"""What another package's pass answers is looked at where it answers, and refused in words."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ampopt
from ampopt.errors import PassError
from ampopt.ir.program import Program
from ampopt.ir.transform import Declined, Engine, Numerics, Pass, Result, outcome
from tests.helpers import BF16, program_of
from tests.support.planted import Doing, Planted

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))

untyped: Any = Result
declined: Any = Declined

RESULTS: dict[str, tuple[Callable[[Program], Any], str]] = {
    "a text for a number": (lambda p: untyped(p.replace(), "many"), "whose rewrites is 'many': let it"),
    "a negative number": (lambda p: untyped(p, -1), "whose rewrites is -1: let it return their number"),
    "a truth value": (lambda p: untyped(p.replace(), True), "whose rewrites is True"),
    "a part of one": (lambda p: untyped(p.replace(), 0.5), "whose rewrites is 0.5"),
    "an array's number": (lambda p: untyped(p.replace(), np.int64(1)), "whose rewrites is "),
    "texts that it left alone": (lambda p: untyped(p, 0, ("text",)), "whose declined is ('text',): let it"),
    "a number for a reason": (lambda p: untyped(p, 0, (declined("x", 5),)), "whose declined is (Declined("),
    "a node itself": (lambda p: untyped(p, 0, (declined(p.graph, "x"),)), "whose declined is (Declined("),
    "one for several": (lambda p: untyped(p, 0, Declined("x", "y")), "whose declined is Declined("),
    "a number of hints": (
        lambda p: untyped(p, 0, hints=5),
        "whose hints is 5: let it return a tuple of",
    ),
    "a text for hints": (lambda p: untyped(p, 0, hints="text"), "whose hints is 'text'"),
    "a name to replay": (lambda p: untyped(p.replace(), 1, replay="nope"), "whose replay is 'nope': let it"),
    "a lane's name": (
        lambda p: untyped(p.replace(lane="fp16"), 1),
        "a program with lane='fp16': let it",
    ),
    "another lane": (lambda p: untyped(p.replace(lane=BF16), 1), "a program with lane="),
    "another device": (lambda p: untyped(p.replace(device="cuda"), 1), "a program with device='cuda'"),
    "nothing changed": (lambda p: untyped(p, 3), "the program that it was given, with rewrites=3: let it"),
}


@pytest.mark.parametrize("case", RESULTS)
def test_a_result_is_refused_with_the_field_that_is_wrong(case: str) -> None:
    give, reason = RESULTS[case]
    with pytest.raises(PassError, match=f"^the pass returned .*{re.escape(reason)}"):
        outcome(program_of(nn.ReLU(), X), Doing(give).apply)


def test_lists_are_as_good_as_tuples() -> None:
    program = program_of(nn.ReLU(), X)
    result = untyped(program, 0, [Declined("x", "y")], ["hint"])
    assert outcome(program, Doing(lambda _: result).apply) is result


ANSWERS: dict[str, tuple[list[Any], list[Any], str]] = {
    "why_not": ([None, "a reason"], [5, "", " \n", False, ["reason"]], "the reason as a text, or None"),
    "expected_seconds": (
        [0, 2, 0.5, np.float32(1.5)],
        ["5", None, -5.0, math.nan, math.inf, True, torch.ones(1)],
        "a finite number of seconds, 0 or more",
    ),
    "within": ([Planted("other")], [None, "name", Planted], "a pass, such as `self`"),
    "prepared": ([Planted("other")], [None, 3], "a pass, such as `self`"),
    "preparations": ([[], (print,)], [None, 5, ["text"]], "a list of functions"),
    "numerics_on": ([Numerics.BITWISE], [None, "bitwise"], "one of Numerics"),
    "hurried": ([], [None, Planted("no engine")], "an engine, such as `self`"),
    "undivided": ([], [None, Planted("no engine")], "an engine, such as `self`"),
    "divided": ([], [None, [], ["text"], 3], "a list of one program or more"),
    "send": ([None, {"x": 1}], [5, [("x", 1)]], "a dict, or None"),
}


def _made(base: type, **methods: Callable[..., Any]) -> Any:
    """The class of passes with these methods."""
    made: Any = type("Made", (base,), {"apply": lambda _, program: Result(program, 0), **methods})
    return dataclasses.dataclass(frozen=True)(made)


def _answering(name: str, answer: object, base: type = Engine) -> Any:
    return _made(base, **{name: lambda *_: answer})()


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_a_method_is_what_it_may_be(name: str) -> None:
    good, bad, words = ANSWERS[name]
    for answer in good:
        assert getattr(_answering(name, answer), name)(None) is answer
    for answer in bad:
        with pytest.raises(PassError, match=re.escape(f"let it return {words}")) as caught:
            getattr(_answering(name, answer), name)(None)
        assert str(caught.value).startswith(f"the pass's {name} returned ")


def test_a_method_that_only_engines_have_is_a_passes_own() -> None:
    assert _answering("send", 5, Pass).send() == 5


def test_methods_of_every_kind_answer_as_before() -> None:
    class Mixin:
        def expected_seconds(self, _: Program) -> float:
            return -1.0

    @dataclasses.dataclass(frozen=True)
    class Kinds(Mixin, Planted):
        @staticmethod
        def why_not(program: object) -> str | None:
            return f"{program}"

        @classmethod
        def within(cls, seconds: float) -> Pass:
            return cls(f"{seconds:g}")

        prepared = functools.partialmethod(within, 2.0)

    class Further(Kinds):
        pass

    for kind in (Kinds, Further):
        step: Any = kind("x")
        assert step.why_not("as it is") == "as it is"
        assert step.within(1.0) == kind("1")
        assert step.prepared() == kind("2")
        with pytest.raises(PassError, match=r"expected_seconds returned -1\.0"):
            step.expected_seconds(None)


@pytest.mark.usefixtures("quick")
def test_in_a_search_each_is_the_row_of_the_pass_and_the_report_is_printed() -> None:
    planned: dict[str, tuple[str, Callable[..., Any]]] = {
        "why_not": ("5", lambda *_: 5),
        "within": ("None", lambda *_: None),
        "apply": ("'many'", lambda _, program: untyped(program.replace(), "many")),
    }
    steps: list[Pass] = [
        _made(Planted, **{"expected_seconds": lambda *_: "5", name: method})(name)
        for name, (_, method) in planned.items()
    ]
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    fast = ampopt.optimize(net, X, passes=steps, precision="fp32", budget_s=20, cache=False)
    assert not [note for note in fast.report.notes if "ended early" in note]
    rows = {entry.name: entry for entry in fast.report.entries}
    for name, (given, _) in planned.items():
        assert rows[name].verdict.value == "failed"
        assert f" {given}: let it return " in rows[name].reason
        assert name in str(fast.report)
