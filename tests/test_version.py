"""The version is told in one place, and the package is built with the same."""

from __future__ import annotations

import re
from pathlib import Path

import ampopt
from ampopt.version import __version__

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_the_package_is_built_and_imported_with_one_version() -> None:
    (built,) = re.findall(r'^version = "(.*)"$', PROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    assert built == __version__ == ampopt.__version__


def test_it_is_a_version_that_installers_take() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?", __version__)
