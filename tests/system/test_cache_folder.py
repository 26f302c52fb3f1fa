"""The cache's folder: whatever lies in it, nothing hangs; whatever fails, nothing is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ampopt.search.tuning_cache import Known, TuningCache
from ampopt.system import cache_folder
from ampopt.system.atomic import SUFFIX
from ampopt.system.cache_folder import clear, is_ours, keep, kept, kept_files
from tests.system.test_plain_files import ODD

KEY = "ab" * 32


@pytest.mark.parametrize("case", [case for case in ODD if case != "nothing"])
def test_what_is_no_plain_file_is_nothing_kept_and_makes_room(case: str, tmp_path: Path) -> None:
    file = tmp_path / f"{KEY}.json"
    ODD[case][0](file)
    cache = TuningCache(tmp_path)
    assert cache.find(KEY) is None
    cache.store(KEY, {"fp32": ()})
    kept_now = Known({"fp32": ()}, complete=True)
    assert cache.find(KEY) == (None if case == "folder" else kept_now)
    assert not list(tmp_path.glob(f"*{SUFFIX}"))


@pytest.mark.parametrize("case", [case for case in ODD if case != "nothing"])
def test_only_a_plain_file_is_run(case: str, tmp_path: Path) -> None:
    ODD[case][0](tmp_path / "library.so")
    assert not is_ours(tmp_path / "library.so")


def test_a_link_is_not_run_even_if_it_leads_to_our_file(tmp_path: Path) -> None:
    (tmp_path / "own.so").write_bytes(b"")
    (tmp_path / "library.so").symlink_to("own.so")
    assert is_ours(tmp_path / "own.so")
    assert not is_ours(tmp_path / "library.so")


def test_another_users_file_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path / "a.json", b"x")
    assert kept(tmp_path / "a.json") == b"x"
    monkeypatch.setattr("ampopt.system.cache_folder.os.getuid", lambda: 12345)
    with pytest.raises(ValueError, match="another user"):
        kept(tmp_path / "a.json")


def test_a_larger_file_than_any_kept_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="more than"):
        kept(tmp_path / "a.json")


def _full(*_args: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def _cannot(*_args: Any) -> NoReturn:
    raise OSError(errno.EIO, "Input/output error")


def _interrupted(*_args: Any) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "stand_in"),
    [("pathlib.Path.write_bytes", _full), ("os.replace", _cannot), ("os.replace", _interrupted)],
    ids=["full disk", "no rename", "Ctrl-C"],
)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    name: str, stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "a.json", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(name, stand_in)
        if stand_in is _interrupted:
            with pytest.raises(KeyboardInterrupt):
                keep(tmp_path / "a.json", b"new")
        else:
            keep(tmp_path / "a.json", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert kept(tmp_path / "a.json") == b"old"


def test_clearing_removes_what_others_put_there_but_no_folder(tmp_path: Path) -> None:
    keep(tmp_path / "a.json", b"x")
    os.mkfifo(tmp_path / "b.onnx")
    (tmp_path / "c.so").symlink_to("nowhere")
    (tmp_path / "d.json").mkdir()
    assert len(kept_files(tmp_path)) == 3
    assert clear(tmp_path) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["d.json"]


def test_odd_files_are_the_first_to_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "MOST_FILES", 1)
    os.mkfifo(tmp_path / "b.onnx")
    os.utime(tmp_path / "b.onnx", (0, 0))
    keep(tmp_path / "a.json", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
