"""The report of optimize as a document: the verdict first, then all that the ledger holds."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ampopt.document.html import to_html
from ampopt.document.markdown import to_markdown
from ampopt.document.model import Lines, Listing, Table, Waterfall
from ampopt.document.render import to_json
from ampopt.document.text import to_text
from ampopt.measure.entry import ORIGINAL, Entry, Timing, Verdict
from ampopt.measure.ledger import BestSoFar, Ledger, OutputError
from ampopt.measure.ledger_document import TONES
from ampopt.measure.sampling import Gain, Measurement
from tests.measure.test_ledger import ledger


def parts(found: Ledger, kind: type[Any]) -> list[Any]:
    return [part for section in found.document().sections for part in section.parts if isinstance(part, kind)]


@pytest.mark.parametrize("write", [to_markdown, to_text, to_html])
def test_every_row_verdict_note_and_fact_is_in_it(write: Any) -> None:
    found = ledger(notes=["something to know"], seconds=3.21)
    found.environment["torch"] = "2.14"
    text = " ".join(write(found.document()).split())
    for entry in found.entries:
        assert entry.name in text
        assert entry.verdict.value in text
    for told in ("a hint (and 1 more)", "too far off", "something to know", "2.14", "1.90"):
        assert told in text


def test_the_error_of_each_output_is_beside_eagers() -> None:
    output = OutputError("heat_map", (1, 1, 4, 4), 2e-6, 5e-7)
    lanes = {name: dataclasses.replace(lane, outputs=(output,)) for name, lane in ledger().lanes.items()}
    found = ledger(lanes=lanes)
    for write in (to_markdown, to_text, to_html):
        text = write(found.document())
        for told in ("heat_map", "1x1x4x4", "2.0e-06", "5.0e-07"):
            assert told in text
    told = json.loads(to_json(found.document()))["lanes"]["fp32"]["outputs"]
    assert told == [{"name": "heat_map", "shape": [1, 1, 4, 4], "error": 2e-6, "eager_error": 5e-7}]


def test_both_graphs_are_in_html_alone_and_what_differs_is_marked() -> None:
    found = ledger(graphs=(("x = input", "bn = batch_norm(x)"), ("x = input", "y = <b>(x)")))
    [before, after] = parts(found, Listing)
    assert before.lines == ("  x = input", "- bn = batch_norm(x)")
    assert after.lines == ("  x = input", "+ y = <b>(x)")
    page = to_html(found.document())
    assert '<span class="bad">- bn = batch_norm(x)</span>' in page
    assert '<span class="good">+ y = &lt;b&gt;(x)</span>' in page
    assert "<span>  x = input</span>" in page
    assert "batch_norm(x)" not in to_markdown(found.document()) + to_text(found.document())
    assert not parts(ledger(), Listing)


def test_every_verdict_has_a_tone() -> None:
    assert set(TONES) == set(Verdict)


@pytest.mark.parametrize(
    ("changes", "tone", "said"),
    [
        ({}, "good", "fp32 lane: at least 1.90x faster than as you call it now"),
        ({"chosen": ORIGINAL}, "warn", "Nothing is faster and verified"),
        ({"gain": Gain(1.0, 0.98, 1.02)}, "warn", "no difference"),
        ({"gain": Gain(2.4, 1.71, 3.08)}, "good", "too much to tell by how much it is faster"),
        ({"gain": Gain(2.4, 1.4, 3.08)}, "warn", "too much to tell whether it is faster"),
        ({"chosen": None}, "warn", "No lane was chosen"),
    ],
)
def test_the_verdict_says_no_more_than_was_measured(changes: Any, tone: str, said: str) -> None:
    found = ledger(**changes).document()
    assert found.tone == tone
    assert said in found.verdict


@pytest.mark.parametrize(
    ("gain", "label", "value"),
    [
        (Gain(2.0, 1.9, 2.1), "faster, at least", "1.90×"),
        (Gain(2.4, 1.71, 3.08), "faster", "factor unclear"),
        (Gain(2.4, 1.4, 3.08), "faster, at least", "1.00×"),
    ],
)
def test_a_figure_has_no_factor_that_was_not_told(gain: Gain, label: str, value: str) -> None:
    first = ledger(gain=gain).document().figures[0]
    assert (first.label, first.value) == (label, value)


def test_lanes_that_were_all_refused_are_a_failure() -> None:
    lanes = {name: dataclasses.replace(lane, refused="wrong") for name, lane in ledger().lanes.items()}
    found = ledger(lanes=lanes, chosen=ORIGINAL).document()
    assert found.tone == "bad"
    assert "could be verified" in found.verdict


def test_a_waterfall_has_the_passes_that_were_timed_on_each_clock() -> None:
    slow, fast = Measurement((0.004,) * 3), Measurement((0.002,) * 3)
    both = Entry("fp32", "both", Verdict.REVERTED, "", before=Timing(slow, slow), after=Timing(fast, fast))
    once = Entry("fp32", "once", Verdict.KEPT, "", before=Timing(slow), after=Timing(fast))
    never = Entry("fp32", "never", Verdict.DECLINED, "")
    latency, device = parts(ledger(entries=[both, once, never]), Waterfall)
    assert [(s.label, s.start, s.end, s.is_kept) for s in latency.spans] == [
        ("both", 4.0, 2.0, False),
        ("once", 4.0, 2.0, True),
    ]
    assert [span.label for span in device.spans] == ["both"]
    assert (latency.unit, device.unit) == ("latency of a call, ms", "device time (kernels only), ms")


def test_the_best_so_far_is_drawn_to_the_end_of_the_search() -> None:
    steps = [BestSoFar(1.0, "fp32", "one", 0.004), BestSoFar(2.0, "fp32", "two", 0.002)]
    (plot,) = parts(ledger(best_so_far=steps, seconds=9.0), Lines)
    assert plot.lines[0].x == (1.0, 2.0, 9.0)
    assert plot.lines[0].y == (4.0, 2.0, 2.0)


def test_long_tables_are_filtered_and_have_errors_beside_limits() -> None:
    (table,) = [part for part in parts(ledger(), Table) if part.is_filtered]
    names = [column.name for column in table.columns]
    assert len(table.rows) == len(ledger().entries)
    row = dict(zip(names, (cell.text for cell in table.rows[0]), strict=True))
    assert (row["error"], row["limit"]) == ("1.0e-07", "1.0e-05")


def test_its_json_is_that_of_the_ledger() -> None:
    assert json.loads(to_json(ledger().document())) == json.loads(json.dumps(ledger().to_dict()))


def test_an_empty_ledger_has_a_report_in_every_format() -> None:
    found = Ledger("Net", {}, ()).document()
    for write in (to_markdown, to_text, to_html):
        assert "No lane was chosen." in write(found)


def test_a_notebook_shows_it() -> None:
    shown = ledger()._repr_html_()
    assert shown is not None
    assert "fold-conv-bn" in shown
    assert "<script" not in shown
