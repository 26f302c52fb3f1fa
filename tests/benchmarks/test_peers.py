"""The race: who runs, contestants in their processes, what a failure leaves, the table and the chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import cold_start, peers, race, regimes
from benchmarks.contestants import Contestant, as_it_is, contestants, torchscript
from benchmarks.models import WORKLOADS
from benchmarks.peers import options_of, write_row
from benchmarks.peers_table import to_markdown
from benchmarks.race_networks import BATCH_8, RACE, racer
from benchmarks.race_process import warm_up
from benchmarks.regimes import REGIMES
from benchmarks.results_files import results_folder
from tests.benchmarks.rows import cold_row, contestant, race_row

CPU = torch.device("cpu")


def test_the_race_is_of_the_workloads_nine_more_and_five_batches() -> None:
    assert RACE[: len(WORKLOADS)] == tuple(WORKLOADS)
    assert len(RACE) == len(set(RACE)) == len(WORKLOADS) + 9 + 5
    assert sum(name.endswith(BATCH_8) for name in RACE) == 5


def test_a_batch_of_8_is_of_the_same_network() -> None:
    model, (x,) = racer("torchvision/mobilenet_v2")
    batched, (xs,) = racer("torchvision/mobilenet_v2-b8")
    assert xs.shape == (8, *x.shape[1:])
    weights, same = model.state_dict(), batched.state_dict()
    assert all(torch.equal(weights[name], same[name]) for name in weights)


class Stand:
    """In place of a contestant's process: it notes what it is asked, and fails where its name says so."""

    asked: list[tuple[str, str]]
    envs: list[dict[str, str]]

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._name = command[3]
        self._again = env in self.envs
        self.envs.append(env)

    def ask(self, what: str, *arguments: str) -> Any:
        self.asked.append((self._name, what))
        if self._name == f"fails to {what}":
            raise RuntimeError(f"cannot {what}")
        if self._name == "poisons" and what == "make" and not arguments:
            return {"unusable": 2, "left_out": "third: device-side assert"}
        if self._name == "poisons at once" and what == "make":
            return {"unusable": 0, "left_out": "first: device-side assert"}
        if self._name.startswith("renews") and what == "make" and self._again:
            assert arguments == ("", "the best")
            if self._name == "renews in vain":
                raise RuntimeError("out of memory")
        if what == "block":
            return {"seconds": [1e-3] * 3 if not self._again else [2e-3] * 3}
        chosen = {"relative_error": 1e-6, "way": "w", "won": "the best", "bytes": 5 if self._again else 9}
        chosen |= {"tried": {"another": 2.0} if self._name.startswith("renews") else {}}
        return {"make": {"prepare_s": 1.0}, "choose": chosen}.get(what, {})

    def end(self) -> None:
        pass


def stands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(Stand, "asked", asked, raising=False)
    monkeypatch.setattr(Stand, "envs", [], raising=False)
    monkeypatch.setattr(race, "Racer", Stand)
    monkeypatch.setattr(race, "PAUSE_S", 0.0)
    monkeypatch.setattr(race, "write_parts", lambda *_, **__: None)
    return asked


def test_tuners_are_made_after_the_others_and_all_are_chosen_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stands(monkeypatch)
    entered = [
        Contestant("tunes", "fp32", as_it_is(torchscript), tunes=True),
        Contestant("plain", "fp32", as_it_is(torchscript)),
        Contestant("fails to make", "fp32", as_it_is(torchscript)),
        Contestant("fails to choose", "fp32", as_it_is(torchscript)),
        Contestant("fails to block", "fp32", as_it_is(torchscript)),
    ]
    entered.pop()
    row = race.race("net", entered, CPU, io="fp32", threads=1, rounds=2)
    what = [each for each in asked if each[1] != "block"]
    assert what.index(("tunes", "make")) == 3, "after the three that time nothing"
    assert what[4:] == [
        *(("tunes", "choose"), ("plain", "choose"), ("fails to choose", "choose")),
        *(("tunes", "settle"), ("plain", "settle")),
    ]
    blocks = [name for name, each in asked if each == "block"]
    assert sorted(blocks) == ["plain"] * 4 + ["tunes"] * 4, "two rounds in two regimes"
    found = row["contestants"]
    assert found["fails to make"] == {"lane": "fp32", "error": "cannot make"}
    assert found["fails to choose"]["error"] == "cannot choose"
    for regime in REGIMES:
        assert found["plain"][regime]["p50_ms"] == 1.0
        assert found["plain"][regime]["blocks_ms"] == [1.0, 1.0]
    assert (row["lane"], row["io"], row["threads"]) == ("fp32", "fp32", 1)
    assert len(row["load"]) == 2


def test_a_contestant_whose_way_took_the_device_with_it_begins_anew_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = stands(monkeypatch)
    entered = [Contestant(name, "fp32", as_it_is(torchscript)) for name in ("poisons", "poisons at once")]
    found = race.race("net", entered, CPU, rounds=1)["contestants"]
    assert [each for each in asked if each[1] == "make"] == [("poisons", "make")] * 2 + [
        ("poisons at once", "make")
    ]
    assert found["poisons"]["left_out"] == "third: device-side assert"
    assert found["poisons"]["30 Hz"]["p50_ms"] == 2.0, "of the second process"
    assert found["poisons at once"] == {"lane": "fp32", "error": "first: device-side assert"}


def test_the_way_that_won_runs_in_a_process_without_those_that_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stands(monkeypatch)
    entered = [
        Contestant(name, "fp32", as_it_is(torchscript)) for name in ("renews", "renews in vain", "alone")
    ]
    found = race.race("net", entered, CPU, rounds=1)["contestants"]
    made = [name for name, what in asked if what == "make"]
    assert made == ["renews", "renews in vain", "alone", "renews", "renews in vain"]
    assert [found[each.name]["30 Hz"]["p50_ms"] for each in entered] == [2.0, 1.0, 1.0]
    assert [found[each.name]["bytes"] for each in entered] == [5, 9, 9]
    assert found["renews"]["tried"] == {"another": 2.0}
    assert found["renews in vain"]["not_renewed"] == "out of memory"


def test_options_narrow_the_race(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--contestants", "eager", "ncnn", "--threads", "1", "--io", "fp32"]
    options = options_of(words)
    entered = peers.entered_in(options, "resnet18", "fp32", contestants(CPU))
    assert [each.name for each in entered] == ["eager", "ncnn"]
    everybody = options_of(["--device", "cpu", "--thorough", "resnet18"])
    for network, more in (("resnet18", True), ("cropunet", False)):
        names = [each.name for each in peers.entered_in(everybody, network, "fp32", contestants(CPU))]
        assert ("compile max-autotune" in names) == more
    for wrong, reason in (
        (["--gpus", "0", "1", "2"], "at most 2 races"),
        (["--contestants", "nobody"], "no contestant nobody"),
        (["--device", "cuda", "--threads", "1"], "races on a CPU"),
    ):
        with pytest.raises(SystemExit):
            options_of(wrong)
        assert reason in capsys.readouterr().err


def test_rows_of_a_commit_are_not_run_again_and_the_default_call_is_beside_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run: list[tuple[str, str, str]] = []

    def stand_in(
        network: str, entered: Sequence[Contestant], device: torch.device, *, io: str, **_: Any
    ) -> Any:
        lane = entered[0].lane
        run.append((network, lane, io))
        return race_row(network, lane, io, eager=2.0, ours=1.0)

    words = [
        "peers",
        "--device",
        "cpu",
        "--models",
        "resnet18",
        "cropunet",
        "--out",
        str(tmp_path),
        "--missing",
    ]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(peers, "race", stand_in)
    monkeypatch.setattr(peers, "commit", lambda: "c")
    monkeypatch.setattr(peers, "draw", lambda rows, path: None)
    monkeypatch.setattr(
        cold_start, "default_call", lambda network, device: cold_row(network, ampopt=contestant(1.0))
    )
    (folder,) = (results_folder(tmp_path, CPU),)
    write_row(folder, race_row("resnet18", "amp", "lane", eager=2.0, ours=1.0))
    peers.main()
    assert run == [
        *(("resnet18", "fp32", "fp32"), ("resnet18", "amp", "fp32")),
        *(("cropunet", "fp32", "fp32"), ("cropunet", "amp", "fp32"), ("cropunet", "amp", "lane")),
    ]
    rows = json.loads((folder / "race.json").read_text())
    assert len(rows) == 6
    assert ["default_call" in row for row in rows] == [
        row["network"] == "resnet18" and row["lane"] == "fp32" for row in rows
    ]
    assert "- resnet18: amp lane after 12.0 s" in (folder / "race.md").read_text()


@pytest.mark.slow
def test_a_race_has_a_row_for_everybody_and_reasons_for_those_who_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(race, "PAUSE_S", 0.0)
    entered = [each for each in contestants(CPU) if each.name in ("eager", "TorchScript")]
    made = race.race("linear5x128", [*entered, Contestant("nobody", "fp32")], CPU, rounds=1)
    found = json.loads(json.dumps(made))["contestants"]
    assert list(found) == ["eager", "TorchScript", "nobody"]
    for name in ("eager", "TorchScript"):
        assert found[name]["relative_error"] < 1e-5
        assert found[name]["prepare_s"] > 0
        for regime in REGIMES:
            assert found[name][regime]["samples"] >= regimes.LEAST_CALLS
            assert found[name][regime]["p50_ms"] > 0
        assert found[name]["30 Hz"]["samples"] == regimes.FRAMES
        assert found[name]["back to back"]["cpu_ms"] > 0
    assert set(found["TorchScript"]["tried"]) == {"channels_last", "contiguous"}
    assert found["nobody"] == {"lane": "fp32", "error": "StopIteration"}
    write_row(tmp_path, made)
    assert "- nobody: StopIteration (linear5x128)" in (tmp_path / "race.md").read_text()
    assert (tmp_path / "race.png").stat().st_size > 1000


def test_a_warm_up_ends_when_the_latency_has_settled() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        Tensor.sum(torch.ones(200_000))

    warm_up(call, CPU)
    assert calls >= 16


def test_the_table_shows_both_regimes_what_was_tried_and_failures_once() -> None:
    rows = [
        race_row(
            "resnet18",
            eager=contestant(4.0, 5.0, way="as it is"),
            ours=contestant(1.0, 2.0),
            ort="absent\nlib",
        ),
        race_row("cropunet", eager=3.0, ours=1.0, ort="absent\nlib"),
        race_row("resnet18", "amp", "lane", ours=1.0, TensorRT="no such library"),
    ]
    rows[0]["contestants"]["eager"]["30 Hz"]["p99_ms"] = None
    table = to_markdown(rows)
    assert "| resnet18 | 4.000 (4.00) | 1.000 (1.00) |" in table
    assert "| resnet18 | 5.000 | 2.000 (2.00) |" in table, "a p99 that too few samples know is left out"
    assert "| resnet18 | as it is | – |" in table
    assert (
        "| resnet18 | eager 4.000 | 1.000 | 4.00 (4.00 to 4.00) | eager 5.000 | 2.000 | 2.50 (2.50 to 2.50) |"
        in table
    )
    assert "| 2.50 (30 Hz) | 1.00 | – | 0.5, – | c |" in table
    assert "- 30 Hz: geometric mean 2.739, least 2.500 (resnet18)" in table
    assert "2.74 times ampopt's time in geometric mean (30 Hz, the less favourable regime)" in table
    assert "- ort: absent (resnet18, cropunet)" in table
    assert "CPU time" not in table
    for name, ms in (("eager", 3.0), ("ampopt fp32", 2.0)):
        rows[0]["contestants"][name]["back to back"]["cpu_ms"] = ms
    rows[0]["environment"]["instructions"] = "AVX512"
    assert "- CPU time back to back: geometric mean 1.500, least 1.500 (resnet18)" in to_markdown(rows)
    assert "energy" not in table, "nobody has any to show"
    assert "## amp lane, the lane's dtype in and out" in table
    assert "- TensorRT: no such library (resnet18)" in table


def test_rows_keep_the_order_of_the_race_and_each_its_place(tmp_path: Path) -> None:
    write_row(tmp_path, race_row("cropunet", eager=1.0, ours=1.0))
    write_row(tmp_path, race_row("encdecmil18", eager=2.0, ours="out of\nmemory"))
    write_row(tmp_path, race_row("cropunet", "amp", eager=9.0))
    write_row(tmp_path, race_row("cropunet", eager=3.0, ours=1.0))
    rows = json.loads((tmp_path / "race.json").read_text())
    assert [(each["network"], each["lane"]) for each in rows] == [
        *(("encdecmil18", "fp32"), ("cropunet", "fp32"), ("cropunet", "amp")),
    ]
    table = (tmp_path / "race.md").read_text()
    assert table == to_markdown(rows)
    assert "- ampopt fp32: out of (encdecmil18)" in table
    assert "| cropunet | 3.000 (3.00) | 1.000 (1.00) |" in table
