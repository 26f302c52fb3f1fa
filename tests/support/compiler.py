"""The mark of tests that compile C++, and what they may share."""

from __future__ import annotations

import shutil

import pytest

from ampopt.system.native import COMPILERS
from ampopt.system.process_state import process_kept

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler")


def look_at_processor() -> None:
    """Let inductor find out what the processor can, before a test has a folder of its own for compiled code.

    It compiles a program for each set of instructions, and keeps these in its folder: 15 s in a new one.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with process_kept():
        pick_vec_isa()
