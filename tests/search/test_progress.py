"""The progress line tells what is being done, as it is, and only where somebody looks."""

from __future__ import annotations

import io
import sys

import pytest

from ampopt.search.progress import progress_line
from ampopt.search.trials import silent


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_name_with_brackets_is_shown_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
    with progress_line(None, 0.0, 60.0) as tell:
        tell("fp32", "mine [/b] [bold]")
    assert tell is not silent
    assert "fp32: mine [/b] [bold] · " in terminal.getvalue()


@pytest.mark.parametrize("shown", [False, None])
def test_nothing_is_shown_where_nobody_looks(shown: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    with progress_line(shown, 0.0, 60.0) as tell:
        tell("fp32", "compile")
    assert said.getvalue() == ""
