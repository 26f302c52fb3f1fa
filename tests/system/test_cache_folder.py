"""The cache's folder: whatever lies in it, nothing hangs; whatever fails, nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import onnx
import pytest
import torch
from torch import fx, nn

from ampopt.engines import onnx_cache
from ampopt.search.tuning_cache import Known, TuningCache, key_of
from ampopt.system import cache_folder, native
from ampopt.system.atomic import SUFFIX, replacing
from ampopt.system.cache_folder import CacheError, clear, is_ours, keep, kept, kept_files, size
from tests.helpers import program_of
from tests.system.test_plain_files import ODD

KEY = "ab" * 32
LIBRARY, FOLDER = f"onnx_ops-{KEY[:32]}.so", f"{'0' * 64}.json"


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
    keep(tmp_path / f"{KEY}.json", b"x")
    os.mkfifo(tmp_path / f"{KEY}.onnx")
    (tmp_path / LIBRARY).symlink_to("nowhere")
    (tmp_path / FOLDER).mkdir()
    assert len(kept_files(tmp_path)) == 3
    assert clear(tmp_path) == 3
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


def test_what_a_living_process_writes_is_not_removed_and_what_a_killed_one_left_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, left = tmp_path / f"{KEY}.json", tmp_path / f".{KEY}.onnx.{'0' * 16}{SUFFIX}"
    left.write_bytes(b"cut off")
    with replacing(file) as made:
        made.write_bytes(b"whole")
        os.utime(made, (0, 0))
        assert clear(tmp_path) == 1
        assert os.listdir(tmp_path) == [made.name]
        monkeypatch.setattr(cache_folder, "MOST_FILES", 1)
        keep(tmp_path / LIBRARY, b"makes room")
        assert made.exists()
    assert kept(file) == b"whole"
    assert clear(tmp_path) == 2


def test_where_no_lock_tells_who_writes_everything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.system.atomic.locked", lambda _descriptor: None)
    (tmp_path / f".{KEY}.onnx.{'0' * 16}{SUFFIX}").write_bytes(b"cut off")
    (tmp_path / f".{KEY}.json.{'0' * 16}{SUFFIX}").symlink_to("nowhere")
    assert clear(tmp_path) == 2
    assert not os.listdir(tmp_path)


def test_odd_files_are_the_first_to_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "MOST_FILES", 1)
    os.mkfifo(tmp_path / f"{KEY}.onnx")
    os.utime(tmp_path / f"{KEY}.onnx", (0, 0))
    keep(tmp_path / f"{KEY}.json", b"x")
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.json"]


USERS_OWN = (
    "package.json", "my.onnx", "net.so", f"{KEY[:-1]}.json", f"{KEY}.json.json", f"{KEY.upper()}.onnx",
    f"{KEY}.txt", f"{'g' * 64}.json", f"lib-{KEY}.so", f"x{SUFFIX}", f".my.onnx.{'0' * 16}{SUFFIX}",
)  # fmt: skip


def test_files_of_the_users_own_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "MOST_FILES", 1)
    for name in USERS_OWN:
        (tmp_path / name).write_text("precious")
        os.utime(tmp_path / name, (0, 0))
    for key in ("0" * 64, "1" * 64):
        keep(tmp_path / f"{key}.json", b"x")
    assert size(tmp_path) == (1, 1)
    assert clear(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == set(USERS_OWN)


def test_whatever_writes_to_the_folder_gives_names_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    monkeypatch.setattr("ampopt.engines.onnx_cache.cache_folder", cache_folder.cache_folder)
    TuningCache(tmp_path).store(key_of(program_of(nn.ReLU(), torch.ones(2)), {}), {"fp32": ()})
    graph = fx.symbolic_trace(nn.ReLU())
    onnx_cache.exported(graph, [torch.ones(2)], lambda: onnx.ModelProto())
    monkeypatch.setattr("ampopt.system.native._compiler", lambda: "c++")
    monkeypatch.setattr("ampopt.system.native._compile", lambda _command, file: file.write_bytes(b""))
    for source in native.SOURCES.glob("*.cpp"):
        native.library(source.name)
    with contextlib.suppress(KeyboardInterrupt), replacing(tmp_path / f"{KEY}.json"):
        monkeypatch.setattr("ampopt.system.atomic._remove", lambda _path: None)  # as where one is killed
        raise KeyboardInterrupt
    assert len(names := os.listdir(tmp_path)) >= 5
    assert {path.name for path in kept_files(tmp_path)} == set(names)


def test_clearing_says_what_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (tmp_path / f"{digit * 64}.json" for digit in "01")
    for file in (first, second):
        keep(file, b"x")
    unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path == first:
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    with pytest.raises(CacheError, match=rf"1 are removed and 1 cannot be: {first.name} \(Permission denied"):
        clear(tmp_path)
    assert list(tmp_path.iterdir()) == [first]


@pytest.mark.parametrize("work", [clear, size])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    work: Callable[[Path], Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"cannot be listed .*AMPOPT_CACHE"):
        work(tmp_path / "file")
    assert size(tmp_path / "missing") == (0, 0)


@pytest.mark.parametrize("name", ["AMPOPT_CACHE", "XDG_CACHE_HOME"])
def test_a_relative_folder_is_the_one_of_the_first_use(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    monkeypatch.delenv("AMPOPT_CACHE", raising=False)
    monkeypatch.setenv(name, f"cache_{tmp_path.name}")
    monkeypatch.chdir(tmp_path / "first")
    found = cache_folder.cache_folder()
    assert found is not None
    assert found.is_relative_to(tmp_path / "first" / f"cache_{tmp_path.name}")
    monkeypatch.chdir(tmp_path / "second")  # as a model's code may
    assert cache_folder.cache_folder() == found


def test_a_relative_folder_is_none_where_the_current_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", f"cache_{tmp_path.name}")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cache_folder.cache_folder() is None
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    assert cache_folder.cache_folder() == tmp_path
