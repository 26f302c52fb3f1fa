"""Freed memory goes back to the operating system."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import pytest
import torch

from ampopt.system.memory import release

CPU = torch.device("cpu")


def resident_bytes() -> int:
    """The memory of this process that is in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_blocks_of_the_heap_leave_the_process() -> None:
    blocks = [bytearray(b"x") * 60_000 for _ in range(3000)]  # too small to be mapped on their own
    last = bytearray(b"x") * 60_000
    before = resident_bytes()
    del blocks
    gc.collect()
    release(CPU)
    assert before - resident_bytes() > 100e6
    assert last[0] == ord("x")


def test_what_lies_in_a_cycle_is_freed() -> None:
    class Node:
        freed = False

        def __del__(self) -> None:
            Node.freed = True

    node = Node()
    node.itself = node  # type: ignore[attr-defined]
    gc.disable()
    try:
        del node
        release(CPU)
    finally:
        gc.enable()
    assert Node.freed


def test_a_c_library_without_the_call_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    release(CPU)
