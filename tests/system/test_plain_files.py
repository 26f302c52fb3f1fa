"""What is no plain file of a bounded size is refused at once, and said to be what it is."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampopt.errors import InputError
from ampopt.system.plain_files import NotPlainError, open_named, open_plain, read_at_most


def listening(path: Path) -> None:
    """A socket at a path, whose name has to be short."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, "FIFO"),
    "socket": (listening, "FIFO, socket or device"),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), "device"),
    "terminal": (lambda path: path.symlink_to("/dev/tty"), "device"),
    "folder": (Path.mkdir, "a folder"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "no file .*link to what is not there"),
    "link to itself": (lambda path: path.symlink_to(path), "cannot be read"),
    "nothing": (lambda path: None, "there is no file"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_no_plain_file_is_said_to_be_what_it_is(case: str, tmp_path: Path) -> None:
    make, reason = ODD[case]
    make(tmp_path / "x")
    with pytest.raises(InputError, match=f"--npz: .*{reason}"):
        open_named(tmp_path / "x", "--npz")


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be read"):
        open_named(Path("a\0b"), "--npz")


def test_a_file_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("")

    def denied(*_args: object, **_options: object) -> int:
        raise PermissionError(13, "Permission denied")  # root may read everything

    monkeypatch.setattr("ampopt.system.plain_files.os.open", denied)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        open_named(tmp_path / "x", "--npz")


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match="has 1099511627776 bytes, and 1000 is the most"):
        open_named(tmp_path / "x", "--npz", 1000)
    with open_plain(tmp_path / "x") as file, pytest.raises(NotPlainError, match="more than 1000 bytes"):
        read_at_most(file, 1000)


def test_what_becomes_a_fifo_after_it_was_looked_at_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("")
    opened = os.open

    def replaced(path: Path, *args: Any, **options: Any) -> int:
        path.unlink()
        os.mkfifo(path)
        return opened(path, *args, **options)

    monkeypatch.setattr("ampopt.system.plain_files.os.open", replaced)
    with pytest.raises(NotPlainError, match="FIFO"):
        open_plain(tmp_path / "x")


def test_links_are_followed_unless_they_may_not_be(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("here")
    (tmp_path / "x").symlink_to("real")
    with open_plain(tmp_path / "x") as file:
        assert read_at_most(file, 4) == b"here"
    with pytest.raises(NotPlainError, match="symbolic link"):
        open_plain(tmp_path / "x", follow=False)
