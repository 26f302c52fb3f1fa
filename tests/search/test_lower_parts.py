"""Submodules in lower precision: where the whole model tolerates that and is faster, else in FP32."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import InputError
from ampopt.measure import headline
from ampopt.measure.headline import Compared
from ampopt.measure.sampling import Gain
from ampopt.search import lower_parts
from ampopt.search.lower_parts import LowerParts
from ampopt.search.options import Options
from ampopt.search.region import Region
from ampopt.search.whole_check import WholeCheck
from tests.helpers import BF16
from tests.support import two_parts
from tests.support.two_parts import Tolerant, X, body, lanes_of, made, notes_on

pytestmark = pytest.mark.usefixtures("quick", "faster")


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    two_parts.are_worth_it(monkeypatch)


def level(y: Tensor) -> int:
    """A count that bfloat16 changes by several, and float32 not."""
    return round(y.abs().max().item() * 1e4)


class Counting(Tolerant):
    """One that decides by a threshold that rounding to bfloat16 moves."""

    def forward(self, x: Tensor) -> Any:
        """Features and their level."""
        y = self.first(x)
        return {"features": self.second(y), "level": level(y)}


class OneOfTwo(Tolerant):
    """One in which the first submodule tolerates lower precision, and the second does not."""

    def __init__(self) -> None:
        super().__init__()
        self.second = body()

    def forward(self, x: Tensor) -> Any:
        """Features of one, and the level of the other."""
        return {"features": self.first(x), "level": level(self.second(x))}


@pytest.mark.parametrize("precision", ["auto", "amp", "bf16", "fp32,amp"])
def test_submodules_are_in_lower_precision_where_the_whole_tolerates_it(precision: str) -> None:
    model = Tolerant().eval()
    fast = made(model, precision=precision)
    report = fast.report
    assert (report.chosen, list(report.lanes)) == ("amp", ["fp32", "amp"]), report.notes
    assert lanes_of(report) == {"first": "amp", "second": "amp"}
    assert list(report.regions["first"].lanes) == ["fp32", "amp"]
    assert {entry.lane for entry in report.regions["first"].entries} == {"fp32", "amp"}
    assert report.lanes["fp32"].error < 1e-5 < report.lanes["amp"].error < 1e-2
    assert report.lanes["amp"].dtype == "mixed"
    with torch.no_grad():
        for x in (X, -X, X[..., :9]):
            assert fast(x).dtype is torch.float32
            assert (fast(x) - model(x)).norm() < 1e-2 * model(x).norm()
        assert not torch.allclose(fast(X), model(X), rtol=1e-5, atol=1e-6)


def test_in_fp32_no_lower_precision_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[object]()
    monkeypatch.setattr(LowerParts, "_is_callable", lambda *given: looked.append(given))
    report = made(Tolerant().eval(), precision="fp32").report
    assert looked == []
    assert (report.chosen, list(report.lanes)) == ("fp32", ["fp32"])


@pytest.mark.parametrize("precision", ["auto", "amp"])
def test_a_threshold_that_lower_precision_moves_keeps_what_is_before_it_in_fp32(precision: str) -> None:
    report = made(Counting().eval(), precision=precision).report
    assert lanes_of(report) == {"first": "fp32", "second": "amp"}
    (note,) = notes_on(report, "first")
    assert note.endswith("the whole model's error inf at ['level'] is over 0.01")
    assert report.chosen == "amp"


def test_of_two_submodules_one_may_be_lower() -> None:
    model = OneOfTwo().eval()
    fast = made(model)
    assert lanes_of(fast.report) == {"first": "amp", "second": "fp32"}
    assert notes_on(fast.report, "second")
    assert not notes_on(fast.report, "first")
    with torch.no_grad():
        assert fast(X)["level"] == model(X)["level"]


@pytest.mark.parametrize("precision", ["auto", "amp"])
def test_a_tolerance_below_what_lower_precision_keeps_is_kept_by_fp32(precision: str) -> None:
    report = made(Tolerant().eval(), precision=precision, tolerance=1e-4).report
    assert (report.chosen, list(report.lanes)) == ("fp32", ["fp32"])
    assert set(lanes_of(report).values()) == {"fp32"}
    for name in ("first", "second"):
        assert notes_on(report, name)[0].endswith("is over 0.0001")
    assert ("precision='amp' is answered in FP32" in report.notes) == (precision == "amp")


def test_a_metric_is_about_results_of_the_whole() -> None:
    def apart(found: Any, expected: Any) -> float:
        assert set(found) == {"features", "level"}
        found["features"].zero_()  # it gets copies
        return float(abs(found["level"] - expected["level"]))

    report = made(Counting().eval(), metric=apart, tolerance=500.0).report
    assert lanes_of(report) == {"first": "amp", "second": "amp"}, report.notes
    report = made(Counting().eval(), metric=apart).report
    assert lanes_of(report) == {"first": "fp32", "second": "amp"}
    assert "over the tolerance 0" in notes_on(report, "first")[0]
    assert "the metric gives" in notes_on(report, "first")[0]


def test_a_metric_that_fails_is_an_input_error() -> None:
    with pytest.raises(InputError, match="fails on the original's own results: TypeError"):
        made(Counting().eval(), metric=lambda found, expected: (found - expected).norm())
    with pytest.raises(InputError, match=r"own results: .*the metric gives -1: let it return a distance"):
        made(Counting().eval(), metric=lambda found, expected: -1.0)


def test_a_metric_that_gives_nan_is_told_as_that() -> None:
    report = made(Counting().eval(), metric=lambda found, expected: math.nan, tolerance=9.0).report
    assert "the metric gives NaN for the whole model" in " ".join(report.notes)


def test_where_no_time_is_left_fp32_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_parts, "calls_to_verify", lambda draws: 1e9)
    report = made(Tolerant().eval()).report
    assert (report.chosen, list(report.lanes)) == ("fp32", ["fp32"])
    assert lanes_of(report) == {"first": "fp32", "second": "fp32"}
    assert "the time budget was spent: budget_s=" in notes_on(report, "first")[0]


def test_where_most_of_a_call_is_between_submodules_that_code_gets_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lower_parts, "LEAST_S", 5.0)
    model, options = Tolerant().eval(), Options(precision="auto")
    none: Any = None
    found = [Region(name, model.get_submodule(name), none, []) for name in ("first", "second")]
    check = WholeCheck(model, (X,), {}, torch.device("cpu"), 1e-2)
    lower = LowerParts(check, model, found, [0.01, 0.01], options)
    lower._tolerated = {BF16: found}
    cut_off = lower.optimize({}, time.perf_counter() + 30.0, 0.18, none, none)
    assert not cut_off
    assert [reason.partition(": in ")[2] for reason in lower.reasons] == [
        "amp it could save at most 10 % of a call, and the time goes to the code between submodules: "
        "a larger budget_s tries both"
    ] * 2


@pytest.mark.parametrize(
    ("call_s", "seconds", "weight"),
    [(0.01, 54.0, 0.02), (0.01, 30.0, 0.0), (0.6, 54.0, 0.0), (0.6, 300.0, 1.2)],
    ids=["enough", "short", "slow", "slow and long"],
)
def test_fp32_keeps_the_whole_time_where_half_of_it_is_too_short(
    call_s: float, seconds: float, weight: float
) -> None:
    model, options = Tolerant().eval(), Options(precision="auto")
    none: Any = None
    found = [Region(name, model.get_submodule(name), none, []) for name in ("first", "second")]
    check = WholeCheck(model, (X,), {}, torch.device("cpu"), 1e-2)
    lower = LowerParts(check, model, found, [call_s, call_s], options)
    assert lower.weight_s(seconds) == 0.0  # before anything is known to be tolerated
    lower._tolerated = {BF16: found}
    assert lower.weight_s(seconds) == weight
    assert ("budget_s=" in lower._spent) == (weight == 0.0)


def _gains(monkeypatch: pytest.MonkeyPatch, *gains: float) -> None:
    """What comparisons with lower precision say, one after another, the last again and again."""
    whole, left = headline.compare_to_decide, list(gains)

    def compared(*given: Any, **options: Any) -> Compared:
        ratio = left.pop(0) if len(left) > 1 else left[0]
        return dataclasses.replace(whole(*given, **options), gain=Gain(ratio, ratio, ratio))

    monkeypatch.setattr(lower_parts, "compare_to_decide", compared)


def test_a_submodule_that_is_not_faster_stays_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    _gains(monkeypatch, 1.0, 1.5)
    report = made(OneOfTwo().eval(), tolerance=None, metric=lambda *_: 0.0).report
    assert sorted(map(str, lanes_of(report).values())) == ["amp", "fp32"]
    slow = next(name for name, lane in lanes_of(report).items() if lane == "fp32")
    assert notes_on(report, slow)[0].endswith("it is not faster")


def test_where_the_whole_is_not_faster_all_stay_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    _gains(monkeypatch, 1.5, 1.5, 1.0)
    model = Tolerant().eval()
    fast = made(model, precision="amp")
    assert (fast.report.chosen, list(fast.report.lanes)) == ("fp32", ["fp32", "amp"])
    assert set(lanes_of(fast.report).values()) == {"fp32"}
    assert "submodules stay in FP32: the whole is not faster with them in amp" in fast.report.notes
    assert "precision='amp' is answered in FP32" in fast.report.notes
    with torch.no_grad():
        assert torch.allclose(fast(X), model(X), atol=1e-5)


def interrupted(times: int) -> Callable[..., Any]:
    """`LowerParts._why_wrong`, whose calls after so many are interrupted once."""
    whole, calls = LowerParts._why_wrong, list[object]()

    def why_wrong(self: LowerParts, model: nn.Module) -> str | None:
        calls.append(model)
        if len(calls) == times + 1:
            raise KeyboardInterrupt
        return whole(self, model)

    return why_wrong


@pytest.mark.parametrize("times", [0, 1, 2])
def test_after_an_interruption_the_best_so_far_serves(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LowerParts, "_why_wrong", interrupted(times))
    model = Tolerant().eval()
    fast = made(model)
    assert "interrupted: this is the best so far" in fast.report.notes
    lanes = sorted(map(str, lanes_of(fast.report).values()))
    assert lanes == [[], ["fp32", "fp32"], ["amp", "fp32"]][times]
    with torch.no_grad():
        assert (fast(X) - model(X)).norm() < 1e-2 * model(X).norm()


def test_a_submodule_that_fails_in_lower_precision_stays_in_fp32() -> None:
    class Failing(OneOfTwo):
        def __init__(self) -> None:
            super().__init__()
            self.second = Inverting()

        def forward(self, x: Tensor) -> Any:
            return self.first(x) * (1 + int(x.mean().item() > 1e6)), self.second(x)

    report = made(Failing().eval()).report
    assert lanes_of(report) == {"first": "amp", "second": "fp32"}
    assert "it fails (" in notes_on(report, "second")[0]


class Inverting(nn.Module):
    """Something without a kernel for bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, y: Tensor) -> Tensor:
        """The determinants."""
        return torch.linalg.det(self.linear(y))  # type: ignore[no-any-return]


class Overflowing(Tolerant):
    """One whose first submodule leaves float16's range, and comes back into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Scaled(3, 1e6), Scaled(4, 1e-6), nn.Conv2d(4, 4, 3, padding=1))


class Scaled(nn.Conv2d):
    """A convolution with large or small weights."""

    def __init__(self, channels: int, factor: float) -> None:
        super().__init__(channels, 4, 3, padding=1, bias=False)
        with torch.no_grad():
            self.weight.mul_(factor)


def test_what_overflows_under_autocast_is_searched_all_the_same() -> None:
    torch.manual_seed(0)
    model = Overflowing().eval()
    fast = made(model, amp_dtype=torch.float16, keep=["keep-fp32"])
    assert lanes_of(fast.report) == {"first": "amp", "second": "amp"}, fast.report.notes
    assert any(name.startswith("keep-fp32") for name in fast.report.regions["first"].lanes["amp"].passes)


class Returning(nn.Module):
    """Returns its input beside features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The features, and the input as it is."""
        return self.conv(x), x


class Passing(nn.Module):
    """Gives what a submodule gives back of its input, and features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Returning()

    def forward(self, x: Tensor) -> list[Tensor]:
        """The input, and the features."""
        y, same = self.body(x * 1)
        return [same, y * (1 + int(y.sum().item() > 1e9))]


def test_what_is_given_back_as_it_is_stays_exact() -> None:
    model = Passing().eval()
    fast = made(model)
    assert lanes_of(fast.report) == {"body": "amp"}, fast.report.notes
    with torch.no_grad():
        (same, y), (expected, exact) = fast(X), model(X)
    assert torch.equal(same, expected)
    assert not torch.allclose(y, exact, rtol=1e-5, atol=1e-6)
