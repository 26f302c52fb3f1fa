"""The spread of the speed-up over cold runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import steady
from benchmarks.steady import append, relative_range, run_of, to_markdown
from tests.benchmarks.rows import cold_row, contestant


def cold_run(eager_ms: float, network: str = "resnet18") -> dict[str, Any]:
    row = cold_row(network, ampopt=contestant(1.0, 2.0), eager_fp32=contestant(eager_ms, 8.0))
    return {**row, "report": {"best_so_far": [{"at_s": 7.0, "lane": "amp", "pass": "p", "ms": 1.0}]}}


def test_the_range_is_of_the_quartiles_over_the_median() -> None:
    assert relative_range([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert relative_range([3.0] * 10) == 0


def test_the_table_has_the_speed_up_of_both_regimes(tmp_path: Path) -> None:
    for ms in (3.0, 4.0, 5.0):
        append(tmp_path, run_of(cold_run(ms)))
    append(tmp_path, {"network": "resnet18", "commit": "c", "error": "killed"})
    append(tmp_path, run_of(cold_run(3.0, "cropunet")))
    table = (tmp_path / "steady.md").read_text()
    ranges = {
        "back to back": "3.00 | 4.00 | 5.00 | 25.0% | 0.0% | 25.0%",
        "30 Hz": "4.00 | 4.00 | 4.00 | 0.0% | 0.0% | 0.0%",
    }
    for regime, cells in ranges.items():
        assert f"| resnet18 | {regime} | 3 | amp | {cells} | 7.0 | 12.0 | c |" in table
    assert "- resnet18: killed" in table
    assert "| cropunet" not in table, "one run has no range"
    assert table == to_markdown(json.loads((tmp_path / "steady.json").read_text()))


def test_runs_that_are_there_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[str] = []

    def call(network: str, device: torch.device, **_: Any) -> dict[str, Any]:
        called.append(network)
        if len(called) == 1:
            return {"network": network, "commit": "c", "error": "killed"}
        return cold_run(3.0, network)

    monkeypatch.setattr(steady, "default_call", call)
    monkeypatch.setattr(steady, "commit", lambda: "c")
    words = ["steady", "--device", "cpu", "--out", str(tmp_path), "--models", "resnet18", "cropunet"]
    monkeypatch.setattr("sys.argv", [*words, "--runs", "3"])
    steady.main()
    assert called == ["resnet18"] * 3 + ["cropunet"] * 3
    steady.main()
    assert called[6:] == ["resnet18"], "the run that failed is made up for"
    monkeypatch.setattr("sys.argv", [*words, "--runs", "9", "--budget-left", "1"])
    steady.main()
    assert len(called) == 7
