"""Default calls in cold processes: what a process has, the rows, what is behind the recipe, going on."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import cold, cold_lines, cold_start
from benchmarks.anybody import anybody
from benchmarks.cold import still_to_run, write_row
from benchmarks.cold_networks import COLD, UnknownNetworkError, stranger, take_statistics
from benchmarks.cold_start import default_call
from benchmarks.cold_table import by_hand_ratio, seconds_to, to_markdown
from benchmarks.race_protocol import CACHES
from benchmarks.results_files import to_markdown as passes_table
from benchmarks.time_left import TimeLeft
from tests.benchmarks.rows import cold_row, contestant

CPU = torch.device("cpu")


class Process:
    """In place of `subprocess.run`: it looks at what the process would have, and writes its facts."""

    def __init__(self, facts: dict[str, Any] | None, status: int = 0) -> None:
        self.facts, self.status = facts, status
        self.command: list[str] = []
        self.options: dict[str, Any] = {}

    def run(self, command: list[str], **options: Any) -> Any:
        self.command, self.options = command, options
        for name in CACHES:
            folder = Path(options["env"][name])
            assert folder.is_dir(), name
            assert list(folder.iterdir()) == [], name
            assert options["env"][name] != os.environ.get(name)
        if self.facts is not None:
            Path(command[5]).write_text(json.dumps(self.facts))
        return subprocess.CompletedProcess(command, self.status)


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has caches that the cold one must not see."""
    for name in CACHES:
        monkeypatch.setenv(name, "/warm")
    monkeypatch.setattr(cold_start, "commit", lambda: "c")


def test_the_process_is_new_and_its_caches_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process({"chosen": "amp"})
    monkeypatch.setattr(subprocess, "run", process.run)
    row = default_call("lcnet_050", CPU, seconds=2.0, compiled=True, thorough=True, most_s=77.0)
    assert (row["network"], row["chosen"]) == ("lcnet_050", "amp")
    assert process.command[1:5] == ["-m", "benchmarks.cold_import", "lcnet_050", "cpu"]
    assert process.command[6:] == ["--seconds", "2.0", "--compile", "--thorough"]
    assert process.options["timeout"] == 77.0
    assert set(CACHES) >= {"AMPOPT_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


def test_a_process_that_ends_or_hangs_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Process(None, -9).run)
    assert default_call("lcnet_050", CPU)["error"] == "its process ended with status -9"
    monkeypatch.setattr(subprocess, "run", Process({"chosen": "amp", "error": "while it was timed"}, -9).run)
    row = default_call("lcnet_050", CPU)
    assert (row["chosen"], row["error"]) == ("amp", "its process ended with status -9")

    def hang(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert default_call("lcnet_050", CPU, most_s=5.0)["error"] == "its process took longer than 5 s"


def test_there_are_22_strangers() -> None:
    assert len(COLD) == len(set(COLD)) == 22


def test_statistics_are_those_of_one_batch_in_training_mode() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.9)).eval()
    batch = 5 + 3 * torch.randn(8, 3, 6, 6)
    take_statistics(model, batch)
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    with torch.no_grad():
        values = model[0](batch)
    assert torch.allclose(norm.running_mean, values.mean((0, 2, 3)), atol=1e-4)  # type: ignore[arg-type]
    assert torch.allclose(norm.running_var, values.var((0, 2, 3)), rtol=1e-3)  # type: ignore[arg-type]
    assert norm.momentum == 0.1
    assert not any(module.training for module in model.modules())


def test_a_stranger_is_the_same_each_time_and_an_unknown_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    (model, x), (again, y) = stranger("lcnet_050"), stranger("lcnet_050")
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(x, y)
    weights, same = model.state_dict(), again.state_dict()
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert anybody("linear5x128")[1][0].shape == (20, 128)
    monkeypatch.setattr("benchmarks.anybody.COLD", ("no_such_net",))
    with pytest.raises(UnknownNetworkError, match="no no_such_net in timm"):
        anybody("no_such_net")


def rows() -> list[dict[str, Any]]:
    ahead = cold_row(
        "lcnet_050",
        ampopt=contestant(1.0, 2.0),
        eager_fp32=contestant(4.0, 6.0),
        eager_amp=contestant(5.0, relative_error=1e-3),
        recipe_by_hand=contestant(2.0, 3.0, relative_error=2e-3),
    )
    behind = cold_row(
        "ghostnet_100",
        ampopt=contestant(1.0, 2.0),
        eager_fp32=contestant(4.0),
        recipe_by_hand=contestant(1.5, 1.8, relative_error=2e-3),
    )
    wrong = cold_row(
        "mobileone_s0", ampopt=contestant(1.0), recipe_by_hand=contestant(0.5, relative_error=None)
    )
    wrong["judged"] = ["fp32"]
    wrong["notes"] = ["conv_12\noverflows"]
    wrong["contestants"]["eager fp32"] = {"error": "out of memory"}
    return [
        ahead,
        behind,
        wrong,
        {"network": "fastvit_t8", "commit": "c", "skipped": "no fastvit_t8 in timm"},
    ]


def test_the_table_says_when_nearly_all_of_the_gain_was_there() -> None:
    slow, quick = (
        cold_row(name, ampopt=contestant(1.0), eager_fp32=contestant(4.0))
        for name in ("lcnet_050", "resnet18")
    )
    gains = ((3.0, 2.0), (8.0, 1.09), (20.0, 1.0))
    slow["report"] = {"best_so_far": [{"at_s": at, "lane": "amp", "pass": "p", "ms": ms} for at, ms in gains]}
    assert seconds_to(slow) == 8.0
    assert seconds_to(slow, 0.5) == 3.0
    assert seconds_to(slow, 1.0) == 20.0
    assert seconds_to(quick) is None, "nothing was faster than the original"
    quick["report"] = {"best_so_far": [{"at_s": 2.5, "lane": "amp", "pass": "p", "ms": 1.0}]}
    slow["prepare_s"], quick["prepare_s"] = 21.0, 9.0
    table = to_markdown([slow, quick])
    assert "median of 1 networks of the race: 90 % of the gain after 2.5 s, the end after 9.0 s" in table
    assert "that nobody tuned for: 90 % of the gain after 8.0 s, the end after 21.0 s" in table


def test_the_table_says_who_is_behind_the_recipe_by_hand() -> None:
    ahead, behind, wrong, _ = rows()
    assert by_hand_ratio(ahead) == (1.5, "30 Hz")
    assert by_hand_ratio(behind) == (0.9, "30 Hz")
    assert by_hand_ratio(wrong) is None, "NaN is no answer"
    table = to_markdown(rows())
    assert "- behind the recipe by hand: ghostnet_100 0.90 (30 Hz), of 2 where its error is within" in table
    behind["contestants"]["recipe by hand"]["relative_error"] = 0.015
    behind["contestants"]["eager amp"] = contestant(4.0, relative_error=0.01)
    shown = to_markdown([ahead, behind])
    assert "- behind the recipe by hand: none, of 1 where" in shown
    assert "- where it is not, by hand / ampopt: ghostnet_100 0.90" in shown
    assert "- eager FP32 / ampopt: geometric mean 2.45 in the less favourable regime, 30 Hz" in table
    assert "- the recipe by hand / ampopt: geometric mean 1.16 in the less favourable regime, 30 Hz" in table
    assert "| 4.000, 5.000, 2.000, 1.000 | 6.000, 5.000, 3.000, 2.000 | 4.00 (4.00 to 4.00) |" in table
    assert "- mobileone_s0: conv_12 overflows" in table
    assert "- fastvit_t8: no fastvit_t8 in timm" in table
    assert "- mobileone_s0, eager fp32: out of memory" in table
    assert "- lanes: amp 3" in table
    assert "- the AMP lane was not judged on: mobileone_s0" in table


def test_what_has_figures_of_this_commit_is_done_and_failures_are_run_again() -> None:
    known: list[dict[str, Any]] = [
        {"network": "a", "commit": "now", "contestants": {}},
        {"network": "b", "commit": "then", "contestants": {}},
        {"network": "c", "commit": "now", "error": "killed"},
        {"network": "d", "commit": "now", "skipped": "unknown"},
    ]
    assert still_to_run(["a", "b", "c", "d", "e"], known, "now") == ["b", "c", "e"]


def test_a_run_goes_on_where_it_was_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[str] = []
    ends_after = 2

    def call(network: str, device: torch.device, **_: Any) -> dict[str, Any]:
        if len(called) == ends_after:
            raise KeyboardInterrupt
        called.append(network)
        return cold_row(network, ampopt=contestant(1.0), eager_fp32=contestant(2.0))

    monkeypatch.setattr(cold, "default_call", call)
    monkeypatch.setattr(cold, "commit", lambda: "c")
    models = list(COLD[:4])
    words = ["cold", "--device", "cpu", "--out", str(tmp_path), "--models", *models]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(KeyboardInterrupt):
        cold.main()
    (file,) = tmp_path.glob("*/cold.json")
    assert [row["network"] for row in json.loads(file.read_text())] == models[:2]
    ends_after = 9
    cold.main()
    assert called == models
    cold.main()
    assert called == models
    monkeypatch.setattr("sys.argv", [*words, "--again"])
    cold.main()
    assert called == models * 2
    assert file.with_name("cold.md").read_text() == to_markdown(json.loads(file.read_text()))


def test_nothing_begins_that_may_end_too_late() -> None:
    now = 0.0
    left = TimeLeft(300.0, guess_s=100.0, clock=lambda: now)
    assert left.another()
    now = 40.0
    assert left.another(), "the first took 40 s, not the 100 of the guess"
    assert left.most_s(500.0) == 260.0
    now = 160.0
    assert left.another(), "the longest took 120 s, and 140 are left"
    now = 181.0
    assert not left.another()
    assert not TimeLeft(99.0, guess_s=100.0).another()
    assert TimeLeft(None, guess_s=1e9).another()


def test_another_network_replaces_nothing(tmp_path: Path) -> None:
    for network in ("resnet18", "lcnet_050", "resnet18"):
        write_row(tmp_path, cold_row(network, ampopt=contestant(1.0)))
    found = json.loads((tmp_path / "cold.json").read_text())
    assert [row["network"] for row in found] == ["lcnet_050", "resnet18"]


def test_other_benchmarks_show_their_default_call() -> None:
    ahead = rows()[0]
    (line,) = cold_lines.lines([{"default_call": ahead}, {}])[-1:]
    assert line == (
        "- lcnet_050: amp lane after 12.0 s: back to back 1.000 ms (eager 4.000, by hand 2.000), "
        "30 Hz 2.000 ms (eager 6.000, by hand 3.000); commit c"
    )
    assert cold_lines.lines([{}]) == []
    failed = {"network": "resnet18", "commit": "c", "error": "its process ended with status -9"}
    assert "- resnet18: its process ended with status -9; commit c" in passes_table(
        [{"workload": "resnet18", "default_call": failed}]
    )


def test_a_row_with_its_default_call_keeps_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "default_call", lambda network, device: {"network": network})
    assert cold_start.beside({"a": 1}, "net", CPU) == {"a": 1, "default_call": {"network": "net"}}
