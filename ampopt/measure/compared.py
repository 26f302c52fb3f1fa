"""What `ampopt.compare` found: a row for each pass, lane and mode, as JSON data and as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ampopt.measure.report import cell, interval
from ampopt.measure.sampling import Gain, Measurement

MODES = ("alone", "cumulative", "left out")

NOTHING = "nothing to do"
"""The beginning of the reason in rows of passes that change nothing; in tables it is all of it."""

LEGEND = (
    "Median latency in ms and the factor that the pass brings (above 1: it helps) with its interval; "
    'where that holds 1 there is "no difference", and where it is too wide the machine is too busy.'
)


@dataclasses.dataclass(frozen=True)
class ComparedPass:
    """One pass in one lane and one mode: median latency and gain over the mode's baseline, or a reason.

    The gain's interval is that of `headline.sure_gain`.

    The baseline is the captured program for "alone", the program one pass earlier for "cumulative", and for
    "left out" the program *without* the pass, so that a gain above 1 always means that the pass helps.
    """

    lane: str
    mode: str
    name: str
    latency: Measurement | None
    gain: Gain | None
    error: float | None
    reason: str = ""

    def told(self) -> str:
        """The row as a cell of a table."""
        if self.latency is None or self.gain is None:
            return NOTHING if self.reason.startswith(NOTHING) else self.reason
        reason = f" {self.reason}" if self.reason else ""
        return f"{1e3 * self.latency.median:.3f} ({_factor(self.gain)}){reason}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`. `print` it for a table."""

    model: str
    environment: dict[str, str]
    inputs: tuple[str, ...]
    rows: tuple[ComparedPass, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON data, times in milliseconds."""
        return {
            "model": self.model,
            "environment": self.environment,
            "inputs": list(self.inputs),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 2),
            "rows": [
                {
                    **dataclasses.asdict(row),
                    "latency": None if row.latency is None else row.latency.to_dict(),
                }
                for row in self.rows
            ],
        }

    def to_markdown(self) -> str:
        """A Markdown table for each lane: a row for each pass, a column for each mode."""
        lines = [self._heading(), ""]
        for note in self.notes:
            lines += [f"note: {note}", ""]
        for lane, rows in self._tables():
            lines += [f"**{lane}**", "", "| pass | " + " | ".join(MODES) + " |", "|---" * 4 + "|"]
            lines += ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
            lines.append("")
        lines.append(LEGEND)
        return "\n".join(lines) + "\n"

    def to_rich(self) -> Group:
        """The same tables for a terminal, whose width they keep to."""
        parts: list[Table | Text] = [Text(self._heading(), style="bold")]
        parts += [Text(f"note: {note}") for note in self.notes]
        for lane, rows in self._tables():
            table = Table(box=None, title=lane, title_justify="left", header_style="bold", pad_edge=False)
            for column in ("pass", *MODES):
                table.add_column(column, overflow="fold", no_wrap=column == "pass")
            for row in rows:
                table.add_row(*map(Text, row))  # what an exception says is no markup
            parts += [Text(), table]
        return Group(*parts, Text(), Text(LEGEND))

    def _heading(self) -> str:
        return f"{self.model} on {self.environment['device']}, inputs {', '.join(self.inputs)}"

    def _tables(self) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
        """Each lane with its rows: a pass's name, and a cell for each mode."""
        found = {(row.lane, row.name, row.mode): row.told() for row in self.rows}
        for lane in dict.fromkeys(row.lane for row in self.rows):
            names = dict.fromkeys(row.name for row in self.rows if row.lane == lane)
            yield lane, [(name, *(found.get((lane, name, mode), "–") for mode in MODES)) for name in names]

    def __str__(self) -> str:
        return self.to_markdown()


def _factor(gain: Gain) -> str:
    """What may be said of a gain in a cell of the table."""
    if gain.is_vague:
        return f"too busy to tell: {interval(gain)}"
    if gain.at_least > 1 or gain.is_loss:
        return f"{gain.ratio:.2f}x, {interval(gain)}"
    return f"no difference: {interval(gain)}"
