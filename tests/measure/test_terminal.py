"""A report in a terminal of any width: the verdict first, and nothing of a reason is cut."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from ampopt.cli import options
from ampopt.document.markdown import to_markdown
from ampopt.document.text import to_text as document_text
from ampopt.measure.entry import Entry, Timing, Verdict
from ampopt.measure.ledger import LaneSummary, Ledger
from ampopt.measure.sampling import Gain, Measurement
from ampopt.measure.terminal import to_rich, to_text

GAIN = Gain(2.0, 1.9, 2.1)
LONG = "its error 0.013 is over the tolerance 0.01, which is what precision='auto' accepts of a lane"


def measured(milliseconds: float) -> Measurement:
    return Measurement((milliseconds / 1e3,) * 3)


def ledger(*entries: Entry, **parts: Any) -> Ledger:
    return Ledger("Net", {"device": "a CPU"}, ("float32[1] on cpu",), entries=list(entries), **parts)


def timed(name: str, verdict: Verdict = Verdict.KEPT, reason: str = "faster") -> Entry:
    before, after = Timing(measured(4), measured(3)), Timing(measured(2), measured(1))
    return Entry("fp32", name, verdict, reason, before=before, after=after, gain=GAIN, error=1e-7)


def shown(found: Ledger, width: int, *, everything: bool = False, colours: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=colours, force_jupyter=False)
    console.print(to_rich(found, everything=everything))
    return file.getvalue()


SEVERAL = ledger(
    timed("fold-conv-bn"),
    timed("the opening without layouts and kernels", Verdict.REVERTED, LONG),
    Entry("fp32", "fold-constants", Verdict.DECLINED, "there is nothing to rewrite"),
    Entry("fp32", "merge-linear-chain", Verdict.DECLINED, "there is nothing to rewrite"),
    Entry("amp", "fold-constants", Verdict.DECLINED, "there is nothing to rewrite"),
    Entry("fp32", "degroup", Verdict.NOT_TRIED, "there is nothing to rewrite"),
    Entry("fp32", "cuda-graph", Verdict.DECLINED, "there is no CUDA device"),
    lanes={"fp32": LaneSummary("fp32", "float32", measured(4), 1e-7, measured(2), 1e-7, ("fold-conv-bn",))},
    chosen="fp32",
    gain=GAIN,
    baseline=measured(4),
    notes=["a note"],
)


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (170, ["lane", "pass", "verdict", "latency", "ms", "device", "ms", "gain", "error", "took", "why"]),
        (120, ["lane", "pass", "verdict", "latency", "ms", "gain", "error", "took", "why"]),
        (80, ["lane", "pass", "verdict", "gain", "error", "why"]),
    ],
)
def test_a_table_has_the_columns_for_which_there_is_room(width: int, columns: list[str]) -> None:
    lines = shown(SEVERAL, width).splitlines()
    (head,) = [line for line in lines if line.startswith("lane ")]
    assert head.split() == columns
    assert all(len(line) <= width for line in lines)


def test_in_eighty_columns_a_reason_has_room_and_nothing_is_cut() -> None:
    text = shown(SEVERAL, 80)
    (head,) = [line for line in text.splitlines() if line.startswith("lane ")]
    assert 80 - head.index("why") >= 20
    assert "…" not in text
    start = head.index("why")
    reason = " ".join(
        line[start:].strip() for line in text.splitlines() if line.startswith(("fp32  the", "      "))
    )
    assert LONG in reason


def test_the_verdict_comes_first_and_the_notes_last() -> None:
    text = shown(SEVERAL, 100)
    order = [
        "Net on a CPU",
        "result: fp32 lane",
        "as you call it now: 4.000",
        "lane  pass",
        "declined",
        "note: a note",
    ]
    assert sorted(order, key=text.index) == order


def test_what_has_no_result_shares_a_line_by_lane_verdict_and_reason() -> None:
    lines = shown(SEVERAL, 170).splitlines()
    assert [line.strip() for line in lines if "declined" in line or "not tried" in line] == [
        "fp32 declined: fold-constants, merge-linear-chain: there is nothing to rewrite",
        "amp declined: fold-constants: there is nothing to rewrite",
        "fp32 not tried: degroup: there is nothing to rewrite",
        "fp32 declined: cuda-graph: there is no CUDA device",
    ]


def test_everything_has_a_row_on_request() -> None:
    lines = shown(SEVERAL, 170, everything=True).splitlines()
    rows = [line.split()[1] for line in lines if line.startswith(("fp32  ", "amp   "))]
    assert rows == [
        *("fold-conv-bn", "the", "fold-constants", "merge-linear-chain", "fold-constants", "degroup"),
        "cuda-graph",
    ]


def test_each_verdict_has_a_style_of_its_own_and_a_refusal_is_red() -> None:
    refused = LaneSummary("a", "float32", measured(4), 1e-7, measured(2), 1.0, (), refused="wrong")
    entries = [Entry("fp32", f"pass-{number}", verdict, "why") for number, verdict in enumerate(Verdict)]
    text = shown(ledger(*entries, lanes={"a": refused}), 170, everything=True, colours=True)
    lines = {number: line for line in text.splitlines() for number in range(5) if f"pass-{number}" in line}
    assert len({line.partition("fp32")[0] for line in lines.values()}) == len(Verdict)
    (red,) = [line for line in text.splitlines() if "REFUSED: wrong" in line]
    assert red.startswith("\x1b[1;31m")


def test_parts_of_a_model_follow_the_whole() -> None:
    inner = ledger(Entry("fp32", "inner-pass", Verdict.KEPT, "why"))
    outer = Entry("fp32", "outer-pass", Verdict.KEPT, "why")
    whole = ledger(outer, regions={"neck": ledger(regions={"neck.deep": inner})})
    text, markdown = to_text(whole), to_markdown(whole.document())
    order = ["outer-pass", "submodule neck\n", "submodule neck.deep\n", "inner-pass"]
    assert sorted(order, key=text.index) == order
    order = ["outer-pass", "## Submodule neck\n", "## Submodule neck.deep: All passes\n", "inner-pass"]
    assert sorted(order, key=markdown.index) == order


def test_plain_text_has_no_control_codes_though_the_environment_asks_for_colours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    text = to_text(ledger(Entry("fp32", "a-pass", Verdict.FAILED, "long " * 10 + "end")))
    assert "\x1b" not in text
    assert "long " * 10 + "end" in text


SAID = "no file [/b] of [torch.float32] :x:\nand more | so on"


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.DECLINED])
def test_what_an_exception_says_is_no_markup(verdict: Verdict) -> None:
    text = " ".join(to_text(ledger(Entry("fp32", "p", verdict, SAID))).split())
    assert "no file [/b] of [torch.float32] :x: and more | so on" in text


def test_in_a_notebook_the_text_is_given_back_and_not_displayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "faster" in to_text(ledger(Entry("fp32", "p", Verdict.KEPT, "faster")))


@pytest.mark.parametrize("write", [to_text, lambda found: document_text(found.document())])
def test_no_line_of_plain_text_ends_in_blanks(write: Any) -> None:
    lines = write(SEVERAL).splitlines()
    assert len(lines) > 5
    assert not [line for line in lines if line != line.rstrip()]


def test_what_is_piped_has_no_blanks_at_the_ends_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.StringIO()
    monkeypatch.setattr("sys.stdout", piped)
    options.console().print(to_rich(SEVERAL, everything=True))
    lines = piped.getvalue().splitlines()
    assert any(line.startswith("fp32") for line in lines)
    assert not [line for line in lines if line != line.rstrip()]
