"""keep-fp32 on a device with TF32: what stays may round to it, and all may stay in it."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn

import ampopt.passes.keep_fp32 as keep_fp32
from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.measure.sampling import Gain
from ampopt.measure.verifiers_judge import VerifiersJudge
from ampopt.measure.verify import Verifier
from ampopt.passes import KeepFp32
from tests.helpers import FP16, dtypes_of
from tests.support import overflowing
from tests.support.overflowing import IMAGE
from tests.support.planted import captured_of
from tests.support.precision import Counting, judged, kinds, stays

LIMIT = 1e-2


@pytest.fixture(autouse=True)
def _no_faster_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock decides here."""
    monkeypatch.setattr(keep_fp32, "_compared", lambda *_: Gain(1.0, 0.9, 1.1))


@pytest.fixture
def _has_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with TF32, which is exact here."""
    monkeypatch.setattr(keep_fp32, "_with_fewer_bits", lambda _: ["tf32"])


@pytest.mark.usefixtures("_has_tf32")
def test_where_no_mix_is_right_all_stays_in_fp32_and_products_use_tf32() -> None:
    x = torch.randn(IMAGE)
    verifier, program, result = judged(overflowing.everything(), x)
    assert isinstance(result.replay, KeepFp32)
    assert result.replay.choices == (("*", "tf32"),)
    assert set(dtypes_of(result.program).values()) == {torch.float32}
    assert result.program.settings.tf32
    assert not result.program.under_autocast
    assert verifier.check(result.program.run, FP16).passed
    (hint,) = result.hints
    assert hint.startswith("all of them, with products in TF32 (5 of its 5 matrix products and ")
    assert result.rewrites == len(dtypes_of(result.program)) == 5
    again = result.replay.apply(program)
    assert again.program.graph.code == result.program.graph.code
    portable = result.replay.in_fp32().apply(program)
    assert portable.program.graph.code == result.program.graph.code
    assert not portable.program.settings.tf32


@pytest.mark.usefixtures("_has_tf32")
@pytest.mark.parametrize(("most_s", "kind"), [(0.0, "*"), (math.inf, "conv2d")])
def test_without_time_for_a_search_all_stays(most_s: float, kind: str) -> None:
    original, captured = captured_of(overflowing.one_branch(), torch.randn(IMAGE))
    judge = Counting(VerifiersJudge(Verifier(original, captured), FP16, time.perf_counter() + 60.0), most_s)
    result = KeepFp32().apply_judged(FP16.start(captured.program), judge)
    assert all(name.startswith(kind) for name in stays(result))
    assert result.modified


@pytest.mark.usefixtures("_has_tf32")
def test_where_tf32_is_wrong_too_a_search_without_much_time_is_made_all_the_same() -> None:
    original, captured = captured_of(overflowing.one_branch(), torch.randn(IMAGE))

    class Judge(Counting):
        def check(self, program: Program) -> Check:
            if program.settings.tf32:
                return Check(1.0, LIMIT, "TF32 is too inexact")
            return super().check(program)

        def has_time(self, seconds: float = 0.0) -> bool:
            waits.append(seconds)
            return seconds < 2.0 * waits[0] / keep_fp32.SPARE

    waits: list[float] = []
    judge = Judge(VerifiersJudge(Verifier(original, captured), FP16, time.perf_counter() + 60.0))
    result = KeepFp32().apply_judged(FP16.start(captured.program), judge)
    assert kinds(result) == {"fp32"}
    assert all(name.startswith("conv2d") for name in stays(result))


@pytest.mark.usefixtures("_has_tf32")
def test_where_neither_is_right_both_reasons_are_told_and_nothing_is_searched_twice() -> None:
    """The search finds that every product would have to stay, and ends; it had the time that it needs."""
    original, captured = captured_of(overflowing.everything(), torch.randn(IMAGE))

    class Judge(Counting):
        def check(self, program: Program) -> Check:
            found = super().check(program)
            return Check(1.0, LIMIT, "TF32 is too inexact") if program.settings.tf32 else found

    judge = Judge(VerifiersJudge(Verifier(original, captured), FP16, time.perf_counter() + 60.0))
    result = KeepFp32().apply_judged(FP16.start(captured.program), judge)
    assert not result.modified
    (declined,) = result.declined
    assert declined.reason.startswith("5 of its 5 matrix products and convolutions would have to stay")
    assert declined.reason.endswith("; all in TF32: TF32 is too inexact")
    assert judge.asked == 2


@pytest.mark.usefixtures("_has_tf32")
@pytest.mark.parametrize(
    ("gain", "many", "is_right", "all_stay"),
    [(2.0, 0.1, True, True), (0.5, 0.1, True, False), (2.0, 1.0, True, False), (2.0, 0.1, False, False)],
    ids=["faster", "slower", "few", "wrong"],
)
def test_where_many_would_stay_all_are_tried_in_tf32(
    monkeypatch: pytest.MonkeyPatch, gain: float, many: float, is_right: bool, all_stay: bool
) -> None:
    original, captured = captured_of(overflowing.one_branch(), torch.randn(IMAGE))
    before = FP16.start(captured.program)

    class Judge(Counting):
        def check(self, program: Program) -> Check:
            if not is_right and program.settings.tf32 and set(dtypes_of(program).values()) == {torch.float32}:
                return Check(1.0, LIMIT, "planted")
            return super().check(program)

    def compared(_: Program, after: Program) -> Gain:
        ratio = gain if set(dtypes_of(after).values()) == {torch.float32} else 1.0
        return Gain(ratio, 0.9 * ratio, 1.1 * ratio)

    monkeypatch.setattr(keep_fp32, "_compared", compared)
    monkeypatch.setattr(keep_fp32, "MANY", many)
    judge = Judge(VerifiersJudge(Verifier(original, captured), FP16, time.perf_counter() + 60.0))
    result = KeepFp32().apply_judged(before, judge)
    assert isinstance(result.replay, KeepFp32)
    assert (result.replay.choices == (("*", "tf32"),)) is all_stay
    assert result.program.settings.tf32 is all_stay
    if all_stay:
        hint, reason, *_ = result.hints
        assert hint.startswith(
            "all of them, with products in TF32 (1 would have to stay; tf32 for all: 2.00x"
        )
        assert reason.startswith("conv2d"), "which would have to stay, and why"
        assert result.replay.apply(before).program.graph.code == result.program.graph.code
    if not is_right:
        assert result.hints[-1] == "tf32 for all is wrong: planted"


@pytest.mark.usefixtures("_has_tf32")
def test_a_lane_that_is_right_stays_as_it_is_where_there_is_tf32() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.randn(IMAGE)
    _, program, result = judged(model, x)
    assert result.program is program


@pytest.mark.gpu
def test_on_a_gpu_what_stays_may_compute_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_fp32, "_compared", lambda *_: Gain(1.5, 1.4, 1.6))
    monkeypatch.setattr(keep_fp32, "_with_range", lambda _: [])
    monkeypatch.setattr(keep_fp32, "MANY", 1.0)
    verifier, _, result = judged(overflowing.one_branch().cuda(), torch.randn(IMAGE, device="cuda"))
    assert kinds(result) == {"tf32"}
    assert result.program.settings.tf32
    assert verifier.check(result.program.run, FP16).passed


@pytest.mark.gpu
def test_on_a_gpu_all_stays_in_tf32_where_every_product_overflows() -> None:
    verifier, _, result = judged(overflowing.everything().cuda(), torch.randn(IMAGE, device="cuda"))
    assert isinstance(result.replay, KeepFp32)
    assert result.replay.choices == (("*", "tf32"),)
    assert verifier.check(result.program.run, FP16).passed
