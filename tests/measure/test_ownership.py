"""Ownership: right numbers in memory that is not the caller's, or another result's, are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.ir.lanes import FP32
from ampopt.measure.ownership import Watched
from ampopt.measure.verify import Verifier
from tests.helpers import Model
from tests.support.planted import captured_of

X = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
W = torch.ones(3)


def reason_for(function: Callable[[Any, Tensor], Any], run: Callable[[Tensor], list[Tensor]]) -> str | None:
    original, captured = captured_of(Model(function, w=W.clone()), X.clone())
    return Verifier(original, captured).check(run, FP32).reason


def test_a_program_that_writes_to_its_input_is_refused() -> None:
    original, captured = captured_of(Model(lambda m, x: x.relu() + 0), X.clone())
    verifier = Verifier(original, captured)
    assert verifier.check(lambda x: [x.relu_() + 0], FP32).reason == "it writes to input 0"
    assert torch.equal(captured.program.examples[0], X), "the next program is verified with other inputs"


def test_a_program_that_writes_to_an_input_in_a_later_call_is_refused() -> None:
    calls = 0

    def run(x: Tensor) -> list[Tensor]:
        nonlocal calls
        calls += 1
        return [x.relu() if calls < 3 else x.relu_().clone()]

    assert reason_for(lambda m, x: x.relu(), run) == "it writes to input 0"


def _writes(*tensors: Tensor) -> list[Tensor]:
    outputs = [tensors[0] + tensors[1]]
    for tensor in tensors:
        tensor.zero_()
    return outputs


def _writes_and_fails(*tensors: Tensor) -> list[Tensor]:
    _writes(*tensors)
    raise ValueError("half-way")


@pytest.mark.parametrize("run", [_writes, _writes_and_fails])
@pytest.mark.parametrize("everywhere", [False, True])
def test_what_a_program_writes_to_is_no_input_of_another(run: Any, everywhere: bool) -> None:
    """Two inputs, one of them integers, in all calls of all draws."""
    y = torch.arange(32).reshape(2, 16)
    original, captured = captured_of(Model(lambda m, x, y: x + y), X.clone(), y.clone())
    verifier = Verifier(original, captured)
    given = [tensor for draw in verifier.draws for tensors in draw.calls for tensor in tensors]
    kept = [tensor.clone() for tensor in given]
    raises = "it raises an error where the original answers: ValueError: half-way"
    reason = raises if run is _writes_and_fails else "it writes to input 0"
    is_raised = run is _writes_and_fails and not everywhere
    with pytest.raises(ValueError, match="half-way") if is_raised else contextlib.nullcontext():
        assert verifier.check(run, FP32, everywhere=everywhere).reason == reason
    for draw in (*verifier.draws, *verifier.range_draws(FP32)):
        with contextlib.suppress(ValueError):
            verifier.steps(run, draw)
    assert all(map(torch.equal, given, kept))
    assert torch.equal(captured.program.examples[0], X)
    assert torch.equal(captured.program.examples[1], y)
    assert verifier.check(captured.program.run, FP32, everywhere=True).passed


@pytest.mark.parametrize("run", [lambda x: [x[0]], lambda x: [x.unbind(0)[0].view(4, 4).view(-1)]])
def test_a_result_that_is_a_view_of_an_input_is_refused(run: Callable[[Tensor], list[Tensor]]) -> None:
    assert reason_for(lambda m, x: x[0].clone(), run) == "output 0 shares memory with an input"


def test_a_result_that_is_the_programs_own_memory_is_refused() -> None:
    own = torch.ones(3)
    reason = reason_for(lambda m, x: (x + 1, m.w * 1), lambda x: [x + 1, own[:]])
    assert reason == "output 1 shares memory with an earlier call's"


def test_results_that_share_memory_are_refused_where_the_originals_do_not() -> None:
    def twice(x: Tensor) -> list[Tensor]:
        y = x.relu()
        return [x + 1, y, y.view(4, 8)]

    def apart(x: Tensor) -> list[Tensor]:
        z, y = x + 1, x.relu()
        return [z, y, y.clone().view(4, 8)]

    shared = "outputs 1 and 2 share memory, and the original's do not"
    assert reason_for(lambda m, x: (x + 1, (y := x.relu()), y.clone().view(4, 8)), twice) == shared
    assert reason_for(lambda m, x: (x + 1, (y := x.relu()), y.view(4, 8)), twice) is None
    assert reason_for(lambda m, x: (x + 1, (y := x.relu()), y.view(4, 8)), apart) is None


def test_results_that_lie_beside_each_other_in_one_memory_pass() -> None:
    def beside(x: Tensor) -> list[Tensor]:
        return list(torch.stack([x + 1, x + 2], -1).unbind(-1))

    assert reason_for(lambda m, x: (x + 1, x + 2), beside) is None


def test_what_the_original_shares_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    original, captured = captured_of(Model(lambda m, x: ((y := x.relu()), y.view(4, 8))), X.clone())
    verifier, looked = Verifier(original, captured), list[Any]()

    class Seen(Watched):
        def __init__(self, run: Any, **options: Any) -> None:
            looked.append(run)
            super().__init__(run, **options)

    monkeypatch.setattr("ampopt.measure.verify.Watched", Seen)
    checks = [verifier.check(captured.program.run, FP32) for _ in range(3)]
    assert all(check.passed for check in checks)
    assert len(looked) == len(checks) + 1


def test_results_may_stay_in_the_programs_memory_where_the_caller_asks_for_that() -> None:
    own = torch.ones(2, 16)
    original, captured = captured_of(Model(lambda m, x: x + 1), X.clone())
    verifier = Verifier(original, captured)
    assert verifier.check(lambda x: [torch.add(x, 1, out=own)], FP32, static=True).passed
    assert not verifier.check(lambda x: [torch.add(x, 1, out=own)], FP32).passed
    writes = verifier.check(lambda x: [torch.add(x.relu_(), 1, out=own)], FP32, static=True)
    assert writes.reason is not None


def test_results_of_ones_own_pass() -> None:
    assert reason_for(lambda m, x: (x + 1, m.w * 1), lambda x: [x + 1, W.clone()]) is None


@pytest.mark.parametrize("function", [lambda m, x: x[0], lambda m, x: (x.relu(), m.w[:])])
def test_what_the_original_does_itself_is_no_fault(function: Callable[[Any, Tensor], Any]) -> None:
    original, captured = captured_of(Model(function, w=W.clone()), X.clone())
    verifier = Verifier(original, captured)
    assert verifier.check(verifier.eager(FP32), FP32).passed
    assert verifier.check(captured.program.run, FP32).passed
