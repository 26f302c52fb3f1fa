"""Renders a document in the format that a file's suffix names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ampopt.document.html import to_html
from ampopt.document.markdown import to_markdown
from ampopt.document.model import Document
from ampopt.document.text import to_text
from ampopt.errors import InputError, require


def to_json(document: Document) -> str:
    """The document's data as JSON."""
    return json.dumps(finite(document.data), indent=2, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: these become null."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


FORMATS: dict[str, Callable[[Document], str]] = {
    ".html": to_html,
    ".md": to_markdown,
    ".json": to_json,
    ".txt": to_text,
}
"""What renders a document, by a file's suffix."""


def render(document: Document, path: Path) -> str:
    """The content of the file `path`. Raises what `check_report` raises."""
    check_report(path)
    return FORMATS[path.suffix.lower()](document)


def check_report(path: Path) -> None:
    """Raise InputError for a suffix of no known format, and MissingExtraError for a package that it needs."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise InputError(
            f"{path}: {f'{suffix} is no format' if suffix else 'a name without a suffix names no format'} "
            f"of a report: choose a name that ends in {', '.join(FORMATS)}"
        )
    for package in ("jinja2", "matplotlib") if suffix == ".html" else ():
        require(package, "report")
