"""Parts whose engines have threads of their own: where the whole shows that, they are made without."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ampopt
from ampopt.measure.headline import Compared
from ampopt.measure.ledger import LaneSummary, Ledger
from ampopt.measure.sampling import Gain, Measurement
from ampopt.search import regions
from ampopt.search.options import Options
from ampopt.search.regions import (
    CONTENDED,
    FIRST_SHARE,
    LITTLE,
    LITTLE_TIME,
    MOST_BETWEEN,
    THREADS_OF_THEIR_OWN,
)
from tests.search.test_regions import Branching

pytestmark = pytest.mark.usefixtures("quick")
X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)).abs()
PART_S, REST_S = 0.02, 0.01
FAST_S = 0.1 * PART_S


def times(seconds: float) -> Measurement:
    return Measurement((seconds,) * 6)


class Searches:
    """Stands in for the searches of parts: each finds `bright` with the passes that come next."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *passes: tuple[str, ...], compared: Sequence[Compared]
    ) -> None:
        self.passes, self.compared = [*passes], [*compared]
        self.excluded: list[set[str]] = []
        self.precisions: list[str] = []
        self.shares: list[float] = []
        monkeypatch.setattr(regions, "PartsSearch", self.begin)
        monkeypatch.setattr(regions, "seconds_of_a_call", lambda *_: PART_S)
        owner = "ampopt.search.regions.PartwiseOptimizer"
        monkeypatch.setattr(f"{owner}._compared", lambda *_: self.compared.pop(0))
        monkeypatch.setattr(f"{owner}._optimize_between", lambda _: False)

    def begin(
        self,
        check: object,
        model: object,
        parts: object,
        took: object,
        call_s: float,
        options: Options,
        **_: Any,
    ) -> Any:
        self.excluded.append({*options.exclude})
        self.precisions.append(options.precision)
        lane = LaneSummary("fp32", "float32", times(PART_S), None, times(FAST_S), 0.0, self.passes.pop(0))
        report = Ledger("Branching", {}, (), lanes={"fp32": lane}, chosen="fp32")
        return SimpleNamespace(
            modules={}, reports={"bright": report}, notes=[f"of search {len(self.excluded)}"],
            lower=SimpleNamespace(lanes={}, compared=None), run=self.run,
        )  # fmt: skip

    def run(self, seconds: float, _: float) -> bool:
        self.shares.append(seconds)
        return False


def optimize(**options: Any) -> Ledger:
    return ampopt.optimize(Branching().eval(), X, precision="fp32", progress=False, **options).report


def found(after_s: float, gain: float = 2.0) -> Compared:
    """The whole's time with the parts that were found first."""
    return Compared(times(PART_S + REST_S), times(after_s), Gain(gain, gain, gain), None)


def decided(ratio: float) -> Compared:
    return Compared(times(ratio), times(1.0), Gain(ratio, ratio, ratio), None)


CONTENDING = REST_S + FAST_S + PART_S
PROMISED = REST_S + FAST_S


@pytest.mark.parametrize("engine", THREADS_OF_THEIR_OWN)
@pytest.mark.parametrize("whole", [found(CONTENDING), found(PROMISED, gain=1.0)], ids=["slow", "no gain"])
def test_where_the_whole_is_slower_than_its_parts_promise_they_are_made_without_such_engines(
    monkeypatch: pytest.MonkeyPatch, whole: Compared, engine: str
) -> None:
    searches = Searches(monkeypatch, ("a", engine), ("b",), compared=[whole, decided(2.0)])
    report = optimize(exclude=("degroup",))
    assert searches.excluded == [{"degroup"}, {"degroup", *THREADS_OF_THEIR_OWN}]
    assert report.regions["bright"].lanes["fp32"].passes == ("b",)
    assert "of search 2" in report.notes
    assert "of search 1" not in report.notes
    assert any(
        "get into each other's way with PyTorch's: the whole is 2.00x faster" in n for n in report.notes
    )


def test_what_is_no_faster_in_the_whole_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = Searches(monkeypatch, ("onnx-runtime",), ("b",), compared=[found(CONTENDING), decided(1.0)])
    report = optimize()
    assert len(searches.excluded) == 2
    assert report.regions["bright"].lanes["fp32"].passes == ("onnx-runtime",)
    assert "of search 1" in report.notes
    assert "of search 2" not in report.notes


@pytest.mark.parametrize(
    ("passes", "after_s"),
    [(("onnx-runtime",), PROMISED * (CONTENDED - 0.01)), (("compile",), CONTENDING)],
    ids=["as promised", "no such engine"],
)
def test_they_are_not_searched_again_without_evidence(
    monkeypatch: pytest.MonkeyPatch, passes: tuple[str, ...], after_s: float
) -> None:
    searches = Searches(monkeypatch, passes, compared=[found(after_s)])
    optimize()
    assert searches.excluded == [set()]
    assert len(searches.shares) == 1


def test_time_is_kept_for_the_second_search_only_where_there_may_be_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = []
    for exclude in ((), THREADS_OF_THEIR_OWN):
        searches = Searches(monkeypatch, ("compile",), compared=[])
        optimize(exclude=exclude, budget_s=1000.0)
        shares += searches.shares
    assert shares[0] / shares[1] == pytest.approx(FIRST_SHARE, rel=0.05)


@pytest.mark.parametrize(("call_s", "share"), [(0.9, FIRST_SHARE), (1.1, 1.0)])
def test_long_calls_keep_no_time_for_a_second_search(
    call_s: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = []
    for exclude in ((), THREADS_OF_THEIR_OWN):
        searches = Searches(monkeypatch, ("onnx-runtime",), compared=[found(PROMISED)])
        monkeypatch.setattr(regions, "seconds_of_a_call", lambda *_: call_s)
        optimize(exclude=exclude, budget_s=1000.0)
        shares += searches.shares
    assert shares[0] / shares[1] == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize(("call_s", "end_s"), [(0.1, 900.0), (10.0, 550.0)])
def test_time_is_left_for_the_last_comparison_of_long_calls(
    call_s: float, end_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = Searches(monkeypatch, ("compile",), compared=[])
    monkeypatch.setattr(regions, "seconds_of_a_call", lambda *_: call_s)
    optimize(exclude=THREADS_OF_THEIR_OWN, budget_s=1000.0)
    assert searches.shares == [pytest.approx(end_s, rel=0.05)]


def test_parts_that_take_little_of_a_call_are_made_without_such_engines_at_once_and_get_little_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares, excluded, precisions = [], [], []
    for call_s in (PART_S / LITTLE / 0.9, PART_S / LITTLE / 1.1):
        searches = Searches(monkeypatch, ("compile",), compared=[])
        took = iter((call_s, PART_S))
        monkeypatch.setattr(regions, "seconds_of_a_call", lambda *_, took=took: next(took))
        ampopt.optimize(Branching().eval(), X, budget_s=1000.0, progress=False)
        shares += searches.shares
        excluded += searches.excluded
        precisions += searches.precisions
    assert excluded == [{*THREADS_OF_THEIR_OWN}, set()]
    assert precisions == ["fp32", "auto"]
    assert shares[0] / shares[1] == pytest.approx(LITTLE_TIME / (1 - MOST_BETWEEN) / FIRST_SHARE, rel=0.05)
