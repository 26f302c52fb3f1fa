"""A row of the ledger: what it holds, and that any reader of JSON takes it."""

from __future__ import annotations

import json
import math

import pytest

from ampopt.ir.lanes import LANES
from ampopt.ir.transform import Declined
from ampopt.measure.entry import ORIGINAL, Entry, Timing, Verdict, finite
from ampopt.measure.sampling import Gain, Measurement

FOUR_MS, TWO_MS = Measurement((4e-3,) * 3), Measurement((2e-3,) * 3)


def test_a_row_of_a_pass_that_was_never_tried_has_nulls() -> None:
    assert Entry("fp32", "it", Verdict.NOT_TRIED, "no time").to_dict() == {
        "lane": "fp32",
        "pass": "it",
        "verdict": "not tried",
        "reason": "no time",
        "rewrites": 0,
        "declined": [],
        "hints": [],
        "before": None,
        "after": None,
        "gain": None,
        "error": None,
        "limit": None,
        "memory_bytes": None,
        "apply_s": 0.0,
        "took_s": 0.0,
        "needs_s": None,
    }


def test_everything_that_was_found_is_in_the_row() -> None:
    row = Entry(
        "amp", "it", Verdict.KEPT, "faster",
        rewrites=3,
        declined=(Declined("conv", "its weight is computed"),),
        hints=("a hint", "another"),
        before=Timing(FOUR_MS, TWO_MS),
        after=Timing(TWO_MS),
        gain=Gain(2.0, 1.9, 2.1),
        error=1e-7,
        limit=1e-5,
        memory=2**20,
        seconds=1.23456,
        took_s=9.87654,
    ).to_dict()  # fmt: skip
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert (row["verdict"], row["rewrites"], row["memory_bytes"]) == ("kept", 3, 2**20)
    assert row["declined"] == [{"node": "conv", "reason": "its weight is computed"}]
    assert row["hints"] == ["a hint", "another"]
    assert row["gain"] == {"ratio": 2.0, "low": 1.9, "high": 2.1}
    assert (row["error"], row["limit"]) == (1e-7, 1e-5)
    assert (row["apply_s"], row["took_s"]) == (1.235, 9.877)
    assert (row["before"]["latency"]["p50_ms"], row["before"]["device"]["p50_ms"]) == (4.0, 2.0)
    assert (row["after"]["latency"]["p50_ms"], row["after"]["device"]) == (2.0, None)


@pytest.mark.parametrize("error", [math.inf, -math.inf, math.nan])
def test_an_error_that_is_no_number_is_null_in_json(error: float) -> None:
    row = Entry("fp32", "it", Verdict.REVERTED, "NaN", error=error, limit=error).to_dict()
    assert (row["error"], row["limit"]) == (None, None)
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("number", [None, 0.0, -1.5, 1e-320])
def test_finite_numbers_stay_as_they_are(number: float | None) -> None:
    assert finite(number) is number


def test_a_lane_cannot_be_mistaken_for_the_original() -> None:
    assert ORIGINAL not in LANES
