"""The five questions: every way of training makes the same steps, and the table has what was reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.diagnosis.training_step import Subject, Training, amp, fp32, parts_of
from benchmarks import seeds
from benchmarks.anybody import anybody
from benchmarks.results_files import Row
from benchmarks.seeds_plots import draw
from benchmarks.seeds_table import to_markdown
from benchmarks.seeds_workloads import SEEDS
from benchmarks.training_steps import GRAPHED, o2, ways

CPU = torch.device("cpu")


def small(device: str = "cpu") -> Subject:
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    x, target = torch.randn(16, 3, 8, 8), torch.randn(16, 4)
    target = target.to(device)
    return Subject(model.to(device), (x.to(device),), lambda result: F.mse_loss(result.float(), target))


def losses(step: Training, count: int = 20) -> list[float]:
    step.optimizer.param_groups[0]["lr"] = 0.05
    return [float(step()) for _ in range(count)]


@pytest.mark.parametrize("name", ways(CPU))
def test_every_way_learns_as_fp32_does(name: str) -> None:
    given = small()
    expected = losses(fp32(given))
    made = ways(CPU)[name](given)
    assert isinstance(made, Training)
    found = losses(made)
    assert expected[-1] < 0.5 * expected[0]
    for mine, other in zip(found, expected, strict=True):
        assert mine == pytest.approx(other, rel=0.1)
    assert all(weight.grad is None for weight in given.model.parameters()), "the model itself stays as it is"


def test_o2_has_16_bit_weights_with_fp32_norms_and_masters() -> None:
    step = o2(small())
    dtypes = {name: weight.dtype for name, weight in step.model.named_parameters()}
    assert dtypes["0.weight"] == dtypes["4.bias"] == torch.bfloat16
    assert dtypes["1.weight"] == torch.float32
    step()
    assert {master.dtype for master in step.masters} == {torch.float32}
    for weight, master in zip(step.model.parameters(), step.masters, strict=True):
        assert torch.equal(weight, master.to(weight.dtype))


def test_the_parts_of_a_step_are_a_step() -> None:
    given = small()
    whole, apart = fp32(given), fp32(given)
    whole()
    passed: Any = None
    for part in apart.parts.values():
        passed = part(passed)
    pairs = zip(whole.model.parameters(), apart.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(ms > 0 for ms in parts_of(apart, 0.0).values())


SEEN: list[Tensor] = []


def noted(result: Tensor) -> Tensor:
    """A loss that is kept: a function of the module is no part of what is copied."""
    value = F.mse_loss(result.float(), torch.zeros_like(result))
    SEEN.append(value.detach())
    return value


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRAPHED)
def test_a_captured_step_trains(name: str) -> None:
    given = small("cuda")
    step = GRAPHED[name](Subject(given.model, given.args, noted))
    first = float(SEEN[-1]) if step() is None else 0.0
    for _ in range(300):
        step()
    torch.cuda.synchronize()
    assert 0 < float(SEEN[-1]) < first


def test_what_fails_is_told_and_the_others_are_timed() -> None:
    def broken() -> Callable[[], object]:
        raise RuntimeError("no such kernel")

    found = seeds.timed({"good": lambda: lambda: None, "broken": broken}, CPU, 0.0)
    assert found["good"]["p50_ms"] >= 0
    assert found["broken"] == {"error": "RuntimeError: no such kernel"}


def test_a_step_that_takes_too_long_is_left_out() -> None:
    row = seeds.measure(SEEDS["linear5x128-b20"], CPU, seconds=0.0, most_s=0.0, optimize=False)
    assert "a training step takes" in row["skipped"]
    assert "Not run: a training step takes" in to_markdown([row])


def test_the_table_has_todays_figures_beside_those_that_were_reported(tmp_path: Path) -> None:
    row = seeds.measure(SEEDS["linear5x128-b20"], CPU, seconds=0.0, most_s=60.0, optimize=False)
    assert set(row["training"]) == set(ways(CPU))
    assert set(row["inference"]) == {"fp32", "amp", "amp + channels_last", "O1", "O2"}
    assert not [name for name, each in row["inference"].items() if "error" in each]
    row["training"]["amp"]["error"] = "RuntimeError: a|b"
    del row["training"]["amp"]["p50_ms"]
    table = to_markdown([row])
    assert "## S2: linear5x128-b20" in table
    assert "| fp32 | " in table
    assert "| 0.93 ms | 0.22 ms |" in table
    assert "failed: RuntimeError: a/b" in table
    draw([row], tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"seeds.png", "seeds-s2.png"}
    assert all(file.stat().st_size > 1000 for file in tmp_path.iterdir())


@pytest.mark.parametrize("name", SEEDS)
def test_reported_figures_name_a_way_or_a_part_that_is_measured(name: str) -> None:
    for each in SEEDS[name].reported:
        assert each.way in ways(CPU)
        assert each.part in ("step", *fp32(small()).parts)
        assert each.ms > 0


def test_amp_scales_the_loss_only_on_a_gpu() -> None:
    assert amp(small()).scaler is None


@pytest.mark.parametrize("name", ["linear5x128-b20", "cropunet"])
def test_a_cold_process_knows_every_workload(name: str) -> None:
    model, inputs = anybody(name)
    assert not model.training
    assert [tuple(x.shape) for x in inputs] == [*SEEDS[name].workload.input_shapes]


def test_the_first_workload_has_a_default_call_in_a_cold_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = list[str]()

    def beside(row: Row, network: str, _: torch.device) -> Row:
        asked.append(network)
        return {**row, "default_call": {"network": network, "commit": "c", "error": "no time"}}

    monkeypatch.setattr("benchmarks.cold_start.beside", beside)
    names = ["linear5x128-b20", "linear50x512-b1024"]
    arguments = ["--device", "cpu", "--models", *names, "--seconds", "0", "--most-s", "0"]
    monkeypatch.setattr("sys.argv", ["seeds", *arguments, "--out", str(tmp_path)])
    seeds.main()
    assert asked == names[:1]
    (table,) = tmp_path.glob("*/seeds.md")
    assert f"- {names[0]}: no time; commit c" in table.read_text()
