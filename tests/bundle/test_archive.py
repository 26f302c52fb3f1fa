"""The one form of a bundle's zip file: other programs read it, and every other form is refused."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from ampopt.bundle import archive as bundle_zip
from ampopt.bundle.archive import Entry, read_entries, table
from ampopt.bundle.files import open_bundle
from ampopt.bundle.manifest import RefusedError
from ampopt.errors import BundleError
from tests.support.bundles import FILES, archive, save, unpacked

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a good bundle, manifest first."""
    return unpacked(save(tmp_path_factory.mktemp("good") / "robot.ampopt"))


def repacked(files: Files, method: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    """The same files in a zip file of Python's own."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        file.comment = comment
        for name, data in files.items():
            file.writestr(name, data)
    return buffer.getvalue()


def headers(data: bytes) -> list[int]:
    """Where the files' headers begin."""
    return [match.start() for match in re.finditer(re.escape(b"PK\3\4"), data)]


def header_field(data: bytes, name: str, offset: int, value: int, form: str = "<H") -> bytes:
    """The archive with another number in the header of a file."""
    position = next(at for at in headers(data) if data[at + 30 :].startswith(name.encode())) + offset
    return data[:position] + struct.pack(form, value) + data[position + struct.calcsize(form) :]


def row_field(data: bytes, name: str, offset: int, value: int, form: str = "<H") -> bytes:
    """The archive with another number in the table's row of a file."""
    position = data.rindex(name.encode()) - 46 + offset
    return data[:position] + struct.pack(form, value) + data[position + struct.calcsize(form) :]


def end_of_table(data: bytes, change: Callable[[list[int]], None]) -> bytes:
    """The archive with another last record, [_, _, count, count, table's size, its start, comment's size]."""
    numbers = list(struct.unpack("<4H2IH", data[-18:]))
    change(numbers)
    return data[:-18] + struct.pack("<4H2IH", *numbers)


def overlapping(files: Files) -> bytes:
    """Two rows of the table for the same bytes."""
    data = archive(files)
    with io.BytesIO(data) as file:
        entries = read_entries(file, len(data))
    twin = Entry("twin.bin", entries[-1].size, entries[-1].crc, entries[-1].offset)
    rows = b"".join(entry.row for entry in [*entries, twin])
    start = entries[-1].end
    return data[:start] + rows + struct.pack(
        "<4s4H2IH", b"PK\5\6", 0, 0, len(entries) + 1, len(entries) + 1, len(rows), start, 0
    )  # fmt: skip


def nested(files: Files) -> bytes:
    """An entry whose bytes are themselves a file's header and bytes."""
    inner = archive(files)
    data = archive(files | {"weights.safetensors": inner})
    return row_field(data, "weights.safetensors", 42, data.index(inner), "<I")


def bomb(files: Files) -> bytes:
    """64 MiB of zeros, deflated to 64 KiB, under the name of a file that the manifest says has 5000 bytes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = bytes(1 << 20)
    packed = b"".join(packer.compress(zeros) for _ in range(64)) + packer.flush()
    data = archive(files | {"weights.safetensors": packed})
    data = header_field(data, "weights.safetensors", 8, 8)
    return row_field(data, "weights.safetensors", 10, 8)


HOSTILE: dict[str, tuple[Callable[[Files], bytes], str]] = {
    "empty": (lambda f: b"", "not a bundle"),
    "no zip": (lambda f: b"\x80\x04" * 100, "not a bundle"),
    "a pickle archive of torch": (lambda f: repacked({"archive/data.pkl": b"x"}), "not a bundle"),
    "an empty zip": (lambda f: b"PK\5\6" + bytes(18), "not a bundle"),
    "prepended data": (lambda f: b"#!/bin/sh\n" + archive(f), "not a bundle"),
    "a prepended zip": (lambda f: repacked({"a": b"b"}) + archive(f), "not a bundle"),
    "manifest not first": (lambda f: archive(dict(reversed(f.items()))), "not a bundle"),
    "no manifest": (lambda f: archive({"model.onnx": f["model.onnx"]}), "not a bundle"),
    "trailing data": (lambda f: archive(f) + b"\0", "behind its end"),
    "a second zip behind": (lambda f: archive(f) * 2, "behind its end"),
    "a comment": (
        lambda f: end_of_table(archive(f), lambda end: end.__setitem__(6, 3)) + b"abc", "table of contents"
    ),
    "data before the table": (
        lambda f: archive(f).replace(b"PK\1\2", b"hidden" + b"PK\1\2", 1), "table of contents"
    ),
    "data between files": (lambda f: archive(f).replace(
        f["model.onnx"], f["model.onnx"] + b"hidden"), "table of contents"),
    "packed by another program": (repacked, "not a bundle|packed anew"),
    "deflated": (lambda f: repacked(f, zipfile.ZIP_DEFLATED), "not a bundle|compressed"),
    "a deflated entry": (lambda f: header_field(archive(f), "model.onnx", 8, 8), "compressed"),
    "an encrypted entry": (lambda f: header_field(archive(f), "model.onnx", 6, 1), "encrypted"),
    "strong encryption": (lambda f: header_field(archive(f), "model.onnx", 6, 0x41), "encrypted"),
    "sizes behind the data": (lambda f: header_field(archive(f), "model.onnx", 6, 8), "packed anew"),
    "an unknown version": (lambda f: header_field(archive(f), "model.onnx", 4, 63), "packed anew"),
    "a date": (lambda f: header_field(archive(f), "model.onnx", 12, 0x5921), "packed anew"),
    "packed size is another": (lambda f: header_field(archive(f), "model.onnx", 18, 7, "<I"), "packed anew"),
    "size is another": (lambda f: header_field(archive(f), "model.onnx", 22, 7, "<I"), "packed anew"),
    "sizes beyond the end": (
        lambda f: header_field(archive(f), "report.json", 18, 10**9 << 32 | 10**9, "<Q"), "truncated"
    ),
    "zip64 where none is needed": (
        lambda f: header_field(archive(f), "report.json", 18, 2**64 - 1, "<Q"), "packed anew"
    ),
    "a name beyond the end": (lambda f: header_field(archive(f), "report.json", 26, 65535), "not allowed"),
    "an extra field": (lambda f: header_field(archive(f), "report.json", 28, 4), "packed anew"),
    "another CRC-32": (lambda f: header_field(archive(f), "model.onnx", 14, 7, "<I"), "table of contents"),
    "a link": (lambda f: row_field(archive(f), "model.onnx", 38, 0o120777 << 16, "<I"), "table of contents"),
    "a row deflated": (lambda f: row_field(archive(f), "model.onnx", 10, 8), "table of contents"),
    "a row encrypted": (lambda f: row_field(archive(f), "model.onnx", 8, 1), "table of contents"),
    "a row's size": (lambda f: row_field(archive(f), "model.onnx", 24, 7, "<I"), "table of contents"),
    "a row elsewhere": (lambda f: row_field(archive(f), "report.json", 42, 0, "<I"), "table of contents"),
    "a file's comment": (lambda f: row_field(archive(f), "model.onnx", 32, 3), "table of contents"),
    "another name in the table": (
        lambda f: b"report.jsin".join(archive(f).rsplit(b"report.json", 1)), "table of contents"
    ),
    "another count": (
        lambda f: end_of_table(archive(f), lambda end: end.__setitem__(3, 1)), "table of contents"
    ),
    "another disk": (
        lambda f: end_of_table(archive(f), lambda end: end.__setitem__(0, 1)), "table of contents"
    ),
    "another start of the table": (
        lambda f: end_of_table(archive(f), lambda end: end.__setitem__(5, 0)), "table of contents"
    ),
    "no table": (lambda f: archive(f)[: archive(f).index(b"PK\1\2")], "truncated"),
    "overlapping files": (overlapping, "table of contents"),
    "a file within a file": (nested, "table of contents"),
    "a bomb": (bomb, "compressed"),
    "a name twice": (lambda f: archive([*f.items(), ("model.onnx", b"other")]), "twice"),
    "the manifest twice": (lambda f: archive([*f.items(), ("manifest.json", b"{}")]), "twice"),
    "a name in other letters": (lambda f: archive(f | {"Model.ONNX": b"other"}), "twice"),
    "a file added": (lambda f: archive(f | {"extra.bin": b"x"}), "'extra.bin'.*added"),
    "an empty file added": (lambda f: archive(f | {"extra.bin": b""}), "'extra.bin'.*added"),
    "a file missing": (
        lambda f: archive({name: f[name] for name in f if name != "model.onnx"}), "'model.onnx'.*missing"
    ),
    "a file shorter": (lambda f: archive(f | {"model.onnx": bytes(2999)}), "2999 bytes and not 3000"),
    "a file longer": (lambda f: archive(f | {"model.onnx": bytes(3001)}), "3001 bytes and not 3000"),
    "a file of another content": (
        lambda f: archive(f | {"model.onnx": bytes(3000)}), "'model.onnx'.*SHA-256 is another"
    ),
    "two files swapped": (
        lambda f: archive(f | {"model.onnx": f["report.json"], "report.json": f["model.onnx"]}),
        "bytes and not",
    ),
    "a signature too long": (lambda f: archive(f | {"manifest.sig": bytes(65)}), "64 is the most"),
    "a huge manifest": (lambda f: archive({"manifest.json": b" " * (5 << 20)}), "is the most"),
    "a thousand files": (lambda f: archive(f | {f"x{n}": b"" for n in range(1000)}), "more than 256"),
}  # fmt: skip


def with_name(name: str) -> Callable[[Files], bytes]:
    return lambda files: archive(files | {name: b"x"})


CLIMBING = ("../x", "/etc/x", "a/../../x", "folder/", "C:x", "..\\x", "x\0.onnx", "x\xe9", ".x", "")
HOSTILE |= {f"the name {name!r}": (with_name(name), "not allowed") for name in CLIMBING}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_archive_is_refused_for_what_it_is(case: str, files: Files, tmp_path: Path) -> None:
    make, reason = HOSTILE[case]
    path = tmp_path / "hostile.ampopt"
    path.write_bytes(make(files))
    with pytest.raises(BundleError, match=f"(?s)hostile.ampopt.*({reason})"):
        open_bundle(path)
    assert [item.name for item in tmp_path.iterdir()] == ["hostile.ampopt"]


def test_the_archive_made_here_is_a_good_one_where_nothing_is_changed(files: Files, tmp_path: Path) -> None:
    (tmp_path / "robot.ampopt").write_bytes(archive(files))
    assert open_bundle(tmp_path / "robot.ampopt").names == tuple(FILES)


def test_other_programs_read_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(save(tmp_path / "robot.ampopt")) as file:
        assert file.testzip() is None
        assert {name: file.read(name) for name in FILES} == FILES
        assert all(info.compress_type == zipfile.ZIP_STORED for info in file.infolist())


def test_a_bundle_unpacked_by_another_program_is_a_folder_bundle(tmp_path: Path) -> None:
    path = save(tmp_path / "robot.ampopt")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", path, tmp_path / "folder"], check=True)
    assert open_bundle(tmp_path / "folder").manifest == open_bundle(path).manifest


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    assert save(tmp_path / "one").read_bytes() == save(tmp_path / "two").read_bytes()


def test_sizes_and_offsets_beyond_32_bits_stand_in_zip64_fields(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bundle_zip, "LIMIT", 4000)  # as if 32 bits ended here
    path = save(tmp_path / "robot.ampopt")
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert {name: file.read(name) for name in FILES} == FILES
    bundle = open_bundle(path)
    assert {name: bundle.read(name) for name in bundle.names} == FILES
    monkeypatch.undo()
    with pytest.raises(BundleError, match="packed anew"):  # 5000 bytes need no such field
        open_bundle(path)


def test_a_table_beyond_4_gib_is_computed_as_zipfile_writes_it() -> None:
    far = [Entry("manifest.json", 5 << 30, 1, 0)]
    far.append(Entry("b", 1, 2, far[0].end))
    rows = table(far)
    assert struct.unpack("<2H2Q", rows[46 + 13 : 46 + 13 + 20]) == (1, 16, 5 << 30, 5 << 30)
    assert b"PK\6\6" in rows
    assert b"PK\6\7" in rows
    assert rows[-22:] == struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2, 2, len(rows) - 98, 0xFFFFFFFF, 0)


def test_every_truncation_is_refused(files: Files) -> None:
    small = archive({"manifest.json": b"{}", "a": b"0123"})
    assert len(read_entries(io.BytesIO(small), len(small))) == 2
    for size in range(len(small)):
        with pytest.raises(RefusedError):
            read_entries(io.BytesIO(small[:size]), size)


@pytest.mark.parametrize("missing", [1, 21, 30, 60])
def test_what_ends_within_its_table_is_truncated_and_not_changed(missing: int) -> None:
    small = archive({"manifest.json": b"{}", "a": b"0123"})[:-missing]
    with pytest.raises(RefusedError, match=r"^it is truncated: it ends within its table of contents$"):
        read_entries(io.BytesIO(small), len(small))


def test_every_changed_byte_outside_the_files_is_refused() -> None:
    small = archive({"manifest.json": b"{}", "a": b"0123"})
    entries = read_entries(io.BytesIO(small), len(small))
    content = {at for entry in entries for at in range(entry.start, entry.end)}
    for at in set(range(len(small))) - content:
        for flip in (1, 0x20, 0x80):
            other = small[:at] + bytes([small[at] ^ flip]) + small[at + 1 :]
            with pytest.raises(RefusedError):
                read_entries(io.BytesIO(other), len(other))
