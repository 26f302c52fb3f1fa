"""The zip archive of a bundle: given files have exactly one byte sequence, so that no data can be hidden.

Any zip program unpacks it, but only the exact bytes that `write` produces are read: files one after the other
from the first byte, stored and not compressed (weights do not compress, and so no entry is larger than the
archive), no comments, extra fields, folders, links, dates or encryption, then the table of contents, and
nothing after it. `read_entries` computes what those bytes must be and compares. Python's `zipfile` would
trust the table, and find it even after or before foreign data.

Formats: APPNOTE.TXT 6.3.10, sections 4.3.7 (file header), 4.3.12 (table), 4.3.14 to 4.3.16 (its end).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Sequence
from typing import BinaryIO

from ampopt.bundle.manifest import MANIFEST, MAX_FILES, RefusedError, check_names

FULL = 0xFFFFFFFF  # what a 32-bit field holds whose number stands in a zip64 field
LIMIT = FULL  # the first number that does
DATE = 0x21  # 1980-01-01, the first day that a zip file can name

_LOCAL = struct.Struct("<4s5H3I2H")
_LOCAL_ZIP64 = struct.Struct("<2H2Q")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_ZIP64 = struct.Struct("<4sQ2H2I4Q4sIQI")
_MARK = b"PK\x03\x04"
_CENTRAL_MARK = b"PK\x01\x02"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One file in the archive: its size in bytes, CRC-32, and the offset of its header."""

    name: str
    size: int
    crc: int
    offset: int

    @property
    def header(self) -> bytes:
        """The header bytes before the file's content."""
        name = self.name.encode("latin-1")
        large = self.size >= LIMIT
        extra = _LOCAL_ZIP64.pack(1, 16, self.size, self.size) if large else b""
        size, version = (FULL, 45) if large else (self.size, 20)
        fixed = (_MARK, version, 0, 0, 0, DATE, self.crc, size, size, len(name), len(extra))
        return _LOCAL.pack(*fixed) + name + extra

    @property
    def start(self) -> int:
        """The offset of the file's content."""
        return self.offset + len(self.header)

    @property
    def end(self) -> int:
        """The offset after the file's last byte."""
        return self.start + self.size

    @property
    def row(self) -> bytes:
        """The file's row in the table of contents."""
        name = self.name.encode("latin-1")
        large = struct.pack("<2Q", self.size, self.size) if self.size >= LIMIT else b""
        far = struct.pack("<Q", self.offset) if self.offset >= LIMIT else b""
        extra = struct.pack("<2H", 1, len(large + far)) + large + far if large or far else b""
        version = 45 if extra else 20
        size, offset = FULL if large else self.size, FULL if far else self.offset
        fixed = (_CENTRAL_MARK, version, version, 0, 0, 0, DATE, self.crc, size, size, len(name), len(extra))
        return _CENTRAL.pack(*fixed, 0, 0, 0, 0, offset) + name + extra


MAGIC = Entry(MANIFEST, 0, 0, 0).header[:14]
"""The first bytes of every bundle file; then come CRC, sizes and, from byte 30 on, `manifest.json`."""


def table(entries: Sequence[Entry]) -> bytes:
    """The table of contents with its end record: the last bytes of the archive of `entries`."""
    rows = b"".join(entry.row for entry in entries)
    start, count = entries[-1].end, len(entries)
    if start < LIMIT:
        return rows + _END.pack(b"PK\x05\x06", 0, 0, count, count, len(rows), start, 0)
    sizes, locator = (count, count, len(rows), start), (b"PK\x06\x07", 0, start + len(rows), 1)
    far = _END_ZIP64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, *sizes, *locator)
    return rows + far + _END.pack(b"PK\x05\x06", 0, 0, count, count, len(rows), FULL, 0)


def write(file: BinaryIO, contents: Iterable[tuple[str, int, int, Iterable[bytes]]]) -> None:
    """Write an archive of (name, size, CRC-32, bytes in blocks); manifest.json is the first file."""
    entries: list[Entry] = []
    for name, size, crc, data in contents:
        entry = Entry(name, size, crc, entries[-1].end if entries else 0)
        entries.append(entry)
        file.write(entry.header)
        for block in data:
            file.write(block)
    file.write(table(entries))


def read_entries(file: BinaryIO, size: int) -> list[Entry]:
    """The entries of an archive of `size` bytes; checks every byte outside of the files' content.

    Raises RefusedError for all bytes that `write` does not produce.
    """
    file.seek(0)
    if not is_bundle(file.read(_LOCAL.size + len(MANIFEST))):
        raise RefusedError(
            "it is not a bundle: it does not begin as ampopt's files do", "give a bundle's path"
        )
    entries = [_entry_at(file, 0, size)]
    while (mark := _peek(file, entries[-1].end)) == _MARK:
        entries.append(_entry_at(file, entries[-1].end, size))
        if len(entries) > MAX_FILES + 2:
            raise RefusedError(f"it has more than {MAX_FILES} files")
    if len(mark) < 4:
        raise RefusedError(f"it is truncated: it ends behind {entries[-1].name!r}")
    check_names(entry.name for entry in entries)
    expected = table(entries)
    file.seek(entries[-1].end)
    found = file.read(len(expected) + 1)
    if found[: len(expected)] == expected and found != expected:
        raise RefusedError("it goes on behind its end: something was added to it")
    if found != expected and expected.startswith(found):
        raise RefusedError("it is truncated: it ends within its table of contents")
    if found != expected:
        raise RefusedError("its table of contents is not that of its files: it was changed, or packed anew")
    return entries


def is_bundle(head: bytes) -> bool:
    """Whether `head`, the first 43 bytes or more of a file, comes from `write`."""
    return head.startswith(MAGIC) and head[_LOCAL.size :].startswith(MANIFEST.encode())


def _peek(file: BinaryIO, position: int) -> bytes:
    file.seek(position)
    return file.read(4)


def _entry_at(file: BinaryIO, offset: int, archive_size: int) -> Entry:
    """The entry whose header begins at `offset`; every byte of the header is checked."""
    file.seek(offset)
    fixed = file.read(_LOCAL.size)
    if len(fixed) < _LOCAL.size:
        raise RefusedError("it is truncated: it ends within a file's header")
    _, _, flags, method, _, _, crc, _, size, name_size, extra_size = _LOCAL.unpack(fixed)
    name = file.read(name_size).decode("latin-1")
    extra = file.read(extra_size)
    if flags & 1:
        raise RefusedError(f"{name[:100]!r} in it is encrypted")
    if method != 0:
        raise RefusedError(f"{name[:100]!r} in it is compressed, which ampopt never does: it was packed anew")
    if size == FULL and len(extra) == _LOCAL_ZIP64.size:
        size = _LOCAL_ZIP64.unpack(extra)[3]
    check_names([name])
    entry = Entry(name, size, crc, offset)
    if entry.header != fixed + name.encode("latin-1") + extra:
        raise RefusedError(
            f"{name!r} in it has not the header that ampopt writes: it was changed, or packed anew"
        )
    if entry.end > archive_size:
        raise RefusedError(f"it is truncated: it ends within {name!r}")
    return entry
