"""Renders a document as Markdown, such as a comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ampopt.document.model import Document, Facts, Part, Points, Table
from ampopt.document.printable import printable


def to_markdown(document: Document) -> str:
    """The document as Markdown, without its plots."""
    lines = [f"# {plain(document.title)}", "", plain(document.subtitle), ""]
    lines += [f"**{plain(document.verdict)}**", ""]
    for figure in document.figures:
        note = f" ({plain(figure.note)})" if figure.note else ""
        lines.append(f"- {plain(figure.label)}: {plain(figure.value)}{note}")
    for section in document.sections:
        shown = [each for part in section.parts if (each := list(_lines(part)))]
        if shown:
            lines += ["", f"## {plain(section.heading)}"]
            for each in shown:
                lines += ["", *each]
    return "\n".join(lines) + "\n"


_FORMATS = re.compile(r"[\\`*~]|(?<![^\W_])_|_(?![^\W_])|(?<=\])[(:]")
"""What begins code, emphasis, a link or an address by name; an underscore within a word is none."""


def plain(text: str) -> str:
    """A text in one line in which nothing formats, or begins a tag, a link or an image.

    Addresses may become links, and say where these lead; one with such characters has backslashes in it.
    """
    return _FORMATS.sub(r"\\\g<0>", printable(" ".join(text.split()))).replace("<", "&lt;")


def cell(text: str) -> str:
    """A text as a cell of a table: vertical bars are escaped, too."""
    return plain(text).replace("|", "\\|")


def _lines(part: Part) -> Iterator[str]:
    if isinstance(part, Table):
        yield "| " + " | ".join(cell(column.name) for column in part.columns) + " |"
        yield "|" + "".join("---:|" if column.is_number else "---|" for column in part.columns)
        for row in part.rows:
            yield "| " + " | ".join(cell(each.text) for each in row) + " |"
    elif isinstance(part, Facts):
        for name, value in part.pairs:
            yield f"- {plain(name)}: {plain(value)}"
    elif isinstance(part, Points):
        for line in part.lines:
            yield f"- {plain(line)}"
