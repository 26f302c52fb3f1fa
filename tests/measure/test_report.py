"""The report: its cells, its sentences, and how Markdown shows them."""

from __future__ import annotations

from typing import Any

import pytest

from ampopt.document.markdown import to_markdown
from ampopt.measure.entry import ORIGINAL, Entry, Timing, Verdict
from ampopt.measure.headline import Load
from ampopt.measure.ledger import LaneSummary, Ledger
from ampopt.measure.report import COLUMNS, interval, row, summary_lines, told
from ampopt.measure.sampling import Gain, Measurement

FASTER, BUSY = Gain(2.0, 1.8, 2.2), Load(9.0, 2)


def measured(milliseconds: float) -> Measurement:
    return Measurement((milliseconds / 1e3,) * 3)


def cells(**changes: Any) -> dict[str, str]:
    """The cells of an entry's row by their columns."""
    parts: dict[str, Any] = {
        "lane": "fp32",
        "name": "a-pass",
        "verdict": Verdict.KEPT,
        "reason": "faster",
    } | changes
    return dict(zip(COLUMNS, row(Entry(**parts)), strict=True))


def lane(name: str, **changes: Any) -> LaneSummary:
    parts: dict[str, Any] = {"eager_error": 2e-7, "error": 1e-3, "passes": ("one", "other")} | changes
    return LaneSummary(name, "float32", eager=measured(4), best=measured(2), **parts)


def ledger(**parts: Any) -> Ledger:
    return Ledger("Net", {"device": "a CPU"}, ("float32[1] on cpu", "int64[2] on cpu"), **parts)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (1.239, 1.241, "1.23 to 1.25"),
        (0.29, 1.1, "0.29 to 1.10"),
        (1.0, 1.0, "1.00 to 1.00"),
        (0.999, 1.0001, "0.99 to 1.01"),
    ],
)
def test_an_interval_is_rounded_outwards_and_hundredths_stay_as_they_are(
    low: float, high: float, said: str
) -> None:
    assert interval(Gain(1.0, low, high)) == said


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (FASTER, "at least 1.80x faster than eager (2.00x in the median, 1.80 to 2.20)"),
        (Gain(0.8, 0.75, 0.85), "slower than eager (0.80x in the median, 0.75 to 0.85)"),
        (Gain(0.8, 0.75, 1.0), "no difference from eager (0.80x in the median, 0.75 to 1.00)"),
        (Gain(1.2, 1.004, 1.3), "no difference from eager (1.20x in the median, 1.00 to 1.30)"),
    ],
)
def test_the_load_is_not_told_where_the_gain_is_known(gain: Gain, said: str) -> None:
    assert told(gain, "eager") == told(gain, "eager", BUSY) == said


def test_an_entry_that_was_never_timed_has_dashes_for_what_is_not_known() -> None:
    assert cells(verdict=Verdict.NOT_TRIED, reason="no time", took_s=1.25) == {
        "lane": "fp32",
        "pass": "a-pass",
        "verdict": "not tried",
        "latency ms": "–",
        "device ms": "–",
        "gain": "–",
        "error": "–",
        "took": "1.2 s",
        "why": "no time",
    }


def test_each_clock_is_told_where_both_programs_were_timed_by_it() -> None:
    found = cells(before=Timing(measured(4), measured(3)), after=Timing(measured(2)), gain=FASTER, error=0.0)
    assert [found[column] for column in ("latency ms", "device ms", "gain", "error")] == [
        "4.000 → 2.000", "–", "2.00x", "0.0e+00",
    ]  # fmt: skip
    both = cells(before=Timing(measured(4), measured(3)), after=Timing(measured(2), measured(1)))
    assert both["device ms"] == "3.000 → 1.000"
    assert cells(before=Timing(measured(4)))["latency ms"] == "–"


@pytest.mark.parametrize(
    ("rewrites", "hints", "why"),
    [
        (1, (), "faster"),
        (2, (), "2 rewrites; faster"),
        (0, ("first",), "faster; first"),
        (3, ("first", "second", "third"), "3 rewrites; faster; first (and 2 more)"),
    ],
)
def test_several_rewrites_and_the_first_hint_stand_by_the_reason(
    rewrites: int, hints: tuple[str, ...], why: str
) -> None:
    assert cells(rewrites=rewrites, hints=hints)["why"] == why


def test_the_summary_marks_the_chosen_lane_and_says_what_became_of_the_others() -> None:
    lanes = {
        "fp32": lane("fp32", eager_error=None, passes=(), refused="too far off"),
        "amp": lane("amp", gain=FASTER),
    }
    found = summary_lines(
        ledger(lanes=lanes, chosen="amp", gain=Gain(3.0, 2.9, 3.1), baseline=measured(6), notes=["a note"])
    )
    assert found == [
        "Net on a CPU, inputs float32[1] on cpu, int64[2] on cpu",
        "result: amp lane, at least 2.90x faster than as you call it now (3.00x in the median, 2.90 to 3.10)",
        "as you call it now: 6.000 ms",
        "  fp32 (float32): eager 4.000 ms, optimized 2.000 ms; error 1.0e-03 from eager",
        "    no pass helped",
        "    REFUSED: too far off",
        "→ amp (float32): eager 4.000 ms, optimized 2.000 ms, at least 1.80x faster than eager (2.00x in the "
        "median, 1.80 to 2.20); error 1.0e-03, eager's 2.0e-07",
        "    one + other",
        "note: a note",
    ]


@pytest.mark.parametrize(
    ("parts", "last"),
    [
        ({}, "inputs float32[1] on cpu, int64[2] on cpu"),
        ({"chosen": "amp"}, "inputs float32[1] on cpu, int64[2] on cpu"),
        ({"chosen": ORIGINAL, "gain": FASTER}, "result: the original model"),
        ({"seconds": 61.04}, "took 61.0 s"),
    ],
)
def test_the_summary_has_no_line_for_what_is_not_known(parts: dict[str, Any], last: str) -> None:
    found = summary_lines(ledger(**parts))
    assert found[-1].endswith(last)
    assert len(found) == 1 + (not found[0].endswith(last))


SAID = "no file [/b] of [torch.float32] :x:\nand more | so on"


def test_a_row_of_markdown_is_one_line() -> None:
    ledger = Ledger("Net", {}, (), entries=[Entry("fp32", "p", Verdict.FAILED, SAID, hints=("c|d",))])
    (line,) = [line for line in to_markdown(ledger.document()).splitlines() if line.startswith("| fp32")]
    assert line.endswith("| no file [/b] of [torch.float32] :x: and more \\| so on; c\\|d |")


def test_an_interval_without_an_end_is_told() -> None:
    assert interval(Gain(2.0, 1.0, float("inf"))) == "1.00 to inf"
