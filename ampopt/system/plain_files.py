"""Reads regular files up to a size limit, so that no FIFO blocks and no device fills the memory."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ampopt.errors import InputError

# A FIFO must not hang whoever opens it; Windows has neither flag, but would translate line ends.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class NotPlainError(OSError):
    """The path is not a regular file, or the file is too large; `strerror` says which."""


def path_of(given: object) -> Path:
    """The path that a user gave as the name of a file. Raises InputError for what names none."""
    name = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(name, str):
        raise InputError(f"{given!r} is no name of a file: give a str or a pathlib.Path")
    return Path(name)


def open_plain(path: str | Path, *, folder: int | None = None, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading, relative to `folder` (a descriptor) if given.

    Neither waits for the writer of a FIFO nor accesses a device. Raises NotPlainError for these, folders,
    sockets and, unless `follow`, symbolic links; another OSError for missing or unreadable files.
    """
    mode = os.stat(path, dir_fd=folder, follow_symlinks=follow).st_mode
    if stat.S_ISREG(mode):
        flags = _FLAGS if follow else _FLAGS | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(path, flags, dir_fd=folder)
        mode = os.fstat(descriptor).st_mode  # what was there a moment ago may have been replaced
        if stat.S_ISREG(mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise NotPlainError(errno.EINVAL, f"is {kind_of(mode)}, not a plain file", os.fspath(path))


def read_at_most(file: BinaryIO, most: int) -> bytes:
    """The bytes of an open file. Raises NotPlainError if there are more than `most`."""
    data = file.read(most + 1)
    if len(data) > most:
        raise NotPlainError(errno.EFBIG, f"has more than {most} bytes", file.name)
    return data


def kind_of(mode: int) -> str:
    """The type of a file that is not regular, from its mode."""
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return "a folder" if stat.S_ISDIR(mode) else "a FIFO, socket or device"


def open_named(path: Path, what: str, most: int | None = None) -> BinaryIO:
    """Open a file that the user named; `what` describes it. Raises InputError with the reason.

    `most`: the largest size in bytes, for a file that is read completely.
    """
    try:
        file = open_plain(path)
    except FileNotFoundError as e:
        broken = " (it is a link to what is not there)" if path.is_symlink() else ""
        raise InputError(f"{what}: there is no file {path}{broken}") from e
    except NotPlainError as e:
        raise InputError(f"{what}: {path} {e.strerror}") from e
    except (OSError, ValueError) as e:  # ValueError: a NUL in its name
        reason = (e.strerror if isinstance(e, OSError) else None) or str(e)
        raise InputError(f"{what}: {path} cannot be read: {reason}") from e
    size = os.fstat(file.fileno()).st_size
    if most is not None and size > most:
        file.close()
        raise InputError(f"{what}: {path} has {size} bytes, and {most} is the most that is read")
    return file


def check_named(path: Path, what: str, most: int | None = None) -> None:
    """Raise InputError, before any long work, if `open_named` would."""
    open_named(path, what, most).close()
