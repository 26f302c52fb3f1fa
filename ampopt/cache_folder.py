"""The folder where files are kept that can be made again: written in one step, few, and small."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

MOST_FILES, MOST_BYTES = 256, 1 << 20

KINDS = (".json", ".onnx", ".so", ".tmp")
"""Recipes, exported graphs, our compiled libraries, and what killed processes left behind."""


def cache_folder() -> Path | None:
    """$AMPOPT_CACHE (empty: None), else ~/.cache/ampopt/tuning; None for a user without a home, too."""
    if (told := os.environ.get("AMPOPT_CACHE")) is not None:
        return Path(told) if told else None
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return home / "ampopt" / "tuning"


def kept_files(folder: Path) -> list[Path]:
    """All files in a cache's folder, the longest unused first."""
    with contextlib.suppress(OSError):
        found = [file for kind in KINDS for file in folder.glob(f"*{kind}")]
        times = {file: file.stat().st_mtime for file in found if file.is_file()}
        return sorted(times, key=times.__getitem__)
    return []


def keep(file: Path, data: bytes) -> None:
    """Write a file in place of what is there; the longest unused ones make room. Errors: nothing is kept."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=file.parent, suffix=".tmp", delete=False) as made:
            made.write(data)
        os.replace(made.name, file)
        for old in kept_files(file.parent)[:-MOST_FILES]:
            old.unlink(missing_ok=True)


def kept(file: Path) -> bytes | None:
    """What is in a file, which is then the last used one; None where there is none.

    Raises OSError where it cannot be read, ValueError where it is another user's or larger than any that is
    kept.
    """
    try:
        if not is_ours(file) or file.stat().st_size > MOST_BYTES:
            raise ValueError(f"{file} cannot be what was kept")
        data = file.read_bytes()
        os.utime(file)  # the oldest go first
    except FileNotFoundError:
        return None
    return data


def is_ours(file: Path) -> bool:
    """Whether nobody else can have put a file there: what is kept is run."""
    return not hasattr(os, "getuid") or file.stat().st_uid == os.getuid()


def drop(file: Path) -> None:
    """Remove a file, if it is there and can be."""
    with contextlib.suppress(OSError):
        file.unlink()
