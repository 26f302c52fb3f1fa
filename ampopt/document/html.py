"""Renders a document as HTML: one file that needs nothing else, or a fragment for a notebook."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path

from ampopt.document.model import Document, Plot
from ampopt.document.printable import printable
from ampopt.errors import MissingExtraError, need

TEMPLATES = Path(__file__).parent / "templates"


def to_html(document: Document) -> str:
    """The document as a whole page, which loads nothing.

    Raises MissingExtraError without Jinja2 and Matplotlib.
    """
    return _rendered("page.html", document, _drawer())


def to_fragment(document: Document) -> str | None:
    """The document for a notebook's cell: without scripts, and without plots where there is no Matplotlib.

    None without Jinja2: the notebook then shows text.
    """
    has_plots = importlib.util.find_spec("matplotlib") is not None
    try:
        return _rendered("fragment.html", document, _drawer() if has_plots else _nothing)
    except MissingExtraError:
        return None


def _nothing(_: Plot) -> str:
    return ""


def _drawer() -> Callable[[Plot], str]:
    """Draws a document's plots, of which each has ids of its own."""
    need("matplotlib", "report")
    from ampopt.document.plots import to_svg

    count = itertools.count()
    return lambda plot: to_svg(plot, salt=f"plot{next(count)}")


def _rendered(template: str, document: Document, draw: Callable[[Plot], str]) -> str:
    jinja2 = need("jinja2", "report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,  # names and messages come from strangers
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [section for section in document.sections if section.parts]
    rendered: str = environment.get_template(template).render(document=document, sections=sections, draw=draw)
    return printable(rendered)
