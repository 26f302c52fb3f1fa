"""Our C++ is compiled once for this machine; where it cannot be, that is said."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ampopt.system import native
from ampopt.system.cache_folder import cache_folder, clear
from ampopt.system.native import CompilerError, library
from tests.support.compiler import needs_compiler


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A source of one function, in place of ours; the cache is empty."""
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "SOURCES", tmp_path / "cpp")
    native._key.cache_clear()
    (tmp_path / "cpp").mkdir()
    file = tmp_path / "cpp" / "sample.cpp"
    file.write_text('extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n')
    return file


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


@needs_compiler
def test_a_library_is_compiled_once_for_its_macros_and_its_source(source: Path) -> None:
    one = library("sample.cpp", "ANSWER=1")
    assert answer(one) == 1
    written = one.stat().st_mtime_ns
    os.utime(one, (0, 0))
    assert library("sample.cpp", "ANSWER=1") == one
    assert 0 < one.stat().st_mtime_ns != written, "it was used: others go before it"
    other = library("sample.cpp", "ANSWER=2")
    assert answer(other) == 2
    source.write_text(source.read_text().replace("ANSWER;", "ANSWER + 10;"))
    native._key.cache_clear()
    assert answer(library("sample.cpp", "ANSWER=1")) == 11
    assert len(list(one.parent.iterdir())) == 3


@needs_compiler
def test_it_is_compiled_again_when_the_cache_was_cleared(source: Path) -> None:
    path = library("sample.cpp", "ANSWER=3")
    path.unlink()
    assert answer(library("sample.cpp", "ANSWER=3")) == 3


@needs_compiler
@pytest.mark.parametrize("removed_before", ["lstat", "utime"])
def test_it_is_compiled_again_when_the_cache_is_cleared_meanwhile(
    removed_before: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library("sample.cpp", "ANSWER=3")

    place: Any = os if removed_before == "utime" else Path
    looks: Callable[..., Any] = getattr(place, removed_before)

    def cleared(file: Path, *args: Any) -> Any:
        monkeypatch.undo()
        monkeypatch.setattr(native, "SOURCES", source.parent)
        monkeypatch.setenv("AMPOPT_CACHE", str(path.parent))
        path.unlink()
        return looks(file, *args)

    monkeypatch.setattr(place, removed_before, cleared)
    assert answer(library("sample.cpp", "ANSWER=3")) == 3


@needs_compiler
def test_clearing_the_cache_while_it_is_compiled_does_no_harm(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run

    def compiled_and_cleared(*args: Any, **options: Any) -> Any:
        done = run(*args, **options)
        clear(source.parent.parent / "cache")
        return done

    monkeypatch.setattr(subprocess, "run", compiled_and_cleared)
    copy = shutil.copyfile

    def copied_and_cleared(made: Path, kept: Path) -> None:
        copy(made, kept)
        clear(kept.parent)

    monkeypatch.setattr(shutil, "copyfile", copied_and_cleared)
    assert answer(library("sample.cpp", "ANSWER=8")) == 8


@needs_compiler
def test_without_a_cache_it_is_this_process_s_own(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cache_folder", cache_folder)  # tests share a folder
    monkeypatch.setenv("AMPOPT_CACHE", "")
    path = library("sample.cpp", "ANSWER=4")
    assert answer(path) == 4
    assert path.parent.name.startswith("ampopt-")


@needs_compiler
def test_several_at_once_leave_one_sound_library(source: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: library("sample.cpp", "ANSWER=5"), range(4)))
    assert len(paths) == 1
    assert answer(paths.pop()) == 5
    assert len(list(source.parent.parent.glob("cache/*"))) == 1


@needs_compiler
def test_a_library_that_another_user_put_there_is_not_run(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library("sample.cpp", "ANSWER=6")
    path.write_bytes(b"planted")
    assert library("sample.cpp", "ANSWER=6").read_bytes() == b"planted", "it is believed to be ours"
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert answer(library("sample.cpp", "ANSWER=6")) == 6


@needs_compiler
def test_code_that_does_not_compile_is_an_error_that_says_why(source: Path) -> None:
    with pytest.raises(CompilerError, match=r"(?s)fails with status 1: .*ANSWER"):
        library("sample.cpp")
    assert not list(source.parent.parent.glob("cache/*"))


@needs_compiler
def test_a_compiler_that_hangs_is_an_error(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "MOST_SECONDS", 0.001)
    start = time.perf_counter()
    with pytest.raises(CompilerError, match="takes longer than"):
        library("sample.cpp", "ANSWER=7")
    assert time.perf_counter() - start < 60


@needs_compiler
def test_a_folder_that_cannot_be_written_is_an_error(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CompilerError, match="cannot be kept in"):
        library("sample.cpp", "ANSWER=8")


def test_without_a_compiler_the_error_names_those_that_were_looked_for(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompilerError, match=r"no C\+\+ compiler: \$CXX, c\+\+, g\+\+, clang\+\+"):
        library("sample.cpp")
