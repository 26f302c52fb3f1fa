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

CORES = sorted(os.sched_getaffinity(0))


def row(network: str, **prepare_s: float) -> dict[str, Any]:
    contestants = {lane: {"lane": lane, "commit": "c", "prepare_s": s} for lane, s in prepare_s.items()}
    return {"network": network, "environment": {"device": "d"}, "commit": "c", "contestants": contestants}


def test_what_took_longest_begins_and_what_is_not_known_before_it() -> None:
    known = [row("a", fp32=5.0, amp=50.0), row("b", fp32=20.0)]
    races = [("a", "fp32"), ("b", "fp32"), ("b", "amp"), ("a", "amp")]
    assert longest_first(races, known) == [("b", "amp"), ("a", "amp"), ("b", "fp32"), ("a", "fp32")]


class Processes:
    """In place of processes: they note what they were given, and write a row or fail."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.both = threading.Barrier(2)

    def run(self, command: list[str], *, env: dict[str, str], **_: object) -> Any:
        network, lane, folder = (
            command[command.index(f"--{name}") + 1] for name in ("models", "lanes", "out")
        )
        cores = command[command.index("--cores") + 1 : command.index("--out")]
        self.seen.append({"race": (network, lane), "gpu": env["CUDA_VISIBLE_DEVICES"], "cores": cores})
        if network != "last":
            self.both.wait(timeout=30)  # it comes to an end only if two run at once
        if lane == "broken":
            return subprocess.CompletedProcess(command, 1, stdout="why it failed")
        Path(folder, "gpu").mkdir()
        Path(folder, "gpu", "peers.json").write_text(json.dumps([row(network, **{lane: 1.0})]))
        return subprocess.CompletedProcess(command, 0, stdout="")


def test_races_run_at_once_and_what_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processes, done = Processes(), list[dict[str, Any]]()
    monkeypatch.setattr(subprocess, "run", processes.run)
    races = [("a", "fp32"), ("b", "broken"), ("last", "amp")]
    assert run_all(races, [3, 5], ["--seconds", "1"], done.append) == [("b", "broken")]
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
        for network, lane in races:
            done(row(network, **{lane: 1.0}))
        return [("resnet18", "other")]

    monkeypatch.setattr(peers, "run_all", run)
    with pytest.raises(SystemExit, match="no row of resnet18, other"):
        peers.main()
    assert passed == [["0", "1", "--device", "cpu", "--seconds", "2.0", "--thorough"]]
    (file,) = tmp_path.glob("*/peers.json")
    (found,) = json.loads(file.read_text())
    assert set(found["contestants"]) == {"fp32", "amp"}
