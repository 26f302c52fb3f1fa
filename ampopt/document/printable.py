"""Lets no text act on the terminal that shows it: names and messages come from strangers."""

from __future__ import annotations

import re

from rich.text import Text

_ACTING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters other than the line feed and the tabulator, ends of lines, changes of direction."""


def printable(text: str) -> str:
    """A text with its control characters written as Python writes them: `\\x1b` is four characters."""
    return _ACTING.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def safe_text(text: str, style: str = "") -> Text:
    """A printable text for a terminal, in which nothing is markup."""
    return Text(printable(text), style=style)
