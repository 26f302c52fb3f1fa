"""Shows a ledger in a terminal, or as plain text: the verdict first, then what each pass did."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ampopt.document.printable import safe_text
from ampopt.measure.entry import Entry, Verdict
from ampopt.measure.report import COLUMNS, row, summary_lines

if TYPE_CHECKING:
    from ampopt.measure.ledger import Ledger

_STYLES = {
    Verdict.KEPT: "green",
    Verdict.REVERTED: "yellow",
    Verdict.DECLINED: "dim",
    Verdict.FAILED: "red",
    Verdict.NOT_TRIED: "magenta",
}
_WITHOUT_RESULT = (Verdict.DECLINED, Verdict.NOT_TRIED)

WIDE, MEDIUM = 130, 100
"""From these widths on, in characters, a table has all columns, and all but the device's clock."""

LEFT_OUT_BELOW = {WIDE: ("device ms",), MEDIUM: ("latency ms", "took")}
"""The columns that a table has no room for below a width."""

TEXT_WIDTH = 170
"""The width of plain text, in characters."""


class _Rows:
    """A table of entries with the columns for which there is room."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Called by rich."""
        missing = {
            name for width, names in LEFT_OUT_BELOW.items() for name in names if options.max_width < width
        }
        shown = [place for place, name in enumerate(COLUMNS) if name not in missing]
        is_narrow = options.max_width < MEDIUM
        table = Table(box=None, header_style="bold", pad_edge=False)
        for place in shown:
            name = COLUMNS[place]
            folds = name == "why" or (name == "pass" and is_narrow)
            table.add_column(name, overflow="fold", no_wrap=not folds, ratio=None if name != "why" else 1)
        for entry in self._entries:
            cells = row(entry)
            # what an exception says is no markup
            table.add_row(*(safe_text(cells[place]) for place in shown), style=_STYLES[entry.verdict])
        yield table


def to_rich(ledger: Ledger, *, everything: bool = False) -> Group:
    """The summary and the table for a terminal.

    Passes that were declined or not tried for the same reason share one line; with `everything`, each has
    its row. Parts of a model follow the whole.
    """
    lines = summary_lines(ledger)
    parts: list[RenderableType] = [
        safe_text(line, style=_style(line)) for line in lines if not _is_note(line)
    ]
    rows = [entry for entry in ledger.entries if everything or entry.verdict not in _WITHOUT_RESULT]
    if rows:
        parts += [Text(), _Rows(rows)]
    if not everything:
        parts += [safe_text(line, style="dim") for line in _together(ledger.entries)]
    if notes := [safe_text(line) for line in lines if _is_note(line)]:
        parts += [Text(), *notes]
    for name, region in ledger.regions.items():
        parts += [safe_text(f"\nsubmodule {name}", style="bold"), to_rich(region, everything=everything)]
    return Group(*parts)


def _together(entries: Sequence[Entry]) -> list[str]:
    """What has no result, a line for each lane, verdict and reason."""
    names: dict[tuple[str, str, str], dict[str, None]] = {}
    for entry in entries:
        if entry.verdict in _WITHOUT_RESULT:
            lane, name, verdict, *_, why = row(entry)
            names.setdefault((lane, verdict, why), {})[name] = None
    return [f"{lane} {verdict}: {', '.join(found)}: {why}" for (lane, verdict, why), found in names.items()]


def _is_note(line: str) -> bool:
    return line.startswith("note: ")


def _style(line: str) -> str:
    if "REFUSED" in line:
        return "bold red"
    return "bold" if line.startswith("result: ") else ""


def to_text(ledger: Ledger) -> str:
    """The summary and the table as plain text."""
    return as_text(to_rich(ledger), TEXT_WIDTH)


def as_text(shown: RenderableType, width: int) -> str:
    """What rich shows as plain text of a width in characters, without blanks at the ends of lines."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False, force_jupyter=False)
    console.print(shown)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())
