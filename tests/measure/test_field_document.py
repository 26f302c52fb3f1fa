"""The report of verify as a document: every test, the latencies, and a verdict that is the judgment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ampopt.document.html import to_html
from ampopt.document.markdown import to_markdown
from ampopt.document.model import Document, Lines
from ampopt.measure.field_document import to_document
from ampopt.measure.field_test import FieldReport, Latencies

PROMISED: Mapping[str, Any] = {"p50_ms": 5.0, "p99_ms": 9.0}


def made(missed: int = 0, slow_ms: float = 5.0, *, strict: bool = False) -> Document:
    """The document of a field test of 300 frames."""
    paced, back_to_back = Latencies((5.0,) * 300), Latencies((slow_ms,) * 300)
    found = FieldReport(30.0, 33.0, 9.0, paced, back_to_back, missed, 0, 0.1, 2_000_000, None)
    return to_document(
        found,
        found.judge(PROMISED, strict=strict),
        title="verify: Net",
        subtitle="robot.ampopt",
        notes=("a note",),
        facts={"backend": "onnxruntime"},
        data=found.to_dict(),
    )


@pytest.mark.parametrize(
    ("document", "tone", "said"),
    [
        (made(), "good", "passed"),
        (made(missed=2), "bad", "FAILED: 2 of 300 frames at 30 Hz missed the deadline of 33 ms"),
        (made(slow_ms=50.0), "warn", "passed, though p50 back to back is 50.000 ms where 5.000 ms"),
        (made(slow_ms=50.0, strict=True), "bad", "FAILED: p50 back to back is 50.000 ms"),
    ],
)
def test_the_verdict_is_the_judgment(document: Document, tone: str, said: str) -> None:
    assert document.tone == tone
    assert document.verdict.startswith(said)


def test_every_test_statistic_and_fact_is_in_it() -> None:
    text = to_markdown(made(slow_ms=50.0))
    for part in (
        "| passed | deadlines | all 300 frames at 30 Hz met the deadline of 33 ms |",
        "| slower than promised | p50 back to back |",
        "| at 30 Hz | 5.000 | 5.000 | 5.000 | – | 0.000 | 300 |",
        "- frames too late: 0 of 300",
        "- memory: 2 MB (peak)",
        "- a note",
        "- backend: onnxruntime",
    ):
        assert part in text


def test_every_frame_is_drawn_beside_the_deadline() -> None:
    document = made()
    (plot,) = [p for section in document.sections for p in section.parts if isinstance(p, Lines)]
    assert [len(line.y) for line in plot.lines] == [300, 300]
    assert plot.limit == 33.0
    page = to_html(document)
    assert page.count("<svg") == 1
    assert ">30</text>" in page, "the axis ends below the deadline"
