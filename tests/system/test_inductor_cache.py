"""What killed compilers left in inductor's cache."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from torch._inductor.runtime import cache_dir_utils

from ampopt.system.inductor_cache import remove_cut_off_builds


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of inductor's, in which these libraries would lie."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for name in ("locks", "ab", "precompiled_headers", "precompiled_headers/locks"):
        (tmp_path / name).mkdir()
    return tmp_path


def _build(folder: Path, name: str, *suffixes: str, over: bool = False) -> list[Path]:
    """The files of a build, and its folder where it is not over."""
    if not over:
        (folder / f"{name}_CxxBuild").mkdir()
        (folder / f"{name}_CxxBuild" / "scratch.s").touch()
    files = [folder / f"{name}{suffix}" for suffix in suffixes]
    for file in files:
        file.touch()
    return files


def test_a_build_that_was_cut_off_is_removed_but_for_its_source(cache: Path) -> None:
    source, *built = _build(cache / "ab", "abc.main", ".cpp", ".o", ".so")
    remove_cut_off_builds()
    assert source.exists()
    assert not any(file.exists() for file in built)
    assert not list(cache.glob("*/*_CxxBuild"))


def test_a_header_that_was_cut_off_is_removed(cache: Path) -> None:
    header, compiled = _build(cache / "precompiled_headers", "abc.h", "", ".gch")
    remove_cut_off_builds()
    assert (header.exists(), compiled.exists()) == (True, False)


def test_headers_lie_in_inductors_own_folder_wherever_the_cache_is(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("own")
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", lambda: str(folder))
    (folder / "precompiled_headers" / "locks").mkdir(parents=True)
    header, compiled = _build(folder / "precompiled_headers", "abc.h", "", ".gch")
    remove_cut_off_builds()
    assert (header.exists(), compiled.exists()) == (True, False)


def test_a_build_that_is_over_stays(cache: Path) -> None:
    (cut_off,) = _build(cache / "ab", "abc.main", ".so")
    (over,) = _build(cache / "ab", "abd.main", ".so", over=True)
    remove_cut_off_builds()
    assert (cut_off.exists(), over.exists()) == (False, True)


@pytest.mark.parametrize(
    ("folder", "name", "lock"),
    [
        ("ab", "abc.main", "locks/abc.lock"),
        ("precompiled_headers", "abc.h", "precompiled_headers/locks/abc.lock"),
    ],
)
def test_a_build_that_goes_on_is_left_alone(folder: str, name: str, lock: str, cache: Path) -> None:
    (library,) = _build(cache / folder, name, ".so")
    descriptor = os.open(cache / lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        remove_cut_off_builds()
        assert library.exists()
    finally:
        os.close(descriptor)
    remove_cut_off_builds()
    assert not library.exists()


def test_what_cannot_be_removed_stays(cache: Path) -> None:
    (library,) = _build(cache / "ab", "abc.main", ".so")
    (cache / "locks").rmdir()
    remove_cut_off_builds()
    assert library.exists()
