"""Whoever is killed while he saves a bundle leaves the old one or the new one, and no litter for long."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ampopt.bundle.files import open_bundle
from ampopt.errors import BundleError
from ampopt.system import atomic
from ampopt.system.atomic import SUFFIX, replacing
from tests.support.bundles import FILES, FORMS, save

SIZE = 1 << 20
KILLS = 100


def version(number: int) -> dict[str, bytes | Path]:
    """Files whose every byte is of one version."""
    return {name: bytes([number]) * size for name, size in (("a.bin", SIZE), ("b.bin", 10), ("c.bin", SIZE))}


def kill_savers(path: Path, as_folder: bool) -> None:
    """Kill one saver after the other and look at the bundle each time; print what was seen.

    Runs in a process of its own, which has no threads and no torch, so that it can fork.
    """
    last = 255
    save(path, version(last), as_folder=as_folder)
    start = time.monotonic()
    for _ in range(5):
        save(path, version(last), as_folder=as_folder)
    duration = (time.monotonic() - start) / 5
    draw, left, new = random.Random(0), 0, 0
    for kill in range(KILLS):
        child = os.fork()
        if child == 0:
            for count in range(1000):
                save(path, version((kill * 7 + count) % 250), as_folder=as_folder)
        time.sleep(draw.random() * 2.5 * duration)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left += any(name.endswith(SUFFIX) for name in os.listdir(path.parent))
        bundle = open_bundle(path)
        found = {data[0] for data in map(bundle.read, bundle.names) if data == data[:1] * len(data)}
        assert len(found) == 1, "a mix of two bundles"
        assert [len(bundle.read(name)) for name in bundle.names] == [SIZE, 10, SIZE]
        new += found != {last}
        (last,) = found
    save(path, version(255), as_folder=as_folder)
    print(left, new, len(os.listdir(path.parent)))


def save_until(step: int, path: Path, as_folder: bool) -> None:
    """Save, and die before the given look at or change of the file system; never returns."""
    count = 0

    def step_on(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        count += event == "open" or event.startswith(("os.", "ctypes."))
        if count > step:
            signal.raise_signal(signal.SIGKILL)

    try:
        sys.addaudithook(step_on)
        save(path, {"a": b"1", "b": b"1"}, as_folder=as_folder)
        os._exit(0)
    finally:
        os._exit(1)


def kill_at_every_step(path: Path, as_folder: bool) -> None:
    """Kill a saver before its first step, the next one before its second; print what was there afterwards."""
    seen: list[bytes] = []
    status = None
    while status != 0:
        save(path, {"a": b"0", "b": b"0"}, as_folder=as_folder)
        assert os.listdir(path.parent) == [path.name]
        if (child := os.fork()) == 0:
            save_until(len(seen), path, as_folder)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        bundle = open_bundle(path)
        seen.append(bundle.read("a"))
        assert bundle.read("b") == seen[-1]
    assert seen == sorted(seen)  # the old one up to one moment, the new one from then on
    print(seen.count(b"0"), seen.count(b"1"))


@FORMS
def test_a_kill_before_any_step_leaves_the_old_bundle_or_the_new_one(as_folder: bool, tmp_path: Path) -> None:
    found = in_a_process("kill_at_every_step", tmp_path / "b", as_folder)
    assert found[0] > 5
    assert found[1] > 1


def in_a_process(function: str, path: Path, as_folder: bool) -> list[int]:
    """The numbers that a function of this file prints, in a process without threads and torch."""
    script = f"from tests.system.test_atomic import *; {function}(Path({str(path)!r}), {as_folder})"
    found = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return [int(word) for word in found.stdout.split()]


@pytest.mark.slow
@FORMS
def test_a_hundred_kills_never_leave_a_mixed_or_unreadable_bundle(as_folder: bool, tmp_path: Path) -> None:
    left, new, names = in_a_process("kill_savers", tmp_path / "b", as_folder)
    assert left > KILLS // 10  # the kills did hit savers at work
    assert new > KILLS // 10  # and others when they had saved
    assert names == 1  # the last save removed what they left


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
    fsync, exchange, rename = atomic._fsync, atomic._exchange, os.rename

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
    monkeypatch.setattr(os, "rename", note_rename)
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
