"""The ledger as JSON, and its reports as text and Markdown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ampopt.ledger import ORIGINAL, Entry, LaneSummary, Ledger, Timing, Verdict
from ampopt.report import COLUMNS, to_markdown, to_text
from ampopt.sampling import Gain, Measurement
from ampopt.transform import Declined


def measured(milliseconds: float) -> Measurement:
    return Measurement((milliseconds / 1e3,) * 3)


def ledger(**changes: Any) -> Ledger:
    """A ledger with a row of every verdict."""
    entries = [
        Entry(
            "fp32",
            "fold-conv-bn",
            Verdict.KEPT,
            "faster: 2.000x",
            rewrites=3,
            before=Timing(measured(4), measured(2)),
            after=Timing(measured(2)),
            gain=Gain(2.0, 1.9, 2.1),
            error=1e-7,
            limit=1e-5,
            hints=("a hint", "another"),
        ),
        Entry("fp32", "channels-last", Verdict.REVERTED, "slower: 0.9x", before=Timing(measured(2))),
        Entry("fp32", "wrong-one", Verdict.REVERTED, "NaN", error=float("inf"), limit=float("inf")),
        Entry("amp", "degroup", Verdict.DECLINED, "conv: a|b", declined=(Declined("conv", "a|b"),)),
        Entry("amp", "compile", Verdict.FAILED, "ValueError: no"),
        Entry("amp", "script", Verdict.NOT_TRIED, "the time budget was spent"),
    ]
    lanes = {
        "fp32": LaneSummary("fp32", "float32", measured(4), 1e-7, measured(2), 1e-7, ("fold-conv-bn",)),
        "amp": LaneSummary("amp", "float16", measured(3), 1e-3, measured(1), 2e-2, (), refused="too far off"),
    }
    parts: dict[str, Any] = {
        "baseline": measured(4),
        "entries": entries,
        "lanes": lanes,
        "chosen": "fp32",
    } | changes
    return Ledger("Net", {"device": "a CPU"}, ("float32[1, 3, 8, 8] on cpu",), **parts)


def test_the_ledger_is_json() -> None:
    found = json.loads(json.dumps(ledger(notes=["a note"]).to_dict()))
    assert found["speedup"] == 2.0
    assert [row["verdict"] for row in found["passes"]] == [
        "kept", "reverted", "reverted", "declined", "failed", "not tried",
    ]  # fmt: skip
    assert found["passes"][0]["before"]["device"]["p50_ms"] == 2.0
    assert found["passes"][0]["gain"] == {"ratio": 2.0, "low": 1.9, "high": 2.1}
    assert found["passes"][3]["declined"] == [{"node": "conv", "reason": "a|b"}]
    assert found["lanes"]["amp"]["refused"] == "too far off"
    assert found["notes"] == ["a note"]


def test_the_ledger_is_json_that_every_reader_takes() -> None:
    json.dumps(ledger().to_dict(), allow_nan=False)  # Infinity and NaN are no JSON


def test_regions_are_in_it() -> None:
    whole = ledger(regions={"backbone": ledger()})
    assert whole.to_dict()["regions"]["backbone"]["model"] == "Net"
    assert "submodule backbone" in to_text(whole)
    assert "### submodule `backbone`" in to_markdown(whole)


@pytest.mark.parametrize(
    ("changes", "speedup"),
    [({}, 2.0), ({"chosen": ORIGINAL}, 1.0), ({"baseline": None}, None), ({"chosen": None}, None)],
)
def test_the_speedup_is_over_the_model_as_its_user_calls_it(changes: Any, speedup: float | None) -> None:
    assert ledger(**changes).speedup == speedup


@pytest.mark.parametrize("write", [str, to_text, to_markdown])
def test_every_row_and_note_is_in_the_report(write: Any) -> None:
    text = write(ledger(notes=["something to know"], seconds=3.21))
    for entry in ledger().entries:
        assert entry.name in text
        assert entry.verdict.value in text
    for part in (
        *COLUMNS,
        "3 rewrites; faster: 2.000x",
        "a hint (and 1 more)",
        "4.000 → 2.000",
        "as you call it now: 4.000 ms",
        "→ fp32 (float32): eager 4.000 ms, optimized 2.000 ms, 2.00x; error 1.0e-07, eager's 1.0e-07",
        "no pass helped",
        "REFUSED: too far off",
        "result: fp32 lane, 2.00x faster than as you call it now",
        "note: something to know",
        "took 3.2 s",
    ):
        assert part in text


def test_markdown_tables_are_whole() -> None:
    lines = [line for line in to_markdown(ledger()).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(ledger().entries)
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(COLUMNS) + 1}


def test_where_the_original_answers_the_report_says_so() -> None:
    assert "result: the original model" in to_text(ledger(chosen=ORIGINAL))


def test_an_empty_ledger_can_be_printed() -> None:
    assert "Net on ?" in str(Ledger("Net", {}, ()))
