"""Errors for want of memory, room, rights, files or depth are told as such, with what to do."""

from __future__ import annotations

import errno

import pytest

from ampopt.errors import CaptureError, LackError, TooLargeError
from ampopt.system.lack import lack


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "memory: free some, or give a smaller example (MemoryError)"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "memory: free some"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory: free some"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory: free some"),
        (RecursionError("maximum recursion depth exceeded"), "depth of calls: if none goes on without end"),
    ],
)
def test_a_part_may_do_with_less_memory_and_depth(error: Exception, said: str) -> None:
    found = lack("the capture of Net", error)
    assert isinstance(found, TooLargeError)
    assert str(found).startswith(f"the capture of Net lacks {said}")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "folder/x"),
            "room on a disk: make some, or set TMPDIR",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "a folder for temp",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "folder/x"), "the right to a file: give it"),
        (
            OSError(errno.EROFS, "Read-only file system", "folder/x"),
            "a folder that can be written to: set TMPDIR",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "file descriptors: close some, or raise"),
    ],
)
def test_what_no_part_can_do_without_is_told_with_the_error(error: Exception, said: str) -> None:
    found = lack("the capture of Net", error)
    assert isinstance(found, LackError)
    assert not isinstance(found, TooLargeError)
    assert str(found).startswith(f"the capture of Net lacks {said}")
    assert str(found).endswith(f"({type(error).__name__}: {error})")


def test_what_an_error_was_raised_from_is_looked_at() -> None:
    outer = CaptureError("torch.export cannot capture Net")
    outer.__cause__ = MemoryError()
    assert isinstance(lack("it", outer), TooLargeError)


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), OSError("could not get source code"), FileNotFoundError(errno.ENOENT, "x", "y")],
)
def test_other_errors_are_about_other_things(error: Exception) -> None:
    assert lack("it", error) is None
