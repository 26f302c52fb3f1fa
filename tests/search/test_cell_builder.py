"""The two programs of a cell, and what a pass that fails or is wrong does to the cells of others."""

from __future__ import annotations

import pytest

from ampopt.measure.compared import MODES
from tests.helpers import BF16
from tests.support.comparing import Compared, Toy, ToyCompiler, ToyEngine, ToyKernel, ToyLaunch


def test_a_pass_that_fails_is_a_row_and_the_others_go_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Compared(
        monkeypatch, Toy("fold"), Toy("broken", fails="oops"), Toy("layout"), ToyEngine("engine")
    )
    assert found.reasons("broken") == ["failed: ValueError: oops"] * 3
    for name in ("fold", "layout", "engine"):
        assert found.reasons(name) == [""] * 3
        assert all(found[name, mode].gain is not None for mode in MODES)
    assert "fp32: fold + layout + engine" in found.machine.checked


def test_a_wrong_pass_is_measured_and_the_others_go_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Toy("fold"), Toy("wrong"), Toy("layout"), ToyEngine("engine")
    found = Compared(monkeypatch, *passes, wrong={"wrong": "error 1 is over 1e-05"})
    assert found.reasons("wrong") == ["(error 1 is over 1e-05)"] * 3
    assert all(found["wrong", mode].gain is not None for mode in MODES)
    assert {reason for name in ("fold", "layout", "engine") for reason in found.reasons(name)} == {""}
    assert [key for key in found.machine.checked if "wrong" in key] == [
        "fp32: fold + wrong",
        "fp32: fold + wrong + layout",
        "fp32: wrong",
    ]


def test_a_program_that_is_wrong_only_without_a_pass_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Compared(monkeypatch, Toy("a"), Toy("b"), Toy("c"), wrong_recipes={"a + c": "error 1"})
    assert found.reasons("b") == ["", "", "(without it: error 1)"]


def test_the_precision_of_a_lane_stays_in_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Toy("bake-autocast"), Toy("fold")
    found = Compared(monkeypatch, *passes, lanes=(BF16,), wrong={"bake-autocast": "too inexact"})
    assert set(found.machine.checked) == {"amp: bake-autocast", "amp: fold", "amp: bake-autocast + fold"}


def test_a_launch_that_fails_leaves_the_sequences_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Compared(monkeypatch, Toy("fold"), ToyEngine("engine"), ToyLaunch("launch", fails="no capture"))
    assert found.reasons("launch") == ["failed: ValueError: no capture"] * 3
    assert found.reasons("fold") == found.reasons("engine") == [""] * 3


def test_an_engine_that_reads_nothing_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Compared(
        monkeypatch, Toy("fold"), ToyKernel("kernel"), ToyEngine("engine", declines="no package")
    )
    assert found.reasons("engine") == ["nothing to do: no package"] * 3
    assert found.notes == []


def test_findings_of_the_sequence_are_replayed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = Toy("tiles", measures=True, seconds=9.0)
    engine = ToyEngine("engine", measures=True, seconds=5.0, said=5.0)
    machine = Compared(monkeypatch, Toy("fold"), tiles, engine, budget_s=100.0).machine
    findings = [(step.name, step.found) for step in machine.chosen if step.name != "fold"]
    assert findings == [
        ("tiles", None),
        ("tiles", "best"),
        ("engine", None),
        ("engine", "best"),
    ]
    assert machine.applied[1] == "fold > tiles"


def test_an_engine_measures_nothing_where_others_need_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ToyEngine("engine", measures=True, seconds=8.0, said=8.0)
    compiler = ToyCompiler("compiler", said=8.0, seconds=8.0)

    def found_by_engine(budget_s: float) -> set[str | None]:
        machine = Compared(monkeypatch, Toy("fold"), engine, compiler, budget_s=budget_s).machine
        return {step.found for step in machine.chosen if step.name == "engine"}

    assert found_by_engine(35.0) == {"default"}
    assert found_by_engine(90.0) == {None, "best"}
