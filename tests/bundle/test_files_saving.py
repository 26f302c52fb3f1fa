"""What `write_bundle` makes of its arguments, what it replaces, and what it refuses to save or destroy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ampopt.bundle import files as bundle_files
from ampopt.bundle.files import check_target, open_bundle, write_bundle
from ampopt.errors import BundleError
from tests.support.bundles import FILES, FORMS, archive, contents, fields, save


def test_the_callers_manifest_stays_as_it_was(tmp_path: Path) -> None:
    mine = fields()
    write_bundle(tmp_path / "b", mine, FILES)
    assert mine == fields()


def test_a_slash_or_a_folder_bundle_at_the_path_gives_a_folder(tmp_path: Path) -> None:
    write_bundle(f"{tmp_path}/b/", fields(), FILES)
    assert (tmp_path / "b").is_dir()
    write_bundle(f"{tmp_path}/b", fields(), {"program.json": b"new"})
    assert (tmp_path / "b").is_dir()
    assert contents(open_bundle(tmp_path / "b")) == {"program.json": b"new"}


@pytest.mark.parametrize("link", [False, True])
@FORMS
def test_a_bundle_is_replaced_and_nothing_is_left_beside_it(
    as_folder: bool, link: bool, tmp_path: Path
) -> None:
    path = save(tmp_path / "b", as_folder=as_folder)
    if link:
        path = tmp_path / "link"
        path.symlink_to("b")
    before = sorted(os.listdir(tmp_path))
    save(path, {"program.json": b"new"}, as_folder=as_folder)
    assert contents(open_bundle(tmp_path / "b")) == {"program.json": b"new"}
    assert sorted(os.listdir(tmp_path)) == before


def test_a_file_can_become_a_folder(tmp_path: Path) -> None:
    save(save(tmp_path / "b"), as_folder=True)
    assert contents(open_bundle(tmp_path / "b")) == FILES
    assert os.listdir(tmp_path) == ["b"]


def folder_with(path: Path, name: str, text: str) -> None:
    path.mkdir()
    (path / name).write_text(text)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a text": lambda path: path.write_text("my thesis"),
    "an empty file": lambda path: path.touch(),
    "a zip file of someone else": lambda path: path.write_bytes(archive({"thesis.tex": b"x"})),
    "a folder of someone else": lambda path: folder_with(path, "thesis.tex", "x"),
    "a folder with another manifest": lambda path: folder_with(path, "manifest.json", '{"schema": 1}'),
    "a folder bundle with a file of someone else": lambda path: (
        save(path, as_folder=True) / "thesis.tex"
    ).touch(),
    "a FIFO": lambda path: os.mkfifo(path),
}


@FORMS
@pytest.mark.parametrize("case", FOREIGN)
def test_what_is_no_bundle_is_not_saved_over(case: str, as_folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "b"
    FOREIGN[case](path)
    before = _contents(path)
    with pytest.raises(BundleError, match=r"cannot be saved.*(is no bundle|someone else|plain file)"):
        save(path, as_folder=as_folder)
    assert os.listdir(tmp_path) == ["b"]
    assert _contents(path) == before


def _contents(path: Path) -> list[str] | list[int]:
    """What a folder or a file holds, as far as only a writer changes it; a reader may set the access time."""
    if path.is_dir():
        return sorted(os.listdir(path))
    found = path.lstat()
    return [found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns]


@FORMS
def test_a_damaged_bundle_and_an_empty_folder_are_saved_over(as_folder: bool, tmp_path: Path) -> None:
    path = save(tmp_path / "b", as_folder=as_folder)
    if as_folder:
        (path / "model.onnx").unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1000])
    assert contents(open_bundle(save(path, as_folder=as_folder))) == FILES
    (tmp_path / "empty").mkdir()
    assert contents(open_bundle(save(tmp_path / "empty"))) == FILES


@FORMS
@pytest.mark.parametrize(
    ("changes", "files", "reason"),
    [
        ({"tolerance": "large"}, FILES, "tolerance"),
        ({"tolerance": float("nan")}, FILES, "cannot be written as JSON"),
        ({"surprise": 1}, FILES, "surprise"),
        ({"schema": 2}, FILES, "sizes"),
        ({"schema": 3}, FILES, "schema"),
        ({}, {}, "lists 0 files"),
        ({}, {"../x": b""}, "not allowed"),
        ({}, {"manifest.json": b""}, "twice"),
        ({}, {"a": b"", "A": b""}, "twice"),
        ({}, {"a": Path("/nowhere/at/all")}, "No such file"),
        ({}, {"a": Path("/dev/zero")}, "not a plain file"),
    ],
)
def test_what_could_not_be_opened_is_not_saved(
    as_folder: bool,
    changes: dict[str, object],
    files: dict[str, bytes | Path],
    reason: str,
    tmp_path: Path,
) -> None:
    save(tmp_path / "b", as_folder=as_folder)
    with pytest.raises(BundleError, match=reason):
        write_bundle(tmp_path / "b", fields(**changes), files, as_folder=as_folder)
    assert contents(open_bundle(tmp_path / "b")) == FILES
    assert os.listdir(tmp_path) == ["b"]


@FORMS
def test_a_source_that_changes_while_it_is_saved_is_refused(
    as_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"before")
    refuse = bundle_files._refuse_foreign

    def meddle(target: Path) -> None:
        refuse(target)
        source.write_bytes(b"behind")

    monkeypatch.setattr(bundle_files, "_refuse_foreign", meddle)
    with pytest.raises(BundleError, match="changed meanwhile"):
        save(tmp_path / "b", {"a": source}, as_folder=as_folder)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("nowhere/a.ampopt", "No such file or directory ('{folder}/nowhere'); create that folder first"),
        ("", "its path is empty; give another path"),
    ],
)
def test_what_is_wrong_with_a_path_is_told(
    path: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = f"the bundle {path!r} cannot be saved: {told.format(folder=tmp_path)}"
    with pytest.raises(BundleError) as caught:
        write_bundle(path, fields(), FILES)
    assert str(caught.value) == said
    with pytest.raises(BundleError) as caught:
        check_target(path)
    assert str(caught.value) == said


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"cannot be saved.*No such file"):
        save(tmp_path / "nowhere" / "b")
