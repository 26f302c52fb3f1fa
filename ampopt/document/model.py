"""The parts of a report, whatever it is about: what renders them knows nothing of models or passes.

A part of a new kind is a class here, and one branch in each of `text`, `markdown` and `templates/parts.html`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Tone = Literal["plain", "good", "warn", "bad", "note", "faint"]
"""How a thing is meant: HTML and plots give each tone a colour."""


NOTHING = "–"
"""What a cell says that has nothing to say."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number that is read first: `value` in a few characters, and in `note` what it is worth."""

    label: str
    value: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table; `is_number` aligns it to the right."""

    name: str
    is_number: bool = False


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table. `value` is what sorts it, where the text does not; a `tone` makes it a badge."""

    text: str
    value: float | None = None
    tone: Tone = "plain"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of as many cells as there are columns. With `is_filtered` HTML has a field to filter them by."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    is_filtered: bool = False
    kind: Literal["table"] = "table"

    @classmethod
    def of(cls, columns: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> Table:
        """A table of texts; columns whose names end in a unit, "gain" or "error" hold numbers."""
        made = tuple(Column(name, name.endswith((" ms", " s", " MB", "gain", "error"))) for name in columns)
        cells = tuple(tuple(Cell(c) if isinstance(c, str) else c for c in row) for row in rows)
        return cls(made, cells)

    @property
    def told(self) -> Table:
        """The table without the columns in which no row says anything: those of a GPU on a CPU."""
        kept = [
            place
            for place, _ in enumerate(self.columns)
            if not self.rows or any(row[place].text not in ("", NOTHING) for row in self.rows)
        ]
        rows = tuple(tuple(row[place] for place in kept) for row in self.rows)
        return dataclasses.replace(self, columns=tuple(self.columns[place] for place in kept), rows=rows)


@dataclasses.dataclass(frozen=True)
class Facts:
    """Names with their values: an environment, settings."""

    pairs: tuple[tuple[str, str], ...]
    kind: Literal["facts"] = "facts"


@dataclasses.dataclass(frozen=True)
class Points:
    """Sentences, a point each."""

    lines: tuple[str, ...]
    kind: Literal["points"] = "points"


@dataclasses.dataclass(frozen=True)
class Span:
    """A bar from `start` to `end`: what one step changed. One that is not `is_kept` is drawn pale."""

    label: str
    start: float
    end: float
    tone: Tone = "plain"
    is_kept: bool = True


@dataclasses.dataclass(frozen=True)
class Waterfall:
    """Steps one under the other, each from its value before to its value after, on the axis `unit`."""

    title: str
    unit: str
    spans: tuple[Span, ...]
    kind: Literal["plot"] = "plot"


@dataclasses.dataclass(frozen=True)
class Bar:
    """A value with the ends of its interval, if it has one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    tone: Tone = "plain"


@dataclasses.dataclass(frozen=True)
class Bars:
    """Horizontal bars, from `origin`: 1 for factors, whose axis is then logarithmic, 0 for all else."""

    title: str
    unit: str
    bars: tuple[Bar, ...]
    origin: Literal[0, 1] = 0
    kind: Literal["plot"] = "plot"


@dataclasses.dataclass(frozen=True)
class Line:
    """A line through points; `x` and `y` are of one length. With `is_steps`, `y` holds until the next."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    is_steps: bool = False


@dataclasses.dataclass(frozen=True)
class Lines:
    """Lines in one pair of axes; `limit` is drawn across. `is_log`: both axes are logarithmic."""

    title: str
    x_unit: str
    y_unit: str
    lines: tuple[Line, ...]
    limit: float | None = None
    is_log: bool = False
    kind: Literal["plot"] = "plot"


Plot = Waterfall | Bars | Lines
"""What HTML draws. Text and Markdown leave it out: a table beside it has its numbers."""


@dataclasses.dataclass(frozen=True)
class Listing:
    """Lines in fixed width, which only HTML shows. One that begins with + is new, one with - is gone."""

    title: str
    lines: tuple[str, ...]
    kind: Literal["listing"] = "listing"


Part = Table | Facts | Points | Plot | Listing
"""A part of a section."""


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and its parts; without any it is left out. HTML shows one that `is_folded` on a click."""

    heading: str
    parts: tuple[Part, ...]
    is_folded: bool = False


@dataclasses.dataclass(frozen=True)
class Document:
    """A report: the verdict first, the figures that matter, then sections. `data` is all of it as JSON data.

    `title` names what was looked at, `subtitle` where and on what. Texts are plain: every renderer escapes
    what would be markup in its format.
    """

    title: str
    subtitle: str
    verdict: str
    tone: Tone
    sections: tuple[Section, ...]
    data: Mapping[str, Any]
    figures: tuple[Figure, ...] = ()
