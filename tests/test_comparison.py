"""compare: every pass alone, in sequence and left out, in every lane; nothing is kept."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.cli.app import run
from ampopt.errors import InputError
from ampopt.ir.program import Program
from ampopt.ir.transform import Result
from ampopt.measure.architecture import Architecture, architecture_of
from ampopt.measure.compared import MODES
from ampopt.measure.sampling import Measurement
from ampopt.passes import PIPELINE
from ampopt.search.pair_timer import PairTimer, Timed
from tests.helpers import Model, with_statistics
from tests.support.planted import NO_ENGINES, Planted, rewriting

pytestmark = pytest.mark.usefixtures("quick")
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    return with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))


def compared(model: nn.Module, **options: Any) -> ampopt.Comparison:
    """`compare` without engines, and silent."""
    return ampopt.compare(model, X, exclude=NO_ENGINES, progress=False, **options)


def test_every_pass_has_a_row_in_every_mode_and_lane() -> None:
    found = compared(net())
    names = {step.name for step in (*PIPELINE.rewrites, *PIPELINE.launches)} - {"allow-tf32"}
    rows = [(row.lane, row.mode, row.name) for row in found.rows]
    assert len(rows) == len(set(rows))
    assert set(rows) == {(lane, mode, name) for lane in ("fp32", "amp") for mode in MODES for name in names}
    for row in found.rows:
        assert (row.latency is None) == (row.gain is None) == (row.error is None)
        assert row.latency is not None or row.reason
    assert {"fold-conv-bn"} <= {
        row.name for row in found.rows if row.gain is not None and row.mode == "left out"
    }


def test_a_comparison_is_json_and_a_table() -> None:
    found = compared(net(), precision="fp32")
    data = json.loads(json.dumps(found.to_dict()))
    assert len(data["rows"]) == len(found.rows)
    assert data["inputs"] == ["float32[2, 3, 8, 8] on cpu"]
    assert Architecture.read(data["architecture"]) == architecture_of(net())
    text = str(found)
    assert "| pass | alone | cumulative | left out |" in text
    for row in found.rows:
        assert f"| {row.name} |" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {5}


def test_a_pass_that_changes_nothing_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.search.options.PIPELINE", rewriting((Planted("fine"),)))
    seconds = {"fp32: ": (3e-3, 2e-3) * 3, "again": (2e-3, 3e-3) * 3}

    def measured(samplers: dict[str, Any], **options: Any) -> dict[str, Measurement]:
        return {name: Measurement(seconds.get(name, (2e-3,) * 6)) for name in samplers}

    monkeypatch.setattr("ampopt.measure.rounds.interleave", measured)
    rows = compared(net(), precision="fp32").rows
    (row,) = [r for r in rows if (r.name, r.mode) == ("fine", "alone")]
    assert row.gain is not None
    assert row.gain.ratio == 1.25
    assert not row.gain.is_real


def test_a_pass_that_fails_or_is_wrong_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = (Planted("broken", error=ValueError("oops")), Planted("wrong", factor=2.0), Planted("fine"))
    monkeypatch.setattr("ampopt.search.options.PIPELINE", rewriting(planted))
    rows = {(r.name, r.mode): r for r in compared(net(), precision="fp32").rows}
    assert rows["broken", "alone"].reason == "failed: ValueError: oops"
    assert "error 1 is over" in rows["wrong", "alone"].reason
    assert {rows["fine", mode].reason for mode in MODES} == {""}


def test_one_broken_pass_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = (Planted("broken", error=ValueError("oops")), Planted("fine"))
    monkeypatch.setattr("ampopt.search.options.PIPELINE", rewriting(planted))
    rows = {(r.name, r.mode): r for r in compared(net(), precision="fp32").rows}
    assert rows["fine", "cumulative"].gain is not None
    assert rows["fine", "left out"].gain is not None


def test_a_spent_budget_is_told_in_every_row_with_the_one_that_would_do() -> None:
    found = compared(net(), budget_s=1e-6)
    reasons = {row.reason for row in found.rows if not row.reason.startswith("nothing to do: ")}
    (reason,) = reasons
    enough = re.fullmatch(r"not tried: no time left \((budget_s=\d+0) would do\)", reason)
    assert enough is not None
    assert f"cells are not filled: {enough[1]} would fill them" in found.notes[-1]


class OnlyInFp32(nn.ReLU):
    """Has no kernel for a lower precision."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise NotImplementedError("no kernel for it")
        return super().forward(x)


def test_a_lane_that_cannot_be_judged_is_left_out_with_the_reason() -> None:
    found = compared(nn.Sequential(nn.Conv2d(3, 8, 3), OnlyInFp32()).eval())
    assert {row.lane for row in found.rows} == {"fp32"}
    assert found.notes == (
        "the amp lane was not tried: the original fails in it (NotImplementedError: no kernel for it)",
    )


def test_what_optimize_measured_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, all_kept: Any
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    options: dict[str, Any] = {
        "passes": [Measures()],
        "precision": "fp32",
        "budget_s": 30.0,
        "progress": False,
    }
    monkeypatch.setattr(Measures, "measured", [])
    ampopt.compare(net(), X, **options)
    with all_kept:
        ampopt.optimize(net(), X, **options)
    assert Measures.measured == [1, 1]
    found = ampopt.compare(net(), X, **options)
    assert all(row.gain is not None for row in found.rows)
    assert Measures.measured == [1, 1]


@dataclasses.dataclass(frozen=True)
class Measures(Planted):
    """Measures once, and has it in a field afterwards."""

    measured: ClassVar[list[int]] = []

    label: str = "measures"
    found: tuple[tuple[str, str], ...] | None = None

    def apply(self, program: Program) -> Result:
        """Measure, unless that was done before."""
        if self.found is None:
            self.measured.append(1)
        return dataclasses.replace(
            super().apply(program), replay=dataclasses.replace(self, found=self.found or (("relu", "best"),))
        )


def test_the_default_budget_is_that_of_the_command_line_and_of_optimize() -> None:
    functions = (ampopt.compare, "budget_s"), (ampopt.optimize, "budget_s"), (run, "budget")
    asked = [inspect.signature(function).parameters[name] for function, name in functions]
    assert [parameter.default for parameter in asked] == [None, None, None]


def test_a_model_that_is_no_single_graph_is_refused() -> None:
    model = Model(lambda m, x: m.c(x) if x.sum() > 0 else x, c=nn.Conv2d(3, 3, 1))
    with pytest.raises(InputError, match="compare needs a model that is one graph"):
        compared(model)


def test_what_a_pass_says_when_it_fails_stays_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Planted("failing", error=ValueError("one | two\nthree"))
    monkeypatch.setattr("ampopt.search.options.PIPELINE", rewriting((failing,)))
    text = compared(net(), precision="fp32").to_markdown()
    (line,) = [line for line in text.splitlines() if line.startswith("| failing")]
    assert "failed: ValueError: one \\| two |" in line


@pytest.mark.gpu
def test_on_a_gpu_every_cell_is_filled_and_sequences_are_launched_as_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time, launched = PairTimer.time, set[str]()

    def noted(self: PairTimer, pairs: Sequence[Timed], rounds: int | None = None) -> None:
        launched.update(built.key for pair in pairs for built in pair if built.program.cuda_graph)
        time(self, pairs, rounds)

    monkeypatch.setattr(PairTimer, "time", noted)
    found = ampopt.compare(net(), X, device="cuda", exclude=("compile",), progress=False)
    assert not [row for row in found.rows if row.reason.startswith(("not tried", "failed"))]
    assert {"fp32: fold-conv-bn + cuda-graph", "amp: bake-autocast + cuda-graph"} <= launched
