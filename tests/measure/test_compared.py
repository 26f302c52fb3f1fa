"""What compare found, as JSON data and as tables: a cell says no more than was measured."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from ampopt.document.model import Bars
from ampopt.measure.compared import MODES, ComparedPass, Comparison
from ampopt.measure.sampling import Gain, Measurement

GAIN = Gain(1.2, 1.15, 1.25)


def row(
    mode: str = "alone", gain: Gain | None = GAIN, reason: str = "", name: str = "fold-conv-bn"
) -> ComparedPass:
    measured = None if gain is None else Measurement((0.012345,) * 6)
    return ComparedPass("fp32", mode, name, measured, gain, None if gain is None else 1e-7, reason)


def comparison(*rows: ComparedPass, notes: tuple[str, ...] = ()) -> Comparison:
    return Comparison("Net", {"device": "a CPU"}, ("float32[1] on cpu",), rows, 1.234, notes)


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (Gain(1.2, 1.15, 1.25), "12.345 (1.20x, 1.15 to 1.25)"),
        (Gain(0.8, 0.75, 0.85), "12.345 (0.80x, 0.75 to 0.85)"),
        (Gain(1.3, 0.98, 1.4), "12.345 (no difference: 0.98 to 1.40)"),
        (Gain(1.004, 1.001, 1.007), "12.345 (no difference: 1.00 to 1.01)"),
        (Gain(2.55, 1.01, 6.0), "12.345 (too busy to tell: 1.01 to 6.00)"),
        (Gain(2.55, 1.51, 6.0), "12.345 (faster, too busy to tell: 1.51 to 6.00)"),
    ],
)
def test_a_cell_says_no_more_than_was_measured(gain: Gain, said: str) -> None:
    assert f"| fold-conv-bn | {said} | – | – |" in str(comparison(row(gain=gain)))


def test_a_cell_says_what_is_wrong_and_why_nothing_was_measured() -> None:
    wrong = row(reason="(output 0: error 1 is over 1e-05)")
    idle = row("cumulative", None, "nothing to do: there is no CUDA device")
    failed = row("left out", None, "failed: ValueError: one | two")
    text = str(comparison(wrong, idle, failed))
    assert "12.345 (1.20x, 1.15 to 1.25) (output 0: error 1 is over 1e-05) | nothing to do | failed" in text
    assert "failed: ValueError: one \\| two |" in text


WRONG = "(output 0: error 1 is over 1e-05)"


def test_a_pass_whose_program_is_wrong_helps_nothing_and_has_no_bar() -> None:
    slight = row("left out", Gain(1.1, 1.08, 1.12), name="degroup")
    for reason in (WRONG, f"(without it: {WRONG[1:]}"):
        verdict = comparison(row("left out", reason=reason), slight).document().verdict
        assert verdict == "1 pass helps where all others are: degroup most, at least 1.08x in the fp32 lane."
    nothing = comparison(row("left out", reason=WRONG), row(reason=WRONG)).document()
    assert nothing.verdict == f"No pass helps where all others are: what they make is wrong {WRONG}."
    assert nothing.tone == "bad"
    assert not [part for section in nothing.sections for part in section.parts if isinstance(part, Bars)]


def test_it_is_json() -> None:
    data = json.loads(json.dumps(comparison(row(), notes=("a note",)).to_dict()))
    assert (data["model"], data["notes"], data["seconds"]) == ("Net", ["a note"], 1.23)
    (found,) = data["rows"]
    assert found["latency"]["p50_ms"] == 12.345
    assert found["gain"] == {"ratio": 1.2, "low": 1.15, "high": 1.25}
    assert {"lane", "mode", "name", "error", "reason"} < set(found)


def test_a_lane_is_a_table_with_a_row_for_each_pass() -> None:
    text = comparison(*(row(mode, name=name) for mode in MODES for name in ("one", "two"))).to_markdown()
    assert "| pass | alone | cumulative | left out |\n|---|---|---|---|\n| one | 12.3" in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {5}


@pytest.mark.parametrize("width", [80, 100])
def test_in_a_terminal_the_table_keeps_to_the_width(width: int) -> None:
    rows = [row(mode, name="remove-inference-noops") for mode in MODES]
    console = Console(file=io.StringIO(), width=width)
    console.print(comparison(*rows, notes=("[no] markup",)).to_rich())
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert any("remove-inference-noops" in line and line.count("12.345 (1.20x,") == 3 for line in lines)
    assert "  - [no] markup" in [line.rstrip() for line in lines]
