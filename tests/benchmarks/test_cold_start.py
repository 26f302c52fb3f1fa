"""cold_start: caches are empty, but Python's compiled modules are found, as after an installation."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cold_start import compiled_modules


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    compiled_modules.cache_clear()
    yield
    compiled_modules.cache_clear()


def test_an_installation_with_compiled_modules_needs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "cache_from_source", lambda _: str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing is to be compiled"))
    assert compiled_modules() == {}


def test_where_they_are_missing_they_are_compiled_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs: list[dict[str, str]] = []

    def run(_command: Any, *, env: dict[str, str], check: bool) -> None:
        runs.append(env)

    monkeypatch.setattr(importlib.util, "cache_from_source", lambda _: str(tmp_path / "missing"))
    monkeypatch.setattr(subprocess, "run", run)
    found = compiled_modules()
    assert compiled_modules() is found
    assert [{**os.environ, **found}] == runs
    assert Path(found["PYTHONPYCACHEPREFIX"]).is_dir()
    assert found["PYTHONDONTWRITEBYTECODE"] == ""
