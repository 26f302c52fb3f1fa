"""The progress line: pass, lane, elapsed time and time limit."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text

from ampopt.document.printable import safe_text


class ProgressLine:
    """A progress callback; `budget_s`, the time limit in seconds, may change: None is not shown."""

    def __init__(self, show: Callable[[Text], object], started: float, budget_s: float | None) -> None:
        self._show, self._started, self.budget_s = show, started, budget_s

    def __call__(self, lane: str, name: str) -> None:
        """Show what is being done in a lane."""
        limit = "" if self.budget_s is None else f" of at most {self.budget_s:.0f} s"
        self._show(safe_text(f"{lane}: {name} · {time.perf_counter() - self._started:.0f} s{limit}"))


@contextlib.contextmanager
def progress_line(shown: bool | None, started: float, budget_s: float | None) -> Iterator[ProgressLine]:
    """A callback that shows the present step in a line on standard error; the line is removed at the end.

    `shown` None: only if standard error is a terminal. A program may have none, or a logger in its place.
    `budget_s` None: the time limit is not known yet, and not shown.
    """
    is_terminal = getattr(sys.stderr, "isatty", lambda: False)
    if shown is False or sys.stderr is None or (shown is None and not is_terminal()):
        yield ProgressLine(lambda _: None, started, budget_s)
        return
    with Console(stderr=True).status("capturing …") as status:
        yield ProgressLine(status.update, started, budget_s)
