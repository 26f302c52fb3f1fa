"""The cache folder: atomic writes, a limited number of files, and a limited size.

The folder is the user's choice, and may hold files of the user's own: only files with names that the cache
itself gives are counted or removed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ampopt.errors import AmpoptError
from ampopt.system.atomic import SUFFIX, remove_unless_written, replacing
from ampopt.system.plain_files import open_plain, read_at_most

MOST_FILES, MOST_BYTES = 256, 1 << 20

_NAME = r"(?:[0-9a-f]{64}\.(?:json|onnx)|[a-z_]+-[0-9a-f]{32}\.so)"
"""The names of recipes and exported graphs, which are hashes, and of libraries, which end in one."""

_NAMES = re.compile(rf"{_NAME}|\.{_NAME}\.[0-9a-f]{{16}}{re.escape(SUFFIX)}")
"""All names of the cache: also of what killed processes left beside such a file."""


class CacheError(AmpoptError):
    """The cache folder cannot be listed, or files in it cannot be removed."""


def cache_folder() -> Path | None:
    """$AMPOPT_CACHE (empty: None), else ~/.cache/ampopt/tuning; also None for a user without a home.

    A relative one is what it is at its first use: later a model's code may have changed the current folder.
    None if that was removed.
    """
    if (told := os.environ.get("AMPOPT_CACHE")) == "":
        return None
    try:
        if told is not None:
            return _placed(Path(told))
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return _placed(home / "ampopt" / "tuning")
    except (RuntimeError, FileNotFoundError):  # no home, or no current folder
        return None


@functools.cache
def _placed(folder: Path) -> Path:
    return folder.absolute()


def kept_files(folder: Path) -> list[Path]:
    """All files of the cache in its folder, least recently used first; none if there is no such folder.

    Raises OSError if the folder cannot be listed.
    """
    found = _found(folder)
    return sorted(found, key=lambda file: found[file].st_mtime)


def size(folder: Path) -> tuple[int, int]:
    """The number of the cache's files in its folder, and their size in bytes. Raises CacheError."""
    with _listing(folder):
        found = _found(folder)
    return len(found), sum(status.st_size for status in found.values())


def clear(folder: Path) -> int:
    """Remove every file of the cache from its folder; returns the number of those that it removed.

    What another process is writing at the moment stays: it would fail without. Raises CacheError, which names
    those that could not be removed, if there are any; all others are gone then.
    """
    with _listing(folder):
        files = kept_files(folder)
    removed, failed = 0, []
    for file in files:
        try:
            removed += _remove(file)
        except FileNotFoundError:  # another process was first
            continue
        except OSError as error:
            failed.append(f"{file.name} ({error.strerror})")
    if failed:
        names = ", ".join(failed[:5]) + (", …" if len(failed) > 5 else "")
        raise CacheError(
            f"of {len(files)} files in {folder}, {removed} are removed and {len(failed)} cannot be: {names}: "
            "see who owns them and the folder"
        )
    return removed


def keep(file: Path, data: bytes) -> None:
    """Write a file, replacing an old one; the least recently used files are removed.

    On errors nothing is stored.
    """
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as made:
            made.write_bytes(data)
        for old in kept_files(file.parent)[:-MOST_FILES]:
            with contextlib.suppress(FileNotFoundError):  # another process was first
                _remove(old)


def kept(file: Path) -> bytes | None:
    """The content of a file, marked as recently used; None if there is no such file.

    Raises OSError if it cannot be read, is not a regular file, or exceeds the size limit; ValueError if it
    belongs to another user.
    """
    try:
        with open_plain(file, follow=False) as opened:
            if not _is_mine(os.fstat(opened.fileno())):
                raise ValueError(f"{file} is another user's")
            data = read_at_most(opened, MOST_BYTES)
        os.utime(file)  # the oldest go first
    except FileNotFoundError:
        return None
    return data


def is_ours(file: Path) -> bool:
    """Whether it is a regular file (no link) that no other user can have written: cached code is executed."""
    status = file.lstat()
    return stat.S_ISREG(status.st_mode) and _is_mine(status)


def _is_mine(status: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def drop(file: Path) -> None:
    """Remove a file if it exists and can be removed."""
    with contextlib.suppress(OSError):
        file.unlink()


def _remove(file: Path) -> bool:
    """Remove a file of the cache, unless a living process is writing it. Raises OSError."""
    if file.name.endswith(SUFFIX):
        return remove_unless_written(file)
    file.unlink()
    return True


def _found(folder: Path) -> dict[Path, os.stat_result]:
    """The status of every file of the cache. Raises OSError if the folder cannot be listed."""
    try:
        folder.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = {}
    for name in filter(_NAMES.fullmatch, os.listdir(folder)):
        with contextlib.suppress(FileNotFoundError):  # another process was first
            status = (folder / name).lstat()
            if not stat.S_ISDIR(status.st_mode):
                found[folder / name] = status
    return found


@contextlib.contextmanager
def _listing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise CacheError(
            f"the cache folder {folder} cannot be listed ({e.strerror}): let AMPOPT_CACHE name another one"
        ) from e
