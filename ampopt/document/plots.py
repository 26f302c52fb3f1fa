"""Draws a document's plots as SVG for a page: transparent, in the page's own colours, light or dark."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from ampopt.document.model import Bars, Lines, Plot, Tone, Waterfall

WIDTH, ROW, BORDER = 5.6, 0.25, 0.95
"""Width of a plot, height of a bar, and height of title and axis, in inches of 96 pixels of the page."""

SHORT = 30
"""Characters of a label that there is room for."""

INK, GRID = "#010203", "#010204"
COLOURS: dict[Tone, str] = {
    "plain": "#010205",
    "good": "#010206",
    "warn": "#010207",
    "bad": "#010208",
    "note": "#010209",
    "faint": "#01020a",
}
SERIES = ("#010205", "#010206", "#010209", "#010207", "#010208")
"""Stand-ins for the page's colours, which follow the reader's light or dark mode."""

_IN_PAGE = {
    INK: "currentColor",
    GRID: "var(--ampopt-line)",
    **{stand_in: f"var(--ampopt-{tone})" for tone, stand_in in COLOURS.items()},
}

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def to_svg(plot: Plot, *, salt: str) -> str:
    """The plot as an SVG element; `salt` makes its ids different from those of others on the page."""
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": salt}):
        figure = Figure(layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        if isinstance(plot, Waterfall):
            _waterfall(axes, plot)
        elif isinstance(plot, Bars):
            _bars(axes, plot)
        else:
            _lines(axes, plot)
        rows = len(axes.get_yticks()) if isinstance(plot, (Waterfall, Bars)) else 8
        figure.set_size_inches(WIDTH, BORDER + ROW * rows)
        axes.set_title(plot.title)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    return _for_page(file.getvalue(), plot.title)


def _digits(value: float) -> str:
    """Three digits, and all of a whole number that has more: never an exponent for thousands."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def _waterfall(axes: Any, plot: Waterfall) -> None:
    for place, span in enumerate(plot.spans):
        colour, pale = COLOURS[span.tone], 1.0 if span.is_kept else 0.4
        left, width = min(span.start, span.end), abs(span.end - span.start)
        axes.barh(place, width, left=left, height=0.6, color=colour, alpha=pale)
        axes.plot([span.end] * 2, [place - 0.38, place + 0.38], color=colour, linewidth=2)
        axes.annotate(
            f"{_digits(span.start)} → {_digits(span.end)}",
            (max(span.start, span.end), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    _rows(axes, [span.label for span in plot.spans])
    axes.set_xlim(0, 1.28 * max(max(span.start, span.end) for span in plot.spans))
    axes.set_xlabel(plot.unit)


def _bars(axes: Any, plot: Bars) -> None:
    for place, bar in enumerate(plot.bars):
        colour = COLOURS[bar.tone]
        axes.barh(place, bar.value - plot.origin, left=plot.origin, height=0.6, color=colour, alpha=0.75)
        if bar.low is not None and bar.high is not None:
            axes.plot([bar.low, bar.high], [place] * 2, color=INK, linewidth=1.4, marker="|", markersize=7)
        axes.annotate(
            _digits(bar.value),
            (max(bar.value, bar.high or bar.value, plot.origin), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    _rows(axes, [bar.label for bar in plot.bars])
    ends = [end for bar in plot.bars for end in (bar.value, bar.low, bar.high) if end is not None]
    if plot.origin:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        low, high = min(0.95, *ends), max(1.05, *ends)
        axes.set_xlim(low / 1.05, high * (high / low) ** 0.18)
        _ticks_of_factors(axes, low, high)
        axes.axvline(1, color=INK, linewidth=0.8)
    else:
        axes.set_xlim(0, 1.18 * max(ends))
    axes.set_xlabel(plot.unit)


def _ticks_of_factors(axes: Any, low: float, high: float) -> None:
    """Round factors between the ends: steps of 0.05, 0.1, … where they are near 1, powers of 2 where not."""
    if high / low > 4:
        found = [2.0**power for power in range(-20, 21)]
    else:
        step = next(s for s in (0.05, 0.1, 0.25, 0.5, 1.0) if (high - low) / s <= 7)
        found = [1 + step * k for k in range(-40, 80)]
    axes.set_xticks([tick for tick in found if low / 1.05 <= tick <= high * 1.05])


def _rows(axes: Any, labels: list[str]) -> None:
    """A row for each label, the first at the top."""
    axes.set_yticks(range(len(labels)), [_short(label) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _lines(axes: Any, plot: Lines) -> None:
    for place, line in enumerate(plot.lines):
        style = {"drawstyle": "steps-post", "marker": "o", "markersize": 4} if line.is_steps else {}
        colour = SERIES[place % len(SERIES)]
        axes.plot(line.x, line.y, label=_short(line.label), color=colour, linewidth=1.5, **style)
    if plot.limit is not None:
        axes.axhline(plot.limit, color=COLOURS["bad"], linewidth=1, linestyle="--")
    if plot.is_log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)  # it ends the scaling by what is drawn, and so comes last
    if len(plot.lines) > 1:
        axes.legend(loc="best", fontsize=8)
    axes.set_xlabel(plot.x_unit)
    axes.set_ylabel(plot.y_unit)
    axes.grid()


def _short(label: str) -> str:
    return label if len(label) <= SHORT else label[: SHORT - 1] + "…"


def _for_page(svg: str, title: str) -> str:
    """The element alone: no prolog or namespaces, colours of the page, and only ids that are referred to."""
    svg = svg[svg.index("<svg") :]
    head, _, body = svg.partition(">")
    (box,) = re.findall(r'viewBox="[\d. ]+"', head)
    for stand_in, colour in _IN_PAGE.items():
        body = body.replace(stand_in, colour)
    body = re.sub(r"<!--.*?-->|<style.*?</style>", "", body, flags=re.DOTALL)  # a style is the whole page's
    used = set(re.findall(r'(?:url\(|href=")#([\w-]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", body)
    named = title.translate({ord(sign): f"&#{ord(sign)};" for sign in "&<>\"'"})
    return f'<svg {box} role="img" aria-label="{named}">{body}'
