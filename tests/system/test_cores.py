"""How much of the processor a process may use, as Linux's control groups tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampopt.ort.knobs import thread_counts
from ampopt.system import cores
from ampopt.system.cores import cpu_quota, threads_within_quota

V1 = {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}
FREE = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}


@pytest.fixture
def grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cores, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "own")
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="ascii")


@pytest.mark.parametrize(
    ("own", "groups", "quota"),
    [
        ("0::/\n", {"": {"cpu.max": "200000 100000\n"}}, 2.0),
        ("0::/a/b\n", {"a": {"cpu.max": "50000 100000\n"}, "a/b": {"cpu.max": "max 100000\n"}}, 0.5),
        ("0::/a/b\n", {"a": {"cpu.max": "300000 100000\n"}, "a/b": {"cpu.max": "250000 100000\n"}}, 2.5),
        ("0::/elsewhere\n", {"": {"cpu.max": "100000 100000\n"}}, 1.0),  # as a container sees it
        ("0::/\n", {"": {"cpu.max": "max 100000\n"}}, None),
        ("0::/\n", {}, None),
        ("2:cpuacct:/\n1:cpu:/a\n0::/\n", {"cpu": FREE, "cpu/a": V1}, 1.5),
        ("4:cpu,cpuacct:/a\n", {"cpu,cpuacct/a": V1}, 1.5),
        ("3:cpuset:/a\n", {"cpuset/a": V1}, None),  # which limits no time
        ("1:cpu:/a\n", {"cpu/a": FREE}, None),
        ("0::/\n", {"": {"cpu.max": "what is this\n"}}, None),
        ("1:cpu:/\n", {"cpu": {**V1, "cpu.cfs_period_us": "0\n"}}, None),
    ],
)
def test_the_quota_is_the_tightest_of_the_groups_around_a_process(
    own: str, groups: dict[str, dict[str, str]], quota: float | None, grouped: Path
) -> None:
    (grouped / "own").write_text(own, encoding="ascii")
    for name, files in groups.items():
        write(grouped / "cgroup" / name, files)
    assert cpu_quota() == quota


def test_there_is_no_quota_where_there_are_no_groups(grouped: Path) -> None:
    assert not (grouped / "own").exists()
    assert cpu_quota() is None
    assert threads_within_quota(8) == 8


@pytest.mark.parametrize(("quota", "threads"), [(None, 6), (9.0, 6), (6.0, 6), (2.5, 2), (0.5, 1)])
def test_threads_within_a_quota_are_whole_and_at_least_one(
    quota: float | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert threads_within_quota(6) == threads


def test_engines_are_tried_with_the_threads_of_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.ort.knobs.usable_cpus", lambda: range(100, 116))  # each a core of its own
    assert thread_counts() == [1, 8, 16]
    monkeypatch.setattr(cores, "cpu_quota", lambda: 3.2)
    assert thread_counts() == [1, 3, 8, 16]
