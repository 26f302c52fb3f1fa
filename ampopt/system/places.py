"""Where a file that is to be written goes: one way from the name that a user gave to a place on the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

ADVICE = "see to that path, its permissions and its disk"
"""What to do about an error of the operating system that has no advice of its own."""

GONE = "the current folder was removed"


class NoPlaceError(OSError):
    """No file can be written for a name; `advice` says what to do."""

    def __init__(self, code: int, reason: str, where: str | None, advice: str) -> None:
        super().__init__(code, reason, where)
        self.advice = advice


def place_of(path: str | os.PathLike[str]) -> Path:
    """The place of a file to be written: a link stays, and what it leads to is written, there or not.

    Raises NoPlaceError for a link that leads to itself, a folder that is not there (none is made, and `~` is
    a name like any other), a current folder that was removed, and a name that is no text, which no library of
    C++ opens.
    """
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError as e:
        raise NoPlaceError(errno.EILSEQ, "its name is no text in UTF-8", None, "give another name") from e
    try:
        place = Path(os.path.realpath(path))
    except FileNotFoundError as e:  # only os.getcwd() raises it
        raise NoPlaceError(errno.ENOENT, GONE, None, "change to one that is there") from e
    if os.path.islink(place):
        raise NoPlaceError(errno.ELOOP, "it is a link that leads to itself", None, "remove that link")
    try:
        place.parent.stat()
    except FileNotFoundError as e:
        home = "'~' is not expanded: write the home folder out, or " if name.startswith("~") else ""
        raise NoPlaceError(
            errno.ENOENT, os.strerror(errno.ENOENT), str(place.parent), f"{home}create that folder first"
        ) from e
    return place


def is_here() -> bool:
    """Whether the current folder is still there: where it is not, any relative name fails."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def told(error: OSError) -> str:
    """What an error of the operating system says, where, and what to do."""
    where = "" if error.filename is None else f" ({error.filename!r})"
    advice = error.advice if isinstance(error, NoPlaceError) else ADVICE
    return f"{error.strerror or error}{where}; {advice}"
