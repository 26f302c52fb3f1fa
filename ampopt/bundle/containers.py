"""Access to a bundle's files on disk, in a zip file or a folder: names, sizes, and bytes in blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from ampopt.bundle.archive import Entry, read_entries
from ampopt.bundle.manifest import MAX_FILES, RefusedError, check_names
from ampopt.system.plain_files import NotPlainError, kind_of, open_plain

BLOCK = 1 << 20  # bytes


class Container(Protocol):
    """The location of a bundle's files. The bytes from `blocks` are not yet checked against any hash."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of every file in bytes, by name."""

    def blocks(self, name: str) -> Iterator[bytes]:
        """The bytes of a file, `sizes[name]` of them; refused if there are fewer or more."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Container]:
    """The container at `path`. Raises RefusedError for other files, OSError for unreadable ones."""
    if not path.is_dir():
        with open_regular(path) as file:
            entries = read_entries(file, os.fstat(file.fileno()).st_size)
            yield _Zip(file, {entry.name: entry for entry in entries})
        return
    if os.name != "posix":
        raise RefusedError("a bundle that is a folder needs Linux or macOS", "save it as a single file")
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _Folder(folder, _sizes(folder))
    finally:
        os.close(folder)


@dataclasses.dataclass(frozen=True)
class _Zip:
    file: BinaryIO
    entries: Mapping[str, Entry]

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: entry.size for name, entry in self.entries.items()}

    def blocks(self, name: str) -> Iterator[bytes]:
        entry = self.entries[name]
        self.file.seek(entry.start)
        crc = 0
        for block in _exactly(self.file, entry.size, name):
            crc = zlib.crc32(block, crc)
            yield block
        if crc != entry.crc:
            raise RefusedError(f"{name!r} in it is damaged: its CRC-32 is another")


@dataclasses.dataclass(frozen=True)
class _Folder:
    # Files are opened relative to the descriptor: all are of one folder, whatever its name is by now.

    descriptor: int
    sizes: Mapping[str, int]

    def blocks(self, name: str) -> Iterator[bytes]:
        with open_regular(name, folder=self.descriptor) as file:
            yield from _exactly(file, self.sizes[name], name)
            if file.read(1):
                raise RefusedError(f"{name!r} in it grows while it is read")


def _sizes(folder: int) -> dict[str, int]:
    """The sizes of the files in a folder; refused if one has a name that may not be, or is no plain file."""
    found: dict[str, int] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise RefusedError(
                    f"{entry.name[:100]!r} in it is {kind_of(status.st_mode)}, not a plain file"
                )
            found[entry.name] = status.st_size
            if len(found) > MAX_FILES + 2:
                raise RefusedError(f"it has more than {MAX_FILES} files", "give the path of a bundle")
    check_names(found)
    return found


def _exactly(file: BinaryIO, size: int, name: str) -> Iterator[bytes]:
    """The next `size` bytes of a file in blocks."""
    while size:
        block = file.read(min(size, BLOCK))
        if not block:
            raise RefusedError(f"{name!r} in it is truncated: {size} bytes are missing")
        size -= len(block)
        yield block


def open_regular(path: str | Path, *, folder: int | None = None) -> BinaryIO:
    """Open a regular file for reading, inside `folder` (a descriptor; links are refused there) or anywhere.

    Refuses other file types, without waiting for the writer of a FIFO or accessing a device.
    """
    try:
        return open_plain(path, folder=folder, follow=folder is None)
    except NotPlainError as e:
        raise RefusedError(f"{os.fspath(path)!r} {e.strerror}") from e
