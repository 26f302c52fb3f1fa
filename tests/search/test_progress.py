"""The progress line tells what is being done, as it is, and only where somebody looks."""

from __future__ import annotations

import io
import sys
import time

import pytest

from ampopt.search.progress import progress_line


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_name_with_brackets_is_shown_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
    with progress_line(None, 0.0, 60.0) as tell:
        tell("fp32", "mine [/b] [bold]")
    assert "fp32: mine [/b] [bold] · " in terminal.getvalue()


@pytest.mark.parametrize(("budget_s", "limit"), [(60.0, "of at most 60 s"), (None, "")])
def test_a_time_limit_is_shown_where_it_is_known(
    budget_s: float | None, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
    with progress_line(None, time.perf_counter(), budget_s) as tell:
        tell("fp32", "compile")
    assert f"fp32: compile · 0 s {limit}".rstrip() in terminal.getvalue()
    assert ("at most" in terminal.getvalue()) == bool(limit)


def test_a_limit_that_has_changed_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where capturing has taken long there is more time."""
    monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
    with progress_line(None, time.perf_counter(), 60.0) as tell:
        tell.budget_s = 84.0
        tell("fp32", "compile")
    assert "compile · 0 s of at most 84 s" in terminal.getvalue()


@pytest.mark.parametrize("shown", [False, None])
def test_nothing_is_shown_where_nobody_looks(shown: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    with progress_line(shown, 0.0, 60.0) as tell:
        tell("fp32", "compile")
    assert said.getvalue() == ""


class _Logger:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("shown", [True, None])
@pytest.mark.parametrize("stream", [None, _Logger()])
def test_a_program_may_have_no_standard_error_or_one_that_is_no_file(
    shown: bool | None, stream: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_line(shown, 0.0, 60.0) as tell:
        tell("fp32", "compile")
