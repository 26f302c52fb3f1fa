"""What a pass says of itself may fail: then it is its own row that says so, and the others are tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ampopt
from ampopt.ir.transform import Pass
from ampopt.passes import Compile, CudaGraph, FoldConvBn, Script
from ampopt.search import estimates
from tests.helpers import program_of

pytestmark = pytest.mark.usefixtures("quick")

X = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()


def planted(cls: type[Pass], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError(f"planted in {method}")

    monkeypatch.setattr(cls, method, fails)


ASKED = [
    *((cls, method) for cls in (FoldConvBn, Script) for method in ("why_not", "within", "apply")),
    *((cls, method) for cls in (FoldConvBn, Script) for method in ("expected_seconds", "numerics_on")),
    (CudaGraph, "why_not"),
    (Script, "hurried"),
]


@pytest.mark.parametrize(("cls", "method"), ASKED)
def test_what_fails_in_a_pass_does_not_end_the_search(
    cls: type[Pass], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(cls, method, monkeypatch)
    steps = [FoldConvBn(), Script(), CudaGraph()]
    fast = ampopt.optimize(small(), X, passes=steps, precision="fp32", budget_s=20, cache=False)
    assert not [note for note in fast.report.notes if "ended early" in note]
    others = {entry.name for entry in fast.report.entries if "planted" not in entry.reason}
    for other in {FoldConvBn, Script} - {cls}:
        assert any(other().name in name for name in others), f"{other().name} was tried"
    torch.testing.assert_close(fast(X), small()(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("cls", "method"),
    [
        *((FoldConvBn, m) for m in ("why_not", "within", "apply")),
        *((Script, m) for m in ("why_not", "within", "apply")),
    ],
)
def test_the_row_of_a_pass_that_fails_says_how(
    cls: type[Pass], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(cls, method, monkeypatch)
    fast = ampopt.optimize(small(), X, passes=[cls()], precision="fp32", budget_s=20, cache=False)
    rows = [entry for entry in fast.report.entries if cls().name in entry.name]
    assert [entry.verdict.value for entry in rows] == ["failed"]
    assert rows[0].reason == f"RuntimeError: planted in {method}"


@pytest.mark.parametrize("method", ["why_not", "expected_seconds"])
def test_a_comparison_of_passes_goes_on(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(Script, method, monkeypatch)
    table = ampopt.compare(small(), X, passes=[FoldConvBn(), Script()], precision="fp32", budget_s=8)
    assert "fold-conv-bn" in str(table)


def test_an_estimate_that_fails_is_none_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = program_of(small(), X)
    for method in ("why_not", "expected_seconds", "divided"):
        planted(Compile, method, monkeypatch)
    assert estimates.why_not(Compile(), program) == "RuntimeError: planted in why_not"
    assert estimates.expected_s(Compile(), program) == 0.0
    assert estimates.divided(Compile(), program, 2) == [program]
    assert estimates.expected_s(Compile(), program) == 0.0
    told = [record.getMessage() for record in caplog.records if "says of itself" in record.getMessage()]
    assert [text.rpartition(" ")[2] for text in told] == ["why_not", "expected_seconds", "divided"]


def test_an_interrupt_is_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Compile, "expected_seconds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        estimates.expected_s(Compile(), program_of(small(), X))
