"""The ledger as JSON, and its reports as text and Markdown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ampopt.document.markdown import to_markdown
from ampopt.ir.transform import Declined
from ampopt.measure.entry import ORIGINAL, Entry, Timing, Verdict
from ampopt.measure.headline import Load
from ampopt.measure.ledger import LaneSummary, Ledger
from ampopt.measure.report import COLUMNS
from ampopt.measure.sampling import Gain, Measurement
from ampopt.measure.terminal import to_text


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
        "fp32": LaneSummary(
            "fp32", "float32", measured(4), 1e-7, measured(2), 1e-7, ("fold-conv-bn",),
            gain=Gain(2.0, 1.8, 2.2),
        ),
        "amp": LaneSummary(
            "amp", "float16", measured(3), 1e-3, measured(1), 2e-2, (), refused="too far off",
            gain=Gain(1.0, 0.99, 1.01),
        ),
    }  # fmt: skip
    parts: dict[str, Any] = {
        "baseline": measured(4),
        "entries": entries,
        "lanes": lanes,
        "chosen": "fp32",
        "gain": Gain(2.1, 1.9, 2.3),
    } | changes
    return Ledger("Net", {"device": "a CPU"}, ("float32[1, 3, 8, 8] on cpu",), **parts)


def test_the_ledger_is_json() -> None:
    found = json.loads(json.dumps(ledger(notes=["a note"]).to_dict()))
    assert found["speedup"] == 1.9
    assert found["gain"] == {"ratio": 2.1, "low": 1.9, "high": 2.3}
    assert found["lanes"]["fp32"]["gain"] == {"ratio": 2.0, "low": 1.8, "high": 2.2}
    assert found["baseline"]["p99_ms"] is None
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
    assert "## Submodule backbone: All passes\n" in to_markdown(whole.document())


@pytest.mark.parametrize(
    ("changes", "speedup"),
    [
        ({}, 1.9),
        ({"chosen": ORIGINAL}, 1.0),
        ({"gain": None}, None),
        ({"chosen": None}, None),
        ({"gain": Gain(1.2, 0.9, 1.3)}, 1.0),
        ({"gain": Gain(2.55, 1.02, 6.0)}, 1.0),
        ({"gain": Gain(0.9, 0.8, 0.95)}, 1.0),
    ],
)
def test_the_speedup_is_what_the_result_gains_at_least(changes: Any, speedup: float | None) -> None:
    assert ledger(**changes).speedup == speedup


@pytest.mark.parametrize("write", [str, to_text])
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
        "→ fp32 (float32): eager 4.000 ms, optimized 2.000 ms, at least 1.80x faster than eager "
        "(2.00x in the median, 1.80 to 2.20); error 1.0e-07, eager's 1.0e-07",
        "optimized 1.000 ms, no difference from eager (1.00x in the median, 0.99 to 1.01)",
        "no pass helped",
        "REFUSED: too far off",
        "result: fp32 lane, at least 1.90x faster than as you call it now "
        "(2.10x in the median, 1.90 to 2.30)",
        "note: something to know",
        "took 3.2 s",
    ):
        assert part in " ".join(text.split())
    assert "p99" not in text


def test_a_p99_is_told_where_enough_samples_know_it() -> None:
    many = Measurement((0.004,) * 100)
    assert "as you call it now: 4.000 ms (p99 4.000 ms)" in to_text(ledger(baseline=many))


VAGUE = Gain(2.55, 0.9, 6.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gain": Gain(1.0, 0.98, 1.02)}, "fp32 lane, no difference from as you call it now (1.00x in the"),
        ({"gain": Gain(1.01, 1.001, 1.02)}, "fp32 lane, no difference from as you call it now (1.01x in the"),
        ({"gain": Gain(0.9, 0.85, 0.95)}, "fp32 lane, slower than as you call it now (0.90x in the median"),
        ({"gain": Gain(1.999, 1.999, 2.001)}, "at least 1.99x faster than as you call it now (2.00x in the "
         "median, 1.99 to 2.01)"),
        ({"gain": VAGUE, "load": Load(11.0, 2)}, "fp32 lane, the machine is too busy to tell whether it is "
         "faster than as you call it now (2.55x in the median, 0.90 to 6.00; load average 11.0 on 2 cores)"),
        ({"gain": VAGUE, "load": Load(0.5, 2)}, "the times vary too much to tell whether it is faster than "
         "as you call it now (2.55x in the median, 0.90 to 6.00; load average 0.5 on 2 cores)"),
        ({"gain": Gain(2.4, 1.71, 3.08), "load": Load(1.8, 2)}, "fp32 lane, the times vary too much to tell "
         "by how much it is faster than as you call it now (2.40x in the median, 1.71 to 3.08; load "),
        ({"gain": VAGUE}, "the times vary too much to tell whether it is faster than as you call it now "
         "(2.55x in the median, 0.90 to 6.00)"),
    ],
)  # fmt: skip
def test_the_headline_says_no_more_than_was_measured(changes: Any, said: str) -> None:
    found = ledger(**changes)
    (line,) = [line for line in " ".join(to_text(found).split("\n")).split("  ") if "result: " in line]
    assert said in line
    assert said in found.document().verdict.replace("fp32 lane: ", "fp32 lane, ")


def test_markdown_tables_are_whole() -> None:
    tables = to_markdown(ledger().document()).partition("## All passes\n")[2].splitlines()
    lines = [line for line in tables if line.startswith("|")]
    assert len(lines) == 2 + len(ledger().entries)
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(COLUMNS) + 2}


def test_where_the_original_answers_the_report_says_so() -> None:
    assert "result: the original model" in to_text(ledger(chosen=ORIGINAL))


def test_an_empty_ledger_can_be_printed() -> None:
    assert "Net on ?" in str(Ledger("Net", {}, ()))
