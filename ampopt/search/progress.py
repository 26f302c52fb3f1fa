"""The progress line: pass, lane, elapsed time and time limit."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from ampopt.search.trials import Progress, silent


@contextlib.contextmanager
def progress_line(shown: bool | None, started: float, budget_s: float | None) -> Iterator[Progress]:
    """A callback that shows the present step in a line on standard error; the line is removed at the end.

    `shown` None: only if standard error is a terminal. A program may have none, or a logger in its place.
    `budget_s` None: the time limit is not known yet, and not shown.
    """
    is_terminal = getattr(sys.stderr, "isatty", lambda: False)
    if shown is False or sys.stderr is None or (shown is None and not is_terminal()):
        yield silent
        return
    limit = "" if budget_s is None else f" of at most {budget_s:.0f} s"
    with Console(stderr=True).status("capturing …") as status:

        def tell(lane: str, name: str) -> None:
            elapsed = time.perf_counter() - started
            status.update(Text(f"{lane}: {name} · {elapsed:.0f} s{limit}"))

        yield tell
