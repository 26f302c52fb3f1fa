"""The output of `ampopt passes`: a table of all passes, or one pass's proof and options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ampopt.ir.pass_text import dashed, distribution, installed, value_text
from ampopt.ir.transform import Pass
from ampopt.passes import PIPELINE
from ampopt.search.named_passes import by_name, of_others

COLUMNS = ("name", "family", "numerics", "portability", "summary")


def rows() -> list[dict[str, Any]]:
    """The passes of ampopt in order, then those of installed packages, which are not imported."""
    found = [_row(step) for step in PIPELINE]
    for name, entry in sorted(of_others(installed()).items()):
        summary = f"of {distribution(entry)}: tried where --passes names it"
        found.append({**dict.fromkeys(COLUMNS, ""), "name": name, "summary": summary})
    return found


def table(found: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table for a terminal."""
    made = Table(*COLUMNS, box=None, header_style="bold", pad_edge=False)
    for row in found:
        made.add_row(*(row[column] for column in COLUMNS))
    return made


def details(name: str) -> dict[str, Any]:
    """One pass with its proof and the defaults of its options. Raises InputError for an unknown pass."""
    step = by_name(name)
    options = {dashed(field.name): getattr(step, field.name) for field in dataclasses.fields(step)}
    return {**_row(step), "proof": inspect.cleandoc(type(step).__doc__ or ""), "options": options}


def page(name: str) -> str:
    """The details of one pass as text."""
    found = details(name)
    facts = ", ".join(found[column] for column in COLUMNS[1:4])
    options = [f"  {option}={value_text(value)}" for option, value in found["options"].items()]
    lines = [f"{name} ({facts})", "", found["proof"], "", "Options:", *(options or ["  none"])]
    return "\n".join(lines)


def _row(step: Pass) -> dict[str, Any]:
    kind = "portable" if step.portable else "native"
    return dict(
        zip(COLUMNS, (step.name, step.family.value, step.numerics.value, kind, step.summary), strict=True)
    )
