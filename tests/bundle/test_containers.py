"""Folders, links, pipes and devices: what a bundle's files may lie in, and what is refused unread."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ampopt.bundle import files as bundle_files
from ampopt.bundle.files import open_bundle
from ampopt.errors import BundleError
from tests.support.bundles import FILES, refuses, save


@pytest.mark.parametrize("name", ["manifest.json", *FILES])
def test_a_folder_without_one_of_its_files_is_refused(name: str, tmp_path: Path) -> None:
    (save(tmp_path / "b", as_folder=True) / name).unlink()
    refuses(tmp_path / "b", f"'{name}' in it is missing")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


ADDED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a file": ("extra.bin", lambda path: path.write_bytes(b"x"), "was added"),
    "an empty file": ("extra.bin", lambda path: path.touch(), "was added"),
    "a hidden file": (".hidden", lambda path: path.touch(), "not allowed"),
    "a file in other letters": ("MODEL.onnx", lambda path: path.touch(), "twice"),
    "a folder": ("extra", lambda path: path.mkdir(), "is a folder"),
    "a FIFO": ("extra", lambda path: os.mkfifo(path), "is a FIFO"),
    "a socket": ("extra", listening, "is a FIFO, socket or device"),
    "a link": ("extra", lambda path: path.symlink_to("model.onnx"), "is a symbolic link"),
    "a dangling link": ("extra", lambda path: path.symlink_to("nowhere"), "is a symbolic link"),
    "a name that is no text": ("\udcff", lambda path: path.touch(), "not allowed"),
    "a name with a line end": ("a\nb", lambda path: path.touch(), "not allowed"),
    "a long signature": ("manifest.sig", lambda path: path.write_bytes(bytes(65)), "64 is the most"),
}


@pytest.mark.parametrize("case", ADDED)
def test_a_folder_with_something_added_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, add, reason = ADDED[case]
    save(tmp_path / "b", as_folder=True)
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    add(Path("b") / name)
    refuses(tmp_path / "b", reason)


REPLACED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link to the same bytes": (lambda path: path.symlink_to(path.parent.parent / "copy"), "symbolic link"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "symbolic link"),
    "a FIFO": (lambda path: os.mkfifo(path), "is a FIFO"),
    "a folder": (lambda path: path.mkdir(), "is a folder"),
}


@pytest.mark.parametrize("name", ["manifest.json", "model.onnx"])
@pytest.mark.parametrize("case", REPLACED)
def test_a_folder_whose_file_is_no_plain_file_is_refused(case: str, name: str, tmp_path: Path) -> None:
    replace, reason = REPLACED[case]
    path = save(tmp_path / "b", as_folder=True) / name
    path.rename(tmp_path / "copy")
    replace(path)
    refuses(tmp_path / "b", f"{name}.*{reason}")


def test_a_file_that_becomes_a_link_after_it_was_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "b", as_folder=True)
    check = bundle_files._check_sizes

    def swap(found: Mapping[str, int], listed: Mapping[str, int]) -> None:
        check(found, listed)
        (path / "model.onnx").rename(tmp_path / "copy")
        (path / "model.onnx").symlink_to(tmp_path / "copy")

    monkeypatch.setattr(bundle_files, "_check_sizes", swap)
    refuses(path, r"model\.onnx.*symbolic link")


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "b", as_folder=True)
    check = bundle_files._check_sizes

    def grow(found: Mapping[str, int], listed: Mapping[str, int]) -> None:
        check(found, listed)
        with (path / "report.json").open("ab") as file:
            file.write(b"x")

    monkeypatch.setattr(bundle_files, "_check_sizes", grow)
    refuses(path, r"report\.json.*grows")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "No such file"),
    "a FIFO": (lambda path: os.mkfifo(path), "is a FIFO"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a FIFO, socket or device"),
    "a dangling link": (lambda path: path.symlink_to("nowhere"), "No such file"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "Too many levels"),
    "an empty folder": (lambda path: path.mkdir(), "'manifest.json' in it is missing"),
    "an empty file": (lambda path: path.touch(), "not a bundle"),
    "a text": (lambda path: path.write_text("a text"), "not a bundle"),
    "a sparse terabyte": (sparse, "not a bundle"),
}


@pytest.mark.parametrize("case", PLACES)
def test_what_is_no_bundle_is_refused(case: str, tmp_path: Path) -> None:
    make, reason = PLACES[case]
    make(tmp_path / "b")
    refuses(tmp_path / "b", reason)


def test_a_huge_folder_is_refused_before_all_of_it_is_listed(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"f{number}").touch()
    refuses(tmp_path, "more than 256 files")


@pytest.mark.parametrize(
    ("replace", "reason"),
    [
        (lambda path: path.symlink_to("program.json"), "Too many levels"),
        (lambda path: os.mkfifo(path), "is a FIFO"),
    ],
)
def test_a_file_that_changes_its_kind_as_it_is_opened_is_refused(
    replace: Callable[[Path], object], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "b", as_folder=True)
    real = os.stat

    def swap(name: str, **options: Any) -> os.stat_result:
        status = real(name, **options)
        if name == "report.json":
            (path / name).unlink()
            replace(path / name)
        return status

    monkeypatch.setattr(os, "stat", swap)
    with pytest.raises(BundleError, match=f"report.json.*{reason}|{reason}.*report.json"):
        open_bundle(path)
