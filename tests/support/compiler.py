"""The mark of tests that compile C++."""

from __future__ import annotations

import shutil

import pytest

from ampopt.system.native import COMPILERS

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler")
