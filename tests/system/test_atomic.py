"""A save leaves the old file or the new one, whole and on the disk, and no litter for long."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

import pytest

from ampopt.bundle.files import open_bundle
from ampopt.errors import BundleError
from ampopt.system import atomic
from ampopt.system.atomic import SUFFIX, also_named, create, replacing, replacing_together
from tests.support.bundles import FILES, FORMS, save, version
from tests.support.full_disk import FullDisk


def leave(target: Path, folder: bool) -> Path:
    """What a process leaves that is killed while it saves."""
    path = target.with_name(f".{target.name}.{'0' * 16}{SUFFIX}")
    if folder:
        path.mkdir()
        (path / "model.onnx").write_bytes(b"half")
    else:
        path.write_bytes(b"half")
    return path


@FORMS
def test_leftovers_are_removed_by_the_next_save(as_folder: bool, tmp_path: Path) -> None:
    for folder in (False, True):
        leftover = leave(tmp_path / "b", folder)
        save(tmp_path / "b", as_folder=as_folder)
        assert not leftover.exists()


def test_only_leftovers_of_the_same_bundle_are_removed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.tex").touch()
    deep = tmp_path / f".b.{'1' * 16}{SUFFIX}"
    (deep / "mine").mkdir(parents=True)
    link = tmp_path / f".b.{'2' * 16}{SUFFIX}"
    link.symlink_to("elsewhere")
    os.mkfifo(tmp_path / f".c.{'3' * 16}{SUFFIX}")
    leave(tmp_path / "other", False)
    (tmp_path / f".b.my{SUFFIX}").touch()
    before = set(os.listdir(tmp_path))
    save(tmp_path / "b")
    assert set(os.listdir(tmp_path)) == before | {"b"}
    assert (tmp_path / "elsewhere" / "thesis.tex").exists()
    assert (deep / "mine").is_dir()


@FORMS
def test_what_a_living_process_writes_is_no_leftover(as_folder: bool, tmp_path: Path) -> None:
    with replacing(tmp_path / "b", folder=as_folder) as temporary:
        save(tmp_path / "b", as_folder=as_folder)
        assert temporary.exists()
        (temporary / "late" if as_folder else temporary).write_bytes(b"late")
    late = tmp_path / "b" / "late" if as_folder else tmp_path / "b"
    assert late.read_bytes() == b"late"
    assert os.listdir(tmp_path) == ["b"]


@FORMS
def test_several_savers_at_once_leave_one_whole_bundle(as_folder: bool, tmp_path: Path) -> None:
    save(tmp_path / "b", version(255), as_folder=as_folder)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                save(tmp_path / "b", version(number), as_folder=as_folder)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    bundle = open_bundle(tmp_path / "b")
    assert {bundle.read(name)[0] for name in bundle.names} < set(range(4))
    assert os.listdir(tmp_path) == ["b"]


@FORMS
def test_a_bundle_can_be_opened_while_it_is_replaced(as_folder: bool, tmp_path: Path) -> None:
    path = save(tmp_path / "b", version(0), as_folder=as_folder)
    done = threading.Event()

    def work() -> None:
        for number in range(1, 20):
            save(path, version(number), as_folder=as_folder)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    refused = 0
    while not done.is_set():
        try:
            open_bundle(path)
        except BundleError:  # a folder that is removed while it is read
            refused += 1
    thread.join()
    assert refused == 0 or as_folder
    assert open_bundle(path).read("b.bin") == bytes([19]) * 10


@FORMS
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_save_leaves_the_old_bundle(
    as_folder: bool, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "b", as_folder=as_folder)

    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr(atomic, "_flush", fail)
    with pytest.raises(error):
        save(tmp_path / "b", version(1), as_folder=as_folder)
    assert open_bundle(tmp_path / "b").names == tuple(FILES)
    assert os.listdir(tmp_path) == ["b"]


def test_everything_is_on_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, exchange, rename = atomic._fsync, atomic._exchange, os.replace

    def note_fsync(path: Path) -> None:
        fsync(path)
        events.append(path.name if not path.name.endswith(SUFFIX) else "temporary")

    def note_exchange(one: Path, other: Path) -> None:
        exchange(one, other)
        events.append("exchanged")

    def note_rename(one: Path, other: Path) -> None:
        rename(one, other)
        events.append("renamed")

    monkeypatch.setattr(atomic, "_fsync", note_fsync)
    monkeypatch.setattr(atomic, "_exchange", note_exchange)
    monkeypatch.setattr(os, "replace", note_rename)
    save(tmp_path / "zip")
    save(tmp_path / "zip")
    assert events == ["temporary", "renamed", tmp_path.name] * 2
    events.clear()
    save(tmp_path / "folder", {"a": b"b"}, as_folder=True)
    assert sorted(events[:2]) == ["a", "manifest.json"]
    assert events[2:] == ["temporary", "renamed", tmp_path.name]
    events.clear()
    save(tmp_path / "folder", {"a": b"c"}, as_folder=True)
    assert events[2:] == ["temporary", "exchanged", tmp_path.name]


@pytest.mark.parametrize("lacking", ["the C library", "the kernel", "the file system"])
def test_where_folders_cannot_be_exchanged_the_old_one_stays(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "b", as_folder=True)
    failure = {"the kernel": errno.ENOSYS, "the file system": errno.EINVAL}.get(lacking)

    class Library:
        def __init__(self, name: None, use_errno: bool) -> None:
            if failure is not None:
                self.renameat2 = lambda *args: -1

    monkeypatch.setattr("ctypes.CDLL", Library)
    monkeypatch.setattr("ctypes.get_errno", lambda: failure)
    with pytest.raises(BundleError, match="under a new name, or as a single file"):
        save(path, version(1), as_folder=True)
    assert open_bundle(path).names == tuple(FILES)
    assert os.listdir(tmp_path) == ["b"]
    save(tmp_path / "new", as_folder=True)  # the first time needs no exchange
    assert open_bundle(tmp_path / "new").names == tuple(FILES)


def test_a_new_file_has_the_permissions_of_new_files(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    assert save(tmp_path / "b").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_is_not_replaced_by_less_than_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def write(error: type[BaseException]) -> None:
        with replacing(tmp_path / "a") as written:
            written.write_text("ne")
            raise error

    for error in (OSError, KeyboardInterrupt):
        with pytest.raises(error):
            write(error)
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        assert (tmp_path / "a").read_text() == "old"


def test_a_file_never_takes_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").touch()
    with pytest.raises(IsADirectoryError), replacing(tmp_path / "a") as written:
        written.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "mine").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "nowhere" / "a"):
        pass
    assert caught.value.filename == str(tmp_path / "nowhere")


@pytest.mark.parametrize("write", [replacing, replacing_together])
def test_where_nothing_can_be_made_in_a_folder_that_is_there_it_is_an_error(
    write: Callable[[Path], AbstractContextManager[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter([FileNotFoundError(errno.ENOENT, "as in /proc"), PermissionError(errno.EPERM, "again")])

    def refuse(*args: object, **options: object) -> NoReturn:
        raise next(errors)

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FileNotFoundError), write(tmp_path / "model.onnx"):
        pass


def test_where_a_folder_cannot_be_read_files_in_it_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refused(*_args: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    def opened(path: Path, *args: int) -> int:
        return refused() if Path(path).is_dir() else real(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refused)
        patch.setattr(os, "open", opened)
        with replacing(tmp_path / "a") as written:
            written.write_text("new")
    assert (tmp_path / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_without_locks_files_are_replaced_and_folders_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_IS_POSIX", False)
    for text in ("old", "new"):
        with replacing(tmp_path / "a") as written:
            written.write_text(text)
        with replacing_together(tmp_path / "b", tmp_path / "c") as folder:
            (folder / "b").write_text(text)
            (folder / "c").write_text(text)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys("abc", "new")
    with pytest.raises(OSError, match="Linux or macOS"), replacing(tmp_path / "d", folder=True):
        pass


def test_a_file_is_created_whole_and_only_where_none_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ampopt.system.atomic.open", FullDisk, raising=False)
        with pytest.raises(OSError, match="No space left"):
            create(tmp_path / "key", b"secret", 0o600)
    assert list(tmp_path.iterdir()) == []
    create(tmp_path / "key", b"secret", 0o600)
    with pytest.raises(FileExistsError):
        create(tmp_path / "key", b"other", 0o600)
    assert (tmp_path / "key").read_bytes() == b"secret"
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
@FORMS
def test_what_is_replaced_keeps_its_permissions(as_folder: bool, mode: int, tmp_path: Path) -> None:
    mode |= 0o700 if as_folder else 0
    target = save(tmp_path / "b", as_folder=as_folder)
    target.chmod(mode)
    with replacing(target, folder=as_folder) as temporary:
        open_to_others = temporary.stat().st_mode & 0o077
        (temporary / "a" if as_folder else temporary).write_bytes(b"new")
    assert open_to_others == mode & 0o077
    assert target.stat().st_mode & 0o777 == mode


def test_of_another_users_file_nobody_may_write_to_what_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save(tmp_path / "b")
    for mode, expected in ((0o666, 0o644), (0o660, 0o640), (0o600, 0o600)):
        target.chmod(mode)
        with monkeypatch.context() as patch:
            patch.setattr("ampopt.system.atomic.os.geteuid", lambda: 12345)
            save(target)
        assert target.stat().st_mode & 0o777 == expected


def test_files_that_are_replaced_together_keep_their_permissions(tmp_path: Path) -> None:
    target, old, new = (tmp_path / name for name in ("m.onnx", "old.data", "new.data"))
    for path, mode in ((target, 0o600), (old, 0o640)):
        path.touch()
        path.chmod(mode)
    with replacing_together(target, old, new) as folder:
        assert folder.stat().st_mode & 0o077 == 0
        for path in (target, old, new):
            (folder / path.name).write_bytes(b"new")
    assert [path.stat().st_mode & 0o777 for path in (target, old, new)] == [0o600, 0o640, 0o600]


def test_a_new_file_and_one_of_another_kind_have_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    (tmp_path / "folder").mkdir()
    save(tmp_path / "b").chmod(0o600)
    save(tmp_path / "b", as_folder=True)
    with replacing(tmp_path / "new") as temporary:
        temporary.write_bytes(b"new")
    for made, usual in (("new", "usual"), ("b", "folder")):
        assert (tmp_path / made).stat().st_mode == (tmp_path / usual).stat().st_mode


def test_a_file_gets_more_names_and_takes_none_from_another(tmp_path: Path) -> None:
    file, free, taken = (tmp_path / name for name in ("file", "free", "taken"))
    file.write_bytes(b"made")
    taken.write_bytes(b"theirs")
    also_named(file, taken, free)
    assert free.samefile(file)
    assert taken.read_bytes() == b"theirs"
    with pytest.raises(OSError, match="nowhere"):
        also_named(file, tmp_path / "nowhere" / "name")
