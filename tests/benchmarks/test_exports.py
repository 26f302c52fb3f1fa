"""The export benchmark: a row of a tiny network, the table made of rows, and what a failure leaves."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import exports, exports_timing
from benchmarks.export_networks import NETWORKS, TIMM, make_small_constants_random
from benchmarks.exports import exported, rows_of, with_timing, write_rows
from benchmarks.exports_table import COLUMNS, line, means, to_markdown
from benchmarks.exports_timing import timing
from benchmarks.models import WORKLOADS

CPU = torch.device("cpu")


def output(provider: str, error: float, limit: float) -> dict[str, Any]:
    return {"name": "y", "provider": provider, "error": error, "eager_error": error / 2, "limit": limit}


def verified(name: str, precision: str, ratio: float | None = None, **report: Any) -> dict[str, Any]:
    outputs = [output("CPUExecutionProvider", 1e-7, 1e-5)]
    row = {
        "workload": name,
        "precision": precision,
        "environment": {"device": "a device", "torch": "2"},
        "commit": "abc",
        "report": {"outputs": outputs, "opset": 20, "nodes": 7, "nodes_off_gpu": None, **report},
    }
    if ratio is None:
        return row
    gains = {"plain / ours": {"ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.1}}
    times = {"ours": {"p50_ms": 1.0}, "plain": {"p50_ms": ratio}}
    return {**row, "timing": {**times, "gains": gains}}


def cells(row: dict[str, Any]) -> dict[str, str]:
    found = [cell.strip() for cell in line(row).strip("|").split("|")]
    return dict(zip(COLUMNS, found, strict=True))


def test_networks_are_the_workloads_then_the_families_then_ten_of_timm() -> None:
    assert NETWORKS[: len(WORKLOADS)] == tuple(WORKLOADS)
    assert NETWORKS[-10:] == tuple(f"timm/{name}" for name in TIMM)
    assert all(name.startswith("torchvision/") for name in NETWORKS[len(WORKLOADS) : -10])
    assert len(set(NETWORKS)) == len(NETWORKS)


def test_small_constants_become_random_and_everything_else_stays() -> None:
    linear, norm = nn.Linear(2, 3), nn.LayerNorm(3)
    weight = linear.weight.detach().clone()
    nn.init.constant_(linear.bias, 1e-6)
    make_small_constants_random(nn.Sequential(linear, norm), torch.Generator().manual_seed(0))
    assert linear.bias.std() > 1e-3
    assert norm.bias.std() > 1e-3
    assert torch.equal(linear.weight, weight)
    assert torch.equal(norm.weight, torch.ones(3))


def test_tiny_network_is_verified_in_both_precisions_and_timed_in_fp32(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(exports_timing, "TUNING_S", 0.1)
    monkeypatch.setattr(exports_timing, "TIMING_S", 0.1)
    with torch.no_grad():
        rows = list(rows_of("linear5x128", ["fp32", "fp16"], CPU, tmp_path, plain=True))
    single, half = json.loads(json.dumps(rows))
    for row in (single, half):
        assert row["report"]["verified"]
        assert row["report"]["error"] > 0
        row["timing"] = timing(tmp_path, row["precision"], "CPUExecutionProvider", 1e-3)
    assert half["report"]["error"] > 10 * single["report"]["error"]
    gains = single["timing"]["gains"]["plain / ours"]
    assert 0 < gains["low"] <= gains["ratio"] <= gains["high"]
    assert single["timing"]["ours"]["samples"] == single["timing"]["plain"]["samples"] >= 6
    assert single["timing"]["difference"] < 1e-5
    assert "FP32" in half["timing"]["not_timed"]
    assert line(single).count("|") == line(half).count("|") == len(COLUMNS) + 1


def test_failed_export_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("no | such operator")

    monkeypatch.setattr(exports, "export_onnx", refuse)
    with torch.no_grad():
        (row,) = rows_of("linear5x128", ["fp32"], CPU, tmp_path, plain=False)
    assert row["error"] == "ValueError: no | such operator"
    assert with_timing([row], tmp_path, "CPUExecutionProvider") == [row]
    assert cells(row)["error"] == "NOT VERIFIED: ValueError: no / such operator"


def test_reason_of_a_failed_plain_export_is_told_and_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = torch.onnx.export

    def refuse(model: Any, *args: Any, **options: Any) -> Any:
        if args and isinstance(args[-1], Path):
            raise ValueError("no such operator")
        return real(model, *args, **options)

    monkeypatch.setattr(torch.onnx, "export", refuse)
    with torch.no_grad():
        rows = list(rows_of("linear5x128", ["fp32"], CPU, tmp_path, plain=True))
    (row,) = with_timing(rows, tmp_path, "CPUExecutionProvider")
    assert row["report"]["verified"]
    assert cells(row)["ours ms"] == "no plain export: ValueError: no such operator"


def test_failed_plain_export_leaves_the_verification_and_says_why(tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", np.zeros(1, np.float32))
    (row,) = with_timing([verified("linear5x128", "fp32")], tmp_path, "CPUExecutionProvider")
    assert "plain.onnx" in row["timing"]["not_timed"]
    assert cells(row)["ours ms"].startswith("SessionError")


def test_timing_process_that_ends_early_leaves_the_verification_and_says_how(tmp_path: Path) -> None:
    (row,) = with_timing([verified("linear5x128", "fp32")], tmp_path, "NoSuchProvider")
    assert row["timing"] == {"not_timed": "its process ended with status 2"}


def test_process_that_ends_early_leaves_a_row_for_each_precision(tmp_path: Path) -> None:
    options = argparse.Namespace(precisions=["fp32", "fp16"], device="cpu", no_timing=True)
    rows = exported("no such network", tmp_path / "exports", options)
    assert [row["precision"] for row in rows] == ["fp32", "fp16"]
    assert {row["error"] for row in rows} == {"the process ended with status 2"}


def test_rows_are_replaced_one_by_one_and_kept_in_the_order_of_the_table(tmp_path: Path) -> None:
    write_rows(tmp_path, [verified("mnist-b512", "fp32"), verified("resnet18", "fp16")])
    write_rows(tmp_path, [verified("resnet18", "fp32", 2.0), verified("mnist-b512", "fp32", 4.0)])
    rows = json.loads((tmp_path / "exports.json").read_text())
    found = [(row["workload"], row["precision"], "timing" in row) for row in rows]
    assert found == [("resnet18", "fp32", True), ("resnet18", "fp16", False), ("mnist-b512", "fp32", True)]
    assert (tmp_path / "exports.md").read_text() == to_markdown(rows)


def test_row_shows_the_output_nearest_to_its_limit() -> None:
    outputs = [output("CUDAExecutionProvider", 2e-6, 1e-5), output("CPUExecutionProvider", 4e-6, 1e-3)]
    shown = cells(verified("resnet18", "fp32", outputs=outputs))
    assert (shown["error"], shown["eager's error"], shown["limit"]) == ("2.0e-06", "1.0e-06", "1.0e-05")
    assert shown["provider"] == "CUDA"


def test_nodes_off_the_gpu_are_counted_where_a_gpu_was_there() -> None:
    assert cells(verified("resnet18", "fp32"))["nodes off the GPU"] == "–"
    assert cells(verified("resnet18", "fp32", nodes_off_gpu=["a (Shape)"]))["nodes off the GPU"] == "1"


def test_geometric_mean_of_fp32_comes_last() -> None:
    rows = [verified("resnet18", "fp32", 2.0), verified("resnet18", "fp16", 3.0)]
    rows += [verified("mnist-b512", "fp32", 8.0), verified("conv3x64", "fp32")]
    assert (
        means(rows)[-1]
        == "- fp32, plain / ours: geometric mean 4.000, least 2.000, most 8.000, over 2 networks"
    )
    assert means(rows)[0].startswith("- fp16, plain / ours: geometric mean 3.000")
    assert to_markdown(rows).rstrip().endswith(means(rows)[-1])
    assert "4 of 4 exported and verified" in to_markdown(rows)
