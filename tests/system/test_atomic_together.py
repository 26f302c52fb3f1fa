"""Files that belong together are replaced together: no reader finds one with another's companions."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampopt.system.atomic import replacing_together


def write_pair(target: Path, text: str, *, companion: bool = True) -> None:
    """Write a target and its companion, if it is to have one, with the same text."""
    companions = [target.with_name("m.data")]
    with replacing_together(target, *companions) as folder:
        for path in (target, *companions[:companion]):
            (folder / path.name).write_text(text)
        (folder / "notes").write_text("of the writer's own")


def test_files_that_belong_together_appear_together(tmp_path: Path) -> None:
    for text in ("old", "new"):
        write_pair(tmp_path / "m", text)
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"m": text, "m.data": text}
    write_pair(tmp_path / "m", "newest", companion=False)
    assert (tmp_path / "m").read_text() == "newest"


def test_an_error_leaves_all_that_belong_together(tmp_path: Path) -> None:
    write_pair(tmp_path / "m", "old")

    def fail() -> None:
        with replacing_together(tmp_path / "m", tmp_path / "m.data") as folder:
            (folder / "m").write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"m": "old", "m.data": "old"}


def test_a_kill_between_two_files_leaves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair(tmp_path / "m", "old")
    real, done = os.replace, list[str]()

    def replace(source: Path, target: Path) -> None:
        if done:
            raise KeyboardInterrupt
        done.append(target.name)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            write_pair(tmp_path / "m", "new")
    assert done == ["m.data"]
    assert [path.name for path in tmp_path.iterdir()] == ["m.data"]
    write_pair(tmp_path / "m", "newest")
    assert {path.read_text() for path in tmp_path.iterdir()} == {"newest"}


@pytest.mark.skipif(os.name != "posix", reason="there are no locks")
def test_writers_of_several_files_replace_them_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = threading.Thread(target=write_pair, args=(tmp_path / "m", "other"))
    real, moved = os.replace, list[str]()

    def replace(source: Path, target: Path) -> None:
        moved.append(f"{threading.current_thread() is other}: {target.name}")
        real(source, target)
        if len(moved) == 1:
            other.start()
            other.join(0.5)  # it ends here, between the first one's files, if nothing holds it back

    monkeypatch.setattr(os, "replace", replace)
    write_pair(tmp_path / "m", "first")
    other.join()
    assert moved == ["False: m.data", "False: m", "True: m.data", "True: m"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"m": "other", "m.data": "other"}


@pytest.mark.skipif(os.name != "posix", reason="there are no locks")
def test_nobody_waits_for_a_writer_who_was_killed(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from ampopt.system.atomic import replacing_together

def killed(source, target):
    os.kill(os.getpid(), signal.SIGKILL)

os.replace = killed
with replacing_together(Path(sys.argv[1]), Path(sys.argv[1] + ".data")) as folder:
    (folder / "m").touch()
    (folder / "m.data").touch()
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")]).returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2  # what it wrote, and its turn
    write_pair(tmp_path / "m", "next")
    assert sorted(os.listdir(tmp_path)) == ["m", "m.data"]


IN_THE_PLACE: dict[str, Callable[[Path], object]] = {
    "a link to a file": lambda path: path.symlink_to(path.with_name("theirs")),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
}


@pytest.mark.skipif(os.name != "posix", reason="there are no locks")
@pytest.mark.parametrize("kind", IN_THE_PLACE)
def test_what_is_in_the_place_of_the_lock_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import fcntl

    (tmp_path / "theirs").write_text("theirs")
    IN_THE_PLACE[kind](tmp_path / ".m.turn-to-replace-.ampopt-save")
    monkeypatch.setattr(fcntl, "flock", counted(fcntl.flock, 5000))
    write_pair(tmp_path / "m", "new")
    assert (tmp_path / "m").read_text() == (tmp_path / "m.data").read_text() == "new"
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not (tmp_path / "nothing").exists()


def counted(function: Callable[..., Any], most: int) -> Callable[..., Any]:
    """A function that fails once it is called more often than `most`."""
    calls = list[None]()

    def call(*args: Any) -> Any:
        calls.append(None)
        assert len(calls) <= most, "it is called without end"
        return function(*args)

    return call


@pytest.mark.skipif(os.name != "posix", reason="there are no locks")
@pytest.mark.parametrize("failure", [errno.EACCES, errno.EPERM])
def test_a_lock_that_another_user_left_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    lock, real = tmp_path / ".m.turn-to-replace-.ampopt-save", os.open
    lock.touch()

    def refused(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == lock:
            raise OSError(failure, os.strerror(failure), str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refused)
    write_pair(tmp_path / "m", "new")
    assert (tmp_path / "m").read_text() == (tmp_path / "m.data").read_text() == "new"
    assert lock.exists()


@pytest.mark.skipif(os.name != "posix", reason="there are no locks")
def test_a_lock_that_is_always_removed_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    lock, real = tmp_path / ".m.turn-to-replace-.ampopt-save", fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        real(descriptor, operation)
        if operation == fcntl.LOCK_EX:
            lock.unlink()

    monkeypatch.setattr(fcntl, "flock", counted(flock, 5000))
    write_pair(tmp_path / "m", "new")
    assert sorted(os.listdir(tmp_path)) == ["m", "m.data"]
