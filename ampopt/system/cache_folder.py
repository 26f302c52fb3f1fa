"""The cache folder: atomic writes, a limited number of files, and a limited size."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from ampopt.system.atomic import SUFFIX, replacing
from ampopt.system.plain_files import open_plain, read_at_most

MOST_FILES, MOST_BYTES = 256, 1 << 20

KINDS = (".json", ".onnx", ".so", SUFFIX)
"""File types in the cache: recipes, exported graphs, compiled libraries, leftovers of killed processes."""


def cache_folder() -> Path | None:
    """$AMPOPT_CACHE (empty: None), else ~/.cache/ampopt/tuning; also None for a user without a home."""
    if (told := os.environ.get("AMPOPT_CACHE")) is not None:
        return Path(told) if told else None
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return home / "ampopt" / "tuning"


def kept_files(folder: Path) -> list[Path]:
    """All entries of a cache's folder, of any file type, least recently used first."""
    with contextlib.suppress(OSError):
        times = {}
        for file in [file for kind in KINDS for file in folder.glob(f"*{kind}")]:
            with contextlib.suppress(FileNotFoundError):  # another process was first
                status = file.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    times[file] = status.st_mtime
        return sorted(times, key=times.__getitem__)
    return []


def clear(folder: Path) -> int:
    """Remove every file of a cache's folder; returns their number."""
    files = kept_files(folder)
    for file in files:
        drop(file)
    return len(files)


def keep(file: Path, data: bytes) -> None:
    """Write a file, replacing an old one; the least recently used files are removed.

    On errors nothing is stored.
    """
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as made:
            made.write_bytes(data)
        for old in kept_files(file.parent)[:-MOST_FILES]:
            old.unlink(missing_ok=True)


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
