"""A saved network in a new process: every way gives the same outputs, and the table says who is lean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ampopt
from benchmarks.by_onnx import exported
from benchmarks.deployed import command, write_row
from benchmarks.deployed_table import to_markdown
from benchmarks.deployed_ways import AGAIN, BUNDLE, WAYS
from benchmarks.race_protocol import Racer, racing_environment
from benchmarks.regimes import BACK_TO_BACK, REGIMES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network's files, as `benchmarks.deployed` writes them, with its bundle."""
    place = tmp_path_factory.mktemp("deployed")
    torch.default_generator.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten()).eval(), torch.randn(1, 3, 8, 8)
    torch.save(model, place / "model.pt")
    np.savez(place / "inputs.npz", x.numpy())
    (place / "model.onnx").write_bytes(exported(model, (x,)))
    fast = ampopt.optimize(model, x, precision="fp32", budget_s=1, exclude=["compile"], progress=False)
    fast.save(place / BUNDLE, tune_s=0.5)
    return place


def test_a_second_start_is_of_the_same_way_and_comes_after_the_first() -> None:
    order = list(WAYS)
    for again, first in AGAIN.items():
        assert WAYS[again] is WAYS[first]
        assert order.index(first) < order.index(again)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ampopt.robot", "ampopt.load", "eager", "ONNX Runtime", "OpenVINO"])
def test_a_way_answers_as_the_network_does(way: str, folder: Path, tmp_path: Path) -> None:
    if way == "OpenVINO":
        pytest.importorskip("openvino")
    threads = torch.get_num_threads()  # a bundle of other threads is searched anew
    racer = Racer(command(way, folder, threads), racing_environment(way, tmp_path, threads))
    try:
        facts = {**racer.ask("make"), **racer.ask("choose"), **racer.ask("settle")}
        assert racer.ask("block", BACK_TO_BACK)["seconds"]
    finally:
        racer.end()
    assert 0 < facts["anonymous_bytes"] < facts["resident_bytes"] <= facts["peak_bytes"]
    assert 0 < facts["bare_bytes"] < facts["resident_bytes"]
    model, x = torch.load(folder / "model.pt", weights_only=False), np.load(folder / "inputs.npz")["arr_0"]
    with torch.no_grad(), np.load(folder / f"{way}.npz") as stored:
        assert np.allclose(stored["arr_0"], model(torch.from_numpy(x)).numpy(), atol=1e-4)


def facts_of(kept_mib: int, ms: float = 1.0) -> dict[str, Any]:
    own = {"resident_bytes": (kept_mib + 30) << 20, "bare_bytes": 30 << 20, "anonymous_bytes": 5 << 20}
    times = {regime: {"p50_ms": ms} for regime in REGIMES}
    return {
        **own,
        "peak_bytes": (kept_mib + 40) << 20,
        "first_answer_s": 0.5,
        "relative_error": 1e-6,
        **times,
    }


def test_the_table_compares_the_memory_of_what_runs(tmp_path: Path) -> None:
    saved = {"prepare_s": 20.0, "save_s": 2.0, "chosen": "fp32", "passes": ["fold-conv-bn"]}
    ways = {
        "ampopt.robot": facts_of(120),
        "ampopt.load": facts_of(500),
        "eager": facts_of(400),
        "ONNX Runtime": facts_of(150),
        "litert": facts_of(100),
        "ncnn": {"error": "not converted"},
    }
    write_row(tmp_path, {"network": "resnet18", "commit": "c", "saved": saved, "ways": ways})
    write_row(tmp_path, {"network": "cropunet", "commit": "c", "error": "killed"})
    table = (tmp_path / "deployed.md").read_text()
    assert "| resnet18 | litert | 0.50 | 100 | 5 | 110 | 1.000 | 1.000 | 1.0e-06 | c |" in table
    assert "- resnet18: ampopt.robot keeps 1.20 times the memory of litert" in table
    assert "- resnet18: ampopt.load keeps 100 MiB more than eager" in table
    assert "- resnet18: the default call: fp32 lane after 20.0 s, fold-conv-bn; saved in 2.0 s" in table
    assert "- resnet18, ncnn: not converted" in table
    assert "- cropunet: killed" in table
    assert "not finite" in to_markdown(
        [{"network": "n", "commit": "c", "ways": {"eager": {**facts_of(1), "relative_error": None}}}]
    )
