"""Which lanes are judged: loading is not taken for computing, and each that is left out has a reason."""

from __future__ import annotations

import math
import time
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ampopt import optimize
from ampopt.ir.lanes import FP32, Lane
from ampopt.measure.verify import Verifier
from ampopt.search.lane_probe import judgeable, seconds_of_a_call
from tests.helpers import BF16, FP16, Model
from tests.support.planted import captured_of

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Pausing(nn.Sequential):
    """Calls under autocast take longer by these seconds, the first ones first, and by `later` from then on.

    The list is of the class, because a call is made of a copy.
    """

    pauses: ClassVar[list[float]] = []
    later = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            time.sleep(self.pauses.pop(0) if self.pauses else self.later)
        result: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return result


def probed(
    monkeypatch: pytest.MonkeyPatch, *pauses: float, later: float = 0.0, budget_s: float = 20.0
) -> tuple[dict[Lane, float], list[str]]:
    original, captured = captured_of(Pausing(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), X)
    verifier, notes = Verifier(original, captured, draws=0, faults="ignore"), list[str]()
    monkeypatch.setattr(Pausing, "pauses", list(pauses))
    monkeypatch.setattr(Pausing, "later", later)
    return judgeable((FP32, BF16), captured, verifier, budget_s, notes), notes


@pytest.mark.timing
@pytest.mark.parametrize("pauses", [(), (1.5,), (1.2, 0.6), (0.9, 0.6, 0.4)])
def test_a_lane_whose_first_calls_are_slow_is_judged(
    pauses: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, notes = probed(monkeypatch, *pauses)
    assert list(kept) == [FP32, BF16]
    assert kept[BF16] < 0.3
    assert notes == []


@pytest.mark.timing
def test_a_lane_in_which_every_call_is_slow_is_left_out_with_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, (note,) = probed(monkeypatch, later=0.5)
    assert list(kept) == [FP32]
    assert note == (
        "the amp lane was not tried: one call of it takes over 0.3 s here, so that no pass could be judged "
        "within 6 s of the time budget"
    )


@pytest.mark.timing
def test_a_stall_does_not_make_a_slow_lane_affordable(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, notes = probed(monkeypatch, 1.2, later=0.5)
    assert list(kept) == [FP32]
    assert "takes over 0.3 s" in notes[0]


def test_a_lane_in_which_the_original_fails_is_left_out_with_its_error() -> None:
    class Fails(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_autocast_enabled("cpu"):
                raise NotImplementedError("no kernel for Half")
            return super().forward(x)

    original, captured = captured_of(Fails().eval(), X)
    notes: list[str] = []
    kept = judgeable((FP32, FP16), captured, Verifier(original, captured, draws=0), 20.0, notes)
    assert list(kept) == [FP32]
    assert notes == [
        "the amp lane was not tried: the original fails in it (NotImplementedError: no kernel for Half)"
    ]


class Overflows(nn.Conv2d):
    """Asks for the state of autocast: eager overflows, and the graph that was captured without does not."""

    factor = math.inf

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return torch.mul(y, self.factor) if torch.is_autocast_enabled("cpu") else y


def judged(model: nn.Module, **options: Any) -> tuple[list[Lane], list[str]]:
    original, captured = captured_of(model.eval(), X)
    notes: list[str] = []
    verifier = Verifier(original, captured, draws=0, **options)
    return list(judgeable((FP32, BF16), captured, verifier, 20.0, notes)), notes


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_lane_in_which_only_eager_overflows_is_judged(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Overflows, "factor", factor)
    kept, notes = judged(Overflows(3, 8, 3), faults="ignore")
    assert kept == [FP32, BF16]
    assert notes == []


def test_a_lane_in_which_eager_is_too_inexact_is_judged_because_a_mix_may_be_right() -> None:
    def cancels(m: Any, x: Tensor) -> Tensor:
        result: Tensor = m.conv(x) - m.other(x)
        return result

    torch.manual_seed(0)
    conv, other = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
    other.load_state_dict({name: tensor * (1 + 1e-4) for name, tensor in conv.state_dict().items()})
    model = Model(cancels, conv=conv, other=other)
    assert judged(model) == ([FP32, BF16], [])


class LoadsOnce(nn.ReLU):
    """The first call of the process takes longer."""

    loaded = True

    def forward(self, x: Tensor) -> Tensor:
        if not LoadsOnce.loaded:
            LoadsOnce.loaded = True
            time.sleep(0.9)
        return super().forward(x)


@pytest.mark.timing
def test_a_first_call_that_loads_is_not_taken_for_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadsOnce, "loaded", False)
    assert seconds_of_a_call(LoadsOnce(), (X,), {}, budget_s=20.0) < 0.3
    assert LoadsOnce.loaded


@pytest.mark.timing
def test_the_default_call_keeps_a_lane_whose_first_calls_load(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Pausing(nn.Conv2d(3, 8, 3), nn.ReLU())
    monkeypatch.setattr(Pausing, "pauses", [1.2, 0.6])
    exclude = ("compile", "onnx-runtime", "openvino")
    report = optimize(model, X, budget_s=20.0, exclude=exclude, cache=False).report
    assert set(report.lanes) == {"fp32", "amp"}
    assert not any("was not tried" in note for note in report.notes)


class Stalled(nn.ReLU):
    """Its first calls wait for threads that other load has stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.stalls = [0.2, 0.3, 0.1]

    def forward(self, x: Tensor) -> Tensor:
        if stalls := self.stalls:
            time.sleep(stalls.pop(0))
        return super().forward(x)


@pytest.mark.timing
def test_calls_that_differ_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.search.lane_probe.working_copy", lambda model: model)
    assert seconds_of_a_call(Stalled(), (X,), {}, budget_s=60.0) < 0.05
