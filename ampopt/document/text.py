"""Renders a document as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable

from ampopt.document.model import Document, Facts, Part, Points, Table, Tone
from ampopt.document.printable import safe_text

TEXT_WIDTH = 150
"""The width of plain text, in characters."""

STYLES: dict[Tone, str] = {
    "plain": "",
    "good": "green",
    "warn": "yellow",
    "bad": "red",
    "note": "magenta",
    "faint": "dim",
}
"""The tones in a terminal."""


def to_text(document: Document) -> str:
    """The document as plain text, without its plots."""
    console = Console(file=io.StringIO(), width=TEXT_WIDTH, force_terminal=False, force_jupyter=False)
    console.print(to_rich(document))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def to_rich(document: Document) -> Group:
    """The document for a terminal, whose width it keeps to."""
    parts: list[RenderableType] = [safe_text(document.title, style="bold"), safe_text(document.subtitle)]
    parts.append(safe_text(document.verdict, style=f"bold {STYLES[document.tone]}".strip()))
    for figure in document.figures:
        note = f" ({figure.note})" if figure.note else ""
        parts.append(safe_text(f"  {figure.label}: {figure.value}{note}"))
    for section in document.sections:
        shown = [each for part in section.parts for each in _rich(part)]
        if shown:
            parts += [safe_text(f"\n{section.heading}", style="bold"), *shown]
    return Group(*parts)


def _rich(part: Part) -> Iterator[RenderableType]:
    """A part's lines; what strangers' texts hold is no markup."""
    if isinstance(part, Table):
        table = RichTable(box=None, header_style="bold", pad_edge=False)
        for place, column in enumerate(part.columns):
            side: Literal["left", "right"] = "right" if column.is_number else "left"
            table.add_column(safe_text(column.name), overflow="fold", justify=side, no_wrap=place == 0)
        for row in part.rows:
            table.add_row(*(safe_text(each.text, style=STYLES[each.tone]) for each in row))
        yield table
    elif isinstance(part, Facts):
        for name, value in part.pairs:
            yield Padding(safe_text(f"{name}: {value}"), (0, 0, 0, 2))
    elif isinstance(part, Points):
        for line in part.lines:
            yield Padding(safe_text(f"- {line}"), (0, 0, 0, 2))
