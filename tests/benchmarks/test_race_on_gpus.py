"""Several races at once, each in a process with a GPU and cores of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.race_on_gpus import longest_first, run_all
from tests.benchmarks.rows import contestant, race_row

CORES = sorted(os.sched_getaffinity(0))


def row(network: str, lane: str, io: str = "fp32", prepare_s: float = 1.0) -> dict[str, Any]:
    return race_row(network, lane, io, eager={**contestant(1.0), "prepare_s": prepare_s})


def test_what_took_longest_begins_and_what_is_not_known_before_it() -> None:
    known = [row("a", "fp32", prepare_s=5.0), row("a", "amp", prepare_s=50.0), row("b", "amp", "lane", 20.0)]
    races = [("a", "fp32", "fp32"), ("b", "amp", "lane"), ("b", "amp", "fp32"), ("a", "amp", "fp32")]
    assert longest_first(races, known) == [races[2], races[3], races[1], races[0]]


class Processes:
    """In place of processes: they note what they were given, and write a row or fail."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.both = threading.Barrier(2)

    def run(self, command: list[str], *, env: dict[str, str], **_: object) -> Any:
        network, lane, io, folder = (
            command[command.index(f"--{name}") + 1] for name in ("models", "lanes", "io", "out")
        )
        cores = command[command.index("--cores") + 1 : command.index("--out")]
        self.seen.append({"race": (network, lane, io), "gpu": env["CUDA_VISIBLE_DEVICES"], "cores": cores})
        if network != "last":
            self.both.wait(timeout=30)  # it comes to an end only if two run at once
        if lane == "broken":
            return subprocess.CompletedProcess(command, 1, stdout="why it failed")
        Path(folder, "gpu").mkdir()
        Path(folder, "gpu", "race.json").write_text(json.dumps([row(network, lane, io)]))
        return subprocess.CompletedProcess(command, 0, stdout="")


def test_races_run_at_once_and_what_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processes, done = Processes(), list[dict[str, Any]]()
    monkeypatch.setattr(subprocess, "run", processes.run)
    races = [("a", "fp32", "fp32"), ("b", "broken", "fp32"), ("last", "amp", "lane")]
    assert run_all(races, [3, 5], ["--seconds", "1"], done.append) == [races[1]]
    assert sorted(each["network"] for each in done) == ["a", "last"]
    assert {each["gpu"] for each in processes.seen[:2]} == {"3", "5"}
    cores = [set(each["cores"]) for each in processes.seen[:2]]
    assert not cores[0] & cores[1] or len(CORES) == 1
    assert "why it failed" in capsys.readouterr().out


def test_rows_of_several_races_are_put_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--lanes", "fp32", "amp", "--models", "resnet18", "--thorough", "--seconds", "2"]
    options += ["--gpus", "0", "1", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["peers", *options])
    passed: list[list[str]] = []

    def run(races: Any, gpus: Any, options: list[str], done: Any) -> list[Any]:
        passed.append([*map(str, gpus), *options])
        for race in races:
            done(row(*race))
        return [("resnet18", "other", "fp32")]

    monkeypatch.setattr(peers, "run_all", run)
    with pytest.raises(SystemExit, match="no row of resnet18, other, fp32"):
        peers.main()
    assert passed == [["0", "1", "--device", "cpu", "--seconds", "2.0", "--no-default-call", "--thorough"]]
    (file,) = tmp_path.glob("*/race.json")
    found = [(each["lane"], each["io"]) for each in json.loads(file.read_text())]
    assert found == [("fp32", "fp32"), ("amp", "fp32"), ("amp", "lane")]
