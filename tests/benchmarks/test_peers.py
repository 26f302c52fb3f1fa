"""The race: contestants in their processes, what a failure leaves, the table and the chart."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ort.options import SessionError
from benchmarks import by_onnx, peers
from benchmarks.by_hand import as_float, as_half_channels_last
from benchmarks.contestants import (
    BUDGET_S,
    Contestant,
    InHalf,
    channels_last,
    compiled,
    contestants,
    torchscript,
)
from benchmarks.models import WORKLOADS
from benchmarks.peers import race, write_row
from benchmarks.peers_table import best_peer, ours, summary, to_markdown
from benchmarks.race_networks import BATCH_8, RACE, racer
from benchmarks.race_process import Racer, warm_up

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def entered(*names: str) -> list[Contestant]:
    return [contestant for contestant in contestants(CPU) if contestant.name in names]


def row(network: str, **times: float | str) -> dict[str, Any]:
    """A row of results; a text is a failure. Names ending in `_amp` are of that lane."""
    found: dict[str, Any] = {}
    for key, value in times.items():
        lane = "amp" if key.endswith("_amp") else "fp32"
        name = f"ampopt {lane}" if key.startswith("ampopt") else key
        facts = {"prepare_s": 1.0, "relative_error": 1e-6, "bytes": 2**20, "p50_ms": value, "p99_ms": value}
        found[name] = {"lane": lane, "commit": "c"} | ({"error": value} if isinstance(value, str) else facts)
    return {"network": network, "environment": {"device": "d"}, "commit": "c", "contestants": found}


def test_the_race_is_of_the_workloads_nine_more_and_five_batches() -> None:
    assert RACE[: len(WORKLOADS)] == tuple(WORKLOADS)
    assert len(RACE) == len(set(RACE)) == len(WORKLOADS) + 9 + 5
    assert sum(name.endswith(BATCH_8) for name in RACE) == 5


def test_a_p99_that_too_few_samples_know_is_left_out_of_the_table() -> None:
    made = row("net", **{"eager": 2.0, "ampopt fp32": 1.0})
    made["contestants"]["eager"]["p99_ms"] = None
    assert "| net | 2.000 | 1.000 (1.00) |" in to_markdown([made])


def test_a_batch_of_8_is_of_the_same_network() -> None:
    model, (x,) = racer("torchvision/mobilenet_v2")
    batched, (xs,) = racer("torchvision/mobilenet_v2-b8")
    assert xs.shape == (8, *x.shape[1:])
    weights, same = model.state_dict(), batched.state_dict()
    assert all(torch.equal(weights[name], same[name]) for name in weights)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_every_device_has_both_lanes_with_the_original_and_ampopt(device: torch.device) -> None:
    found = contestants(device)
    assert len({contestant.name for contestant in found}) == len(found)
    for lane in ("fp32", "amp"):
        assert any(c.lane == lane and c.name.startswith("eager") for c in found)
        assert any(c.lane == lane and c.name == f"ampopt {lane}" for c in found)
    assert all("max-autotune" in c.name for c in found if c.thorough)
    assert BUDGET_S == 60


@pytest.mark.parametrize(
    "make", [channels_last, torchscript, functools.partial(compiled, mode=None, freezing=False)]
)
def test_peers_compute_what_the_model_does(make: Callable[..., Callable[..., Any]]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        assert torch.allclose(make(model, (x,))(x), model(x), atol=1e-5)


def test_what_enters_half_is_half_and_integers_stay() -> None:
    image = as_half_channels_last(torch.randn(1, 3, 4, 4))
    assert image.dtype is torch.float16
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert as_half_channels_last(torch.arange(3)).dtype is torch.int64


def test_a_model_in_half_takes_and_gives_float32() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        found, expected = InHalf(model)(x), model(x)
    assert isinstance(found, Tensor)
    assert found.dtype is torch.float32
    assert 0 < (found - expected).norm() < 1e-2 * expected.norm()
    assert model[0].weight.dtype is torch.float32, "the model itself stays as it is"


def test_outputs_become_float32_and_others_stay() -> None:
    mask, low = torch.tensor([True]), torch.ones(2, dtype=torch.bfloat16)
    found = as_float({"mask": mask, "low": low})
    assert isinstance(found, dict)
    assert found["mask"] is mask
    assert found["low"].dtype is torch.float32


def test_a_lane_that_was_not_run_keeps_what_it_had(tmp_path: Path) -> None:
    write_row(tmp_path, row("cropunet", eager=1.0, ampopt=1.0, gone=3.0))
    newer = row("cropunet", eager_amp=0.5, ampopt_amp=0.4)
    for each in newer["contestants"].values():
        each["commit"] = "d"
    write_row(tmp_path, newer)
    (found,) = json.loads((tmp_path / "peers.json").read_text())
    assert list(found["contestants"]) == ["eager", "ampopt fp32", "gone", "eager_amp", "ampopt amp"]
    assert found["commit"] == "c, d"
    write_row(tmp_path, row("cropunet", eager=2.0, ampopt=1.5))
    (found,) = json.loads((tmp_path / "peers.json").read_text())
    assert list(found["contestants"]) == ["eager_amp", "ampopt amp", "eager", "ampopt fp32"]
    assert "commit c, d." in (tmp_path / "peers.md").read_text()
    write_row(tmp_path, row("cropunet", eager_amp=0.5, ampopt_amp=0.4))
    (found,) = json.loads((tmp_path / "peers.json").read_text())
    assert found["commit"] == "c", "what no contestant is of is named no more"


@pytest.mark.slow
def test_a_race_has_a_row_for_everybody_and_reasons_for_those_who_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "PAUSE_S", 0.0)
    everybody = [*entered("eager", "TorchScript"), Contestant("nobody", "fp32", torchscript)]
    made = race("linear5x128", everybody, CPU, seconds=0.2)
    found = json.loads(json.dumps(made))["contestants"]
    assert list(found) == ["eager", "TorchScript", "nobody"]
    for name in ("eager", "TorchScript"):
        assert found[name]["samples"] >= peers.LEAST_ROUNDS
        assert found[name]["p50_ms"] > 0
        assert (found[name]["p99_ms"] is None) == (found[name]["samples"] < 100)
        assert found[name]["relative_error"] < 1e-5
        assert found[name]["prepare_s"] > 0
    assert found["eager"]["samples"] == found["TorchScript"]["samples"]
    assert found["nobody"] == {"lane": "fp32", "commit": made["commit"], "error": "StopIteration"}
    write_row(tmp_path, made)
    assert "- nobody: StopIteration (linear5x128)" in (tmp_path / "peers.md").read_text()
    assert (tmp_path / "peers.png").stat().st_size > 1000


def test_a_provider_that_does_not_load_is_found_out_before_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def exported(model: nn.Module, inputs: tuple[Tensor, ...]) -> bytes:
        raise AssertionError("it exports")

    monkeypatch.setattr(by_onnx, "exported", exported)
    with pytest.raises(SessionError, match="NoExecutionProvider"):
        by_onnx._fastest(nn.ReLU(), (torch.ones(1),), "NoExecutionProvider", [{}])
    with pytest.raises(AssertionError, match="it exports"):
        by_onnx._fastest(nn.ReLU(), (torch.ones(1),), "CPUExecutionProvider", [{}])


def test_a_process_that_ends_is_a_reason(tmp_path: Path) -> None:
    racing = Racer("eager", CPU, tmp_path)
    racing._process.kill()
    with pytest.raises(RuntimeError, match="its process ended with status -9"):
        racing.ask("prepare")
    racing.end()


def test_a_warm_up_ends_when_the_latency_has_settled() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        Tensor.sum(torch.ones(200_000))

    warm_up(call, CPU)
    assert calls >= 16


def test_the_best_peer_is_the_fastest_of_the_lane_that_is_not_ours() -> None:
    made = row("resnet18", eager=4.0, script=2.0, ampopt=1.0, ort="no such library", eager_amp=0.5)
    assert best_peer(made, "fp32") == ("script", 2.0)
    assert best_peer(made, "amp") == ("eager_amp", 0.5)
    assert ours(made, "fp32") == 1.0
    assert ours(made, "amp") is None


def test_errors_are_shown_beside_eagers() -> None:
    made = row("resnet18", eager=4.0, ampopt=1.0, ampopt_amp=1.0, TorchScript_amp=2.0)
    made["contestants"]["ampopt fp32"]["relative_error"] = 2e-6
    assert "| resnet18 | eager | 4.000 | 1.000 | 4.000 | 2.00 | – | c |" in summary([made], "fp32")
    assert "| resnet18 | TorchScript_amp | 2.000 | 1.000 | 2.000 | – | – | c |" in summary([made], "amp")


def test_a_lane_shows_those_who_run_in_it() -> None:
    table = to_markdown([row("resnet18", eager=4.0, ampopt=1.0, ampopt_amp=1.0, TensorRT_amp="absent")])
    assert table.index("## fp32 lane") < table.index("| network | eager | ampopt fp32 |")
    assert table.index("## amp lane") < table.index("| network | ampopt amp |")
    assert "- TensorRT_amp: absent (resnet18)" in table


def test_the_summary_has_the_geometric_mean_and_the_worst() -> None:
    rows = [row("resnet18", eager=4.0, ampopt=1.0), row("cropunet", eager=1.0, ampopt=1.0)]
    assert summary(rows, "fp32")[-2].startswith("- geometric mean 2.000, least 1.000 (cropunet), over 2")
    assert summary(rows, "amp") == []


def test_rows_keep_the_order_of_the_race_and_failures_are_named(tmp_path: Path) -> None:
    write_row(tmp_path, row("cropunet", eager=1.0, ampopt=1.0))
    write_row(tmp_path, row("encdecmil18", eager=2.0, ampopt="out of\nmemory"))
    write_row(tmp_path, row("cropunet", eager=3.0, ampopt=1.0))
    rows = json.loads((tmp_path / "peers.json").read_text())
    assert [each["network"] for each in rows] == ["encdecmil18", "cropunet"]
    table = (tmp_path / "peers.md").read_text()
    assert table == to_markdown(rows)
    assert "- ampopt fp32: out of (encdecmil18)" in table
    assert "| cropunet | 3.000 (3.00) | 1.000 (1.00) |" in table
