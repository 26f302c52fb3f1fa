"""The breadth: its names, its subjects, how ampopt stands against each peer, and going on over commits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import breadth, cold
from benchmarks.anybody import anybody
from benchmarks.breadth import lost, still_to_run, write_row
from benchmarks.breadth_networks import BREADTH, PACKAGES, subject
from benchmarks.breadth_table import bins, compiled, counts, ratio, standing, to_markdown
from benchmarks.cold_lines import AUTOTUNED, BY_HAND, COMPILED, EAGER
from benchmarks.cold_networks import UnknownNetworkError
from tests.benchmarks.rows import cold_row, contestant


def test_there_are_150_networks_and_each_has_one_name() -> None:
    assert len(BREADTH) == len(set(BREADTH)) >= 150
    assert {name.partition("/")[0] for name in BREADTH} == set(PACKAGES)


@pytest.mark.parametrize("name", [name for name in BREADTH if name.startswith("own/")])
def test_our_own_subjects_are_the_same_each_time_and_were_never_called(name: str) -> None:
    state = torch.get_rng_state()
    (model, inputs), (again, same) = subject(name), anybody(name)
    assert torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        first, second = model(*inputs), again(*same)
    for one, other in zip(_tensors(first), _tensors(second), strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()
        assert one.std() > 0
    assert not any(module.training for module in model.modules())


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def test_a_detector_gets_a_list_of_images_and_batch_norms_took_statistics() -> None:
    model, inputs = subject("torchvision/ssdlite320_mobilenet_v3_large")
    ((image,),) = inputs
    assert image.shape == (3, 480, 640)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert all(bool(norm.get_buffer("running_mean").any()) for norm in norms)


def test_a_package_that_is_missing_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnknownNetworkError, match="no transformers here"):
        subject("transformers/ViTForImageClassification")


def rows() -> list[dict[str, Any]]:
    ahead = cold_row(
        "own/gru_policy",
        ampopt=contestant(1.0, 2.0),
        eager_fp32=contestant(4.0, 6.0),
        eager_amp=contestant(5.0, relative_error=1e-3),
        recipe_by_hand=contestant(2.0, 3.0, relative_error=2e-3),
    )
    ahead["contestants"][COMPILED] = contestant(1.4, 2.0)
    behind = cold_row(
        "timm/vovnet39a",
        ampopt=contestant(1.0),
        eager_fp32=contestant(2.0),
        recipe_by_hand=contestant(0.5, relative_error=0.5),
    )
    behind["contestants"][COMPILED] = contestant(0.9, 1.5)
    behind["notes"] = ["conv_12\noverflows"]
    behind["no_reference"] = "RuntimeError: expected\ndouble"
    failed = {"network": "timm/dla34", "commit": "c", "error": "its process\nended", "chosen": "fp32"}
    return [ahead, behind, failed, {"network": "timm/tnt", "commit": "c", "skipped": "no tnt in timm"}]


def test_a_ratio_is_that_of_the_less_favourable_regime_and_the_best_peer_counts() -> None:
    ahead, behind, *_ = rows()
    assert [ratio(ahead, name) for name in (EAGER, COMPILED, BY_HAND, None)] == [3.0, 1.0, 1.5, 1.0]
    assert [ratio(behind, name) for name in (EAGER, COMPILED, BY_HAND, None)] == [2.0, 0.9, None, 0.9]


def test_torch_compile_is_its_faster_mode_that_counts() -> None:
    ahead, behind, *_ = rows()
    assert compiled(ahead) == COMPILED
    ahead["contestants"][AUTOTUNED] = contestant(0.8, 1.9)
    behind["contestants"][AUTOTUNED] = contestant(0.4, relative_error=0.5)
    assert [compiled(row) for row in (ahead, behind)] == [AUTOTUNED, COMPILED]
    assert [ratio(row, COMPILED) for row in (ahead, behind)] == [0.8, 0.9]
    assert ratio(ahead, None) == 0.8
    assert standing([ahead, behind])[5] == (
        "- max-autotune, too, in 2: own/gru_policy, timm/vovnet39a; it is torch.compile's best in 1: "
        "own/gru_policy"
    )
    assert "| 4.000, 0.800, 2.000, 1.000 |" in to_markdown([ahead])


def test_a_wrong_peer_does_not_count_but_where_eager_jumps_itself() -> None:
    _, behind, *_ = rows()
    assert counts(behind, COMPILED)
    assert not counts(behind, BY_HAND)
    for error in (0.02, None):
        behind["contestants"][EAGER]["relative_error"] = error
        assert counts(behind, BY_HAND)
        assert ratio(behind, BY_HAND) == 0.5


def test_the_table_says_who_is_behind_whom_and_what_failed() -> None:
    lines = standing(rows())
    assert lines[0] == "- 2 networks ran, 1 failed, 1 skipped"
    assert lines[1] == (
        "- eager fp32 / ampopt: geometric mean 2.45 of 2; ampopt is faster on 100%; below 0.97: none"
    )
    assert lines[2] == (
        "- torch.compile / ampopt: geometric mean 0.95 of 2; ampopt is faster on 0%; "
        "below 0.97: timm/vovnet39a 0.90"
    )
    assert lines[3].startswith(
        "- recipe by hand / ampopt: geometric mean 1.50 of 1; ampopt is faster on 100%"
    )
    assert lines[4].endswith("below 0.97: timm/vovnet39a 0.90")
    assert lines[5:] == ["- lanes: amp 2", "- failed: timm/dla34: its process ended"]
    table = to_markdown(rows())
    assert "| 4.000, 1.400, 2.000, 1.000 | 6.000, 2.000, 3.000, 2.000 | 3.00 | 1.00 | 1.50 | 1.00 |" in table
    assert "- timm/vovnet39a: conv_12 overflows" in table
    assert "- timm/vovnet39a, in float64: RuntimeError: expected double" in table
    assert "- timm/tnt: no tnt in timm" in table


def test_the_bins_hold_all_ratios_and_part_at_one() -> None:
    edges = bins([0.4, 1.0, 3.0])
    assert edges == sorted(edges)
    assert 1.0 in edges
    assert edges[0] <= 0.4
    assert edges[-1] > 3.0
    assert len(bins([1.0])) == 2


def test_figures_of_any_commit_count_and_failures_come_last_and_once_a_commit() -> None:
    known: list[dict[str, Any]] = [
        {"network": "a", "commit": "then", "contestants": {}},
        {"network": "b", "commit": "then", "error": "killed"},
        {"network": "c", "commit": "now", "error": "killed"},
        {"network": "d", "commit": "then", "skipped": "unknown"},
    ]
    assert still_to_run(["a", "b", "c", "d", "e"], known, "now") == ["e", "b", "d"]


def test_a_run_goes_on_where_it_was_cut_off_at_another_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called: list[str] = []
    ends_after = 2

    def call(network: str, device: torch.device, **options: Any) -> dict[str, Any]:
        assert options["compiled"]
        assert options["most_s"] == breadth.MOST_S
        if len(called) == ends_after:
            raise KeyboardInterrupt
        called.append(network)
        return {
            **cold_row(network, ampopt=contestant(1.0), eager_fp32=contestant(2.0)),
            "report": {"passes": []},
        }

    monkeypatch.setattr(cold, "default_call", call)
    monkeypatch.setattr(breadth, "commit", lambda: "c")
    models = list(BREADTH[:4])
    words = ["breadth", "--device", "cpu", "--out", str(tmp_path), "--models", *models]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(KeyboardInterrupt):
        breadth.main()
    (file,) = tmp_path.glob("*/breadth.json")
    assert [row["network"] for row in json.loads(file.read_text())] == models[:2]
    ends_after = 9
    monkeypatch.setattr(breadth, "commit", lambda: "d")
    breadth.main()
    assert called == models
    breadth.main()
    assert called == models
    monkeypatch.setattr("sys.argv", [*words, "--again"])
    breadth.main()
    assert called == models * 2
    found = json.loads(file.read_text())
    assert file.with_name("breadth.md").read_text() == to_markdown(found)
    assert not any("report" in row for row in found)


def test_the_histogram_is_drawn_where_there_is_a_ratio(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ahead = rows()[0]
    write_row(tmp_path, {"network": "timm/dla34", "commit": "c", "error": "killed"})
    assert not (tmp_path / "breadth.png").exists()
    write_row(tmp_path, ahead)
    assert (tmp_path / "breadth.png").stat().st_size > 1000


def test_a_row_tells_what_lost_and_why() -> None:
    entries = [
        {"lane": "amp", "pass": "compile", "verdict": "reverted", "reason": "slower: 0.9x"},
        {"lane": "amp", "pass": "script", "verdict": "failed", "reason": "RuntimeError: no"},
        {"lane": "amp", "pass": "degroup", "verdict": "declined", "reason": "nothing to rewrite"},
        {"lane": "fp32", "pass": "fold-conv-bn", "verdict": "kept", "reason": "faster: 1.2x"},
    ]
    assert lost({"passes": entries}) == ["amp compile: slower: 0.9x", "amp script: RuntimeError: no"]
