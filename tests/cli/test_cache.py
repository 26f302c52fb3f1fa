"""`ampopt cache`: what it counts, what it removes, and what it says where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_app import call


def test_the_cache_is_told_and_cleared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", "")
    assert "there is no cache" in call("cache").stdout
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    (tmp_path / f"{'a' * 64}.json").write_text("x" * 2048)
    assert call("cache").stdout.endswith(": 1, 2 KiB\n")
    assert call("cache", "--clear").stdout.endswith(": 1\n")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_listed_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path / "file"))
    for options in ((), ("--clear",)):
        found = call("cache", *options)
        assert (found.exit_code, found.stdout) == (1, "")
        assert "cannot be listed" in found.stderr
