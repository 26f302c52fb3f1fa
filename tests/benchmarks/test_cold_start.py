"""cold_start: caches are empty, but Python's compiled modules are found, as after an installation."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
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


def test_the_time_that_an_import_takes_is_that_of_ampopt_alone() -> None:
    code = (
        "import sys; from benchmarks.cold_import import import_s; "
        "before = [name for name in sys.modules if name.partition('.')[0] == 'ampopt']; "
        "took = import_s(); print(before, took > 0.05, 'ampopt.api' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[] True True\n"
