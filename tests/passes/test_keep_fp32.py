"""keep-fp32: few operators stay in FP32 where a mixed lane overflows or is too inexact, and say why."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import ampopt.ir.judged
import ampopt.passes.keep_fp32 as keep_fp32
from ampopt.errors import PassError
from ampopt.ir.graph import aten, calls
from ampopt.ir.lanes import FP32
from ampopt.ir.program import Program
from ampopt.ir.transform import Declined, Result
from ampopt.measure.sampling import Gain
from ampopt.measure.verifiers_judge import VerifiersJudge
from ampopt.measure.verify import Verifier
from ampopt.passes import BakeAutocast, FoldConvBn, KeepFp32
from tests.helpers import BF16, FP16, check_pass, dtypes_of, program_of, spoilt
from tests.support import overflowing
from tests.support.overflowing import IMAGE, TOKENS
from tests.support.planted import captured_of
from tests.support.precision import Counting, judged, kinds, stays

LIMIT = 1e-2


@pytest.fixture(autouse=True)
def _no_faster_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock decides here: what stays computes in FP32."""
    monkeypatch.setattr(keep_fp32, "_compared", lambda *_: Gain(1.0, 0.9, 1.1))


CASES: dict[str, tuple[Callable[[], nn.Module], Sequence[int], int, list[object]]] = {
    "branches": (overflowing.branches, IMAGE, 2, [aten.conv2d.default] * 2),
    "sums": (overflowing.sums, IMAGE, 1, [aten.add.Tensor]),
    "one branch": (overflowing.one_branch, IMAGE, 1, [aten.conv2d.default]),
    "attention": (overflowing.attention, TOKENS, 1, [aten.matmul.default]),
    "last layers": (overflowing.last_layers, IMAGE, 2, [aten.linear.default] * 2),
    "large norm": (overflowing.large_norm, TOKENS, 1, [aten.mul.Tensor]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_operators_that_overflow_stay_in_fp32_and_no_others(name: str) -> None:
    build, shape, count, targets = CASES[name]
    torch.manual_seed(2)
    model, x = build(), torch.rand(*shape) if name == "sums" else torch.randn(*shape)
    lost = BakeAutocast().apply(program_of(model, x, lane=FP16)).program.run(x)
    assert not torch.isfinite(lost[0]).all(), "it does not overflow, so this tests nothing"
    elsewhere = [torch.cat([x, x])]
    result = check_pass(
        KeepFp32(),
        model,
        x,
        rewrites=count,
        lane=FP16,
        elsewhere=elsewhere,
        rewrites_elsewhere=count,
        limit=LIMIT,
    )
    by_name = {node.name: node for node in calls(result.program.graph)}
    assert [by_name[each].target for each in stays(result)] == targets
    dtypes = dtypes_of(result.program)
    assert {dtypes[each] for each in stays(result)} == {torch.float32}
    products = [n for n in by_name.values() if n.target in (aten.conv2d.default, aten.linear.default)]
    lowered = {dtypes[node.name] for node in products if node.name not in stays(result)}
    assert lowered == {torch.float16}
    assert all("overflows: largest" in hint for hint in result.hints[:count])


def test_a_hint_says_which_operator_where_and_how_far_it_is_out_of_range() -> None:
    _, _, result = judged(
        overflowing.branches(), torch.randn(IMAGE, generator=torch.Generator().manual_seed(0))
    )
    first = result.hints[0]
    assert first.startswith("conv2d_3 (2.wide.0, overflowing.py:")
    name, _, largest = first.partition(") overflows: largest ")
    assert name
    assert 65_504 < int(largest.replace(",", "")) < 65_504 * 1e3


def test_a_value_is_cast_back_where_it_is_in_range_again_and_not_before() -> None:
    x = torch.randn(IMAGE)
    _, _, result = judged(overflowing.branches(), x)
    by_name = {node.name: node for node in calls(result.program.graph)}
    for name in stays(result):
        (norm,) = by_name[name].users
        assert norm.target is aten.batch_norm.default
        (cast,) = norm.users
        assert cast.target is aten._to_copy.default
        assert cast.kwargs["dtype"] is torch.float16
    assert dtypes_of(result.program)["relu_2"] is torch.float16


def test_where_every_product_would_have_to_stay_the_pass_refuses_and_says_so() -> None:
    _, program, result = judged(overflowing.everything(), torch.randn(IMAGE))
    assert result.program is program
    (declined,) = result.declined
    assert declined.node == "the program"
    assert declined.reason.startswith(
        "5 of its 5 matrix products and convolutions would have to stay in FP32: conv2d (0) overflows: "
    )


def test_a_state_that_overflows_after_some_calls_is_seen() -> None:
    verifier, _, result = judged(overflowing.recurrent(), torch.randn(2, 8))
    assert result.modified
    assert verifier.check(result.program.run, FP16).passed


def test_a_program_that_is_right_is_left_alone() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.randn(IMAGE)
    result = check_pass(KeepFp32(), model, x, rewrites=0, lane=FP16)
    assert result.declined == (
        Declined("the program", "it is right with every operator in the lane's precision"),
    )


@pytest.mark.parametrize(
    ("lane", "baked", "reason"),
    [
        (FP32, [], "the lane computes in FP32"),
        (FP16, [BakeAutocast()], "the lane's precision is in the graph already, and right"),
    ],
)
def test_it_is_refused_where_there_is_nothing_to_decide(lane: Any, baked: Any, reason: str) -> None:
    program = program_of(nn.Linear(4, 4), torch.randn(2, 4), lane=lane, on_top_of=baked)
    assert KeepFp32().why_not(program) == reason


def ordinary() -> nn.Module:
    torch.manual_seed(0)
    convs = [nn.Sequential(nn.Conv2d(3 if k == 0 else 12, 12, 3, padding=1), nn.GELU()) for k in range(8)]
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)).eval()


@pytest.mark.parametrize("lane", [FP16, BF16], ids=["float16", "bfloat16"])
def test_a_tolerance_below_that_of_plain_amp_is_met_by_a_mix(lane: Any) -> None:
    original, captured = captured_of(ordinary(), torch.randn(IMAGE))
    own = Verifier(original, captured).own_error(lane)
    verifier = Verifier(original, captured, tolerance=0.4 * own)
    program = lane.start(captured.program)
    assert not verifier.check(program.run, lane).passed
    result = KeepFp32().apply_judged(program, VerifiersJudge(verifier, lane, time.perf_counter() + 60.0))
    check = verifier.check(result.program.run, lane)
    assert check.passed
    assert check.error <= 0.4 * own
    dtypes = dtypes_of(result.program)
    products = calls(result.program.graph, [aten.conv2d.default, aten.linear.default])
    found = [dtypes[node.name] for node in products]
    assert set(found) == {torch.float32, lane.dtype}
    assert found.count(lane.dtype) > found.count(torch.float32)
    assert all("is too inexact: its error is" in hint for hint in result.hints)
    assert all("which changes the outputs by" in hint for hint in result.hints)


@pytest.mark.parametrize("factor", [0.7, 0.3, 0.0])
def test_the_search_makes_few_programs_however_many_operators_there_are(factor: float) -> None:
    original, captured = captured_of(ordinary(), torch.randn(IMAGE))
    own = Verifier(original, captured).own_error(FP16)
    verifier = Verifier(original, captured, tolerance=factor * own)
    judge = Counting(VerifiersJudge(verifier, FP16, time.perf_counter() + 60.0))
    result = KeepFp32().apply_judged(FP16.start(captured.program), judge)
    assert judge.asked <= 8 + 3
    assert result.modified == (factor > 0)
    if not factor:
        assert "with more, " in result.declined[0].reason
        assert "would have to stay in FP32" in result.declined[0].reason


def test_overflow_far_outside_of_the_examples_range_keeps_nothing() -> None:
    """`inputs x100` overflow here; the examples and ordinary draws do not."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.randn(IMAGE)
    overflowing.scale(model[0], 1e3)
    overflowing.scale(model[2], 1e-3)
    far = BakeAutocast().apply(program_of(model, x, lane=FP16)).program.run(100 * x)
    assert not torch.isfinite(far[0]).all()
    _, program, result = judged(model, x)
    assert result.program is program


def test_a_replay_keeps_what_was_found_and_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = overflowing.branches(), torch.randn(IMAGE)
    found = KeepFp32().apply(program_of(model, x, lane=FP16))
    monkeypatch.setattr(keep_fp32, "PrecisionSearch", None)
    monkeypatch.setattr(ampopt.ir.judged, "OwnJudge", None)
    assert found.replay is not None
    again = found.replay.apply(program_of(model, x, lane=FP16))
    assert again.program.graph.code == found.program.graph.code


def test_a_name_that_another_graph_has_not_is_declined() -> None:
    step = KeepFp32(choices=(("conv2d_3", "fp32"), ("conv2d_99", "fp32")))
    result = step.apply(program_of(overflowing.branches(), torch.randn(IMAGE), lane=FP16))
    assert result.rewrites == 1
    assert result.declined == (Declined("conv2d_99", "the graph has no such operator"),)


def test_operators_stay_in_bfloat16_where_that_is_right_and_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_fp32, "_compared", lambda *_: Gain(1.5, 1.4, 1.6))
    _, _, result = judged(overflowing.large_norm(), torch.randn(TOKENS))
    assert kinds(result) == {"bf16"}
    assert isinstance(result.replay, KeepFp32)
    assert {what for _, what in result.replay.in_fp32().choices or ()} == {"fp32", "back"}
    assert dtypes_of(result.program)[stays(result)[0]] is torch.bfloat16
    assert result.hints[-1] == "bf16 for them: 1.50x (1.40 to 1.60)"


def test_bfloat16_that_is_wrong_is_not_taken_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_fp32, "_compared", lambda *_: Gain(9.0, 9.0, 9.0))
    _, _, result = judged(overflowing.attention(), torch.randn(TOKENS))
    assert kinds(result) == {"fp32"}
    assert result.hints[-1].startswith("bf16 for them is wrong: output 0: error ")


@pytest.mark.parametrize("option", [{"policy": "O3"}, {"choices": (("conv2d", "fp8"),)}])
def test_unknown_options_are_refused_with_the_known_ones(option: dict[str, Any]) -> None:
    with pytest.raises(PassError, match="choose from"):
        KeepFp32(**option)


@pytest.mark.parametrize("policy", ["O1", "O2", "half"])
def test_other_policies_keep_what_overflows_too(policy: str) -> None:
    model, x = overflowing.one_branch(), torch.randn(IMAGE)
    result = KeepFp32(policy=policy).apply(program_of(model, x, lane=FP16))
    assert result.modified
    assert torch.isfinite(result.program.run(x)[0]).all()


def _at_once(choices: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for name, what in choices:
        if what != "back":
            yield from ((name, what), (name, "back"))


class _CastsTooEarly(KeepFp32):
    """Casts the results of what overflows back at once."""

    def apply_judged(self, program: Program, judge: Any) -> Result:
        found = KeepFp32().apply_judged(program, judge).replay
        assert isinstance(found, KeepFp32)
        early = dataclasses.replace(found, choices=tuple(_at_once(found.choices or ())))
        return dataclasses.replace(early.apply(program), replay=early)


def test_the_check_catches_a_value_that_is_cast_back_while_it_is_out_of_range() -> None:
    with pytest.raises(AssertionError, match="the error is inf"):
        check_pass(
            _CastsTooEarly(), overflowing.branches(), torch.randn(IMAGE), rewrites=2, lane=FP16, limit=LIMIT
        )


class _SpoilsAWeight(KeepFp32):
    def apply_judged(self, program: Program, judge: Any) -> Result:
        result = super().apply_judged(program, judge)
        name, weight = next(result.program.graph.named_buffers())
        return spoilt(result, lambda module: setattr(module, name, weight * 2))


def test_the_check_catches_a_weight_that_was_cast_wrongly() -> None:
    with pytest.raises(AssertionError, match="the error is"):
        check_pass(
            _SpoilsAWeight(), overflowing.one_branch(), torch.randn(IMAGE), rewrites=1, lane=FP16, limit=LIMIT
        )


def test_folded_norms_can_make_it_unnecessary() -> None:
    model, x = overflowing.branches(), torch.randn(IMAGE)
    program = program_of(model, x, lane=FP16, on_top_of=[FoldConvBn()])
    assert not KeepFp32().apply(program).modified
    assert torch.isfinite(BakeAutocast().apply(program).program.run(x)[0]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_float16_is_right_with_what_stays(name: str) -> None:
    build, shape, _, _ = CASES[name]
    x = torch.rand(*shape) if name == "sums" else torch.randn(*shape)
    verifier, _, result = judged(build().cuda(), x.cuda())
    assert result.modified
    assert verifier.check(result.program.run, FP16).passed
