"""compare plans its time: every cell is filled, nothing is done twice, and the budget is kept to."""

from __future__ import annotations

from typing import Any

import pytest

from ampopt.ir.lanes import FP32
from ampopt.measure.changes import INTERRUPTED
from ampopt.measure.compared import MODES
from tests.helpers import BF16
from tests.support.comparing import Compared, Toy, ToyCompiler, ToyEngine, ToyKernel, ToyLaunch

GAINS = {"fold": 1.2, "layout": 1.5, "kernel": 1.1, "engine": 2.0, "compiler": 1.6}
PASSES = (
    Toy("noops", works=False),
    Toy("fold"),
    Toy("layout"),
    ToyKernel("kernel"),
    Toy("other", declines="there is no GPU"),
    ToyEngine("engine", unread="kernel"),
    ToyCompiler("compiler", seconds=8.0, said=4.0, unread="kernel"),
)


def cost(names: frozenset[str]) -> float:
    """A call takes 20 ms, and each pass makes it shorter."""
    seconds = 0.02
    for name in names:
        seconds /= GAINS.get(name, 1.0)
    return seconds


def test_every_cell_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Compared(monkeypatch, *PASSES, cost=cost, lanes=(FP32, BF16))
    assert len(found.rows) == 2 * len(MODES) * len(PASSES)
    for (_, name, _), row in found.rows.items():
        if name in GAINS:
            assert row.latency is not None
            assert row.gain is not None
            assert row.error == 1e-7
        else:
            assert row.reason.startswith("nothing to do")
    assert found["other", "alone"].reason == "nothing to do: there is no GPU"
    assert found.notes == ["without kernel, which they cannot read: engine (fp32, amp), compiler (fp32, amp)"]


@pytest.mark.parametrize("mode", MODES)
def test_gains_are_those_of_the_mode(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    found = Compared(monkeypatch, *PASSES, cost=cost)
    over_graph = {"engine": 2.0 / 1.1, "compiler": 1.6 / 1.1} if mode != "alone" else {}
    for name, factor in (GAINS | over_graph).items():
        gain = found[name, mode].gain
        assert gain is not None
        assert gain.ratio == pytest.approx(factor, rel=0.02)
        assert gain.high < 1.1 * gain.low


def test_each_distinct_program_is_built_and_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Compared(monkeypatch, *PASSES, cost=cost).machine
    assert len(machine.applied) == len(set(machine.applied))
    assert set(machine.checked.values()) == {1}
    sequence = ("fold", "fold + layout", "fold + layout + kernel")
    left_out = ("layout + kernel", "fold + kernel")
    alone = ("layout", "kernel", "engine", "compiler")
    engines = ("fold + layout + engine", "fold + layout + compiler")
    assert set(machine.checked) == {f"fp32: {p}" for p in (*sequence, *left_out, *alone, *engines)}


def test_what_does_nothing_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = (Toy("noops", works=False), Toy("other", declines="no"))
    machine = Compared(monkeypatch, *idle).machine
    assert machine.applied == [" > noops"]
    assert (machine.time, *machine.checked, *machine.calls) == (0.0,)


def test_rewrites_come_first_and_engines_by_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = ToyCompiler("slow", seconds=9.0, said=4.0), ToyEngine("quick", seconds=1.0, said=1.0)
    machine = Compared(monkeypatch, slow, quick, Toy("fold"), Toy("layout"), lanes=(FP32, BF16)).machine
    order = [text.partition("> ")[2] for text in machine.applied]
    assert order[-8:] == ["quick"] * 4 + ["slow"] * 4
    assert not {"quick", "slow"} & set(order[:-8])


def test_compilers_are_rehearsed_from_the_time_on_when_their_programs_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Compared(
        monkeypatch, Toy("fold"), ToyCompiler("compiler", said=4.0), lanes=(FP32, BF16), cost=cost
    )
    programs, untils = zip(*found.machine.rehearsed, strict=True)
    assert programs == (
        "fp32: fold > compiler",
        "amp: fold > compiler",
        "fp32:  > compiler",
        "amp:  > compiler",
    )
    assert all(40.0 < until < 60.0 for until in untils)


def test_what_engines_found_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ToyEngine("engine", hint="it runs with default options")
    assert Compared(monkeypatch, Toy("fold"), engine).notes == ["fp32 lane: it runs with default options"]


def test_engines_read_the_kernels_that_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Compared(monkeypatch, Toy("fold"), ToyKernel("kernel"), ToyEngine("engine"))
    assert "fp32: fold + kernel + engine" in found.machine.checked
    assert found.notes == []


def test_sequences_are_launched_as_they_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Compared(
        monkeypatch, Toy("fold"), Toy("layout"), ToyEngine("engine"), ToyLaunch("launch")
    ).machine
    assert set(machine.checked) == {
        f"fp32: {program}"
        for program in (
            "fold + launch",
            "fold + layout + launch",
            "layout + launch",
            "fold + layout + engine + launch",
            *("fold", "layout", "fold + layout", "engine", "launch"),
        )
    }


@pytest.mark.parametrize("call_s", [0.001, 0.02, 0.2, 2.0])
@pytest.mark.parametrize("budget_s", [5.0, 30.0, 60.0])
def test_the_budget_is_kept_to(monkeypatch: pytest.MonkeyPatch, call_s: float, budget_s: float) -> None:
    costs: dict[str, Any] = {"cost": lambda names: call_s, "check_s": 5 * call_s, "noise": 0.2}
    found = Compared(monkeypatch, *PASSES, budget_s=budget_s, lanes=(FP32, BF16), **costs)
    assert found.took_s <= budget_s + 2.0


def test_where_calls_are_long_some_cells_are_filled_and_the_others_say_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"cost": lambda names: 2.0, "check_s": 6.0, "lanes": (FP32,)}
    found = Compared(monkeypatch, *PASSES, budget_s=60.0, **options)
    reasons = {row.reason for row in found.rows.values() if row.gain is None}
    (missing,) = (reason for reason in reasons if reason.startswith("not tried"))
    assert 0 < sum(row.gain is not None for row in found.rows.values()) < 15
    budget_s = float(missing.removeprefix("not tried: no time left (budget_s=").removesuffix(" would do)"))
    assert f"budget_s={budget_s:.0f} would fill them" in found.notes[-1]
    found.machine.pass_by(100.0)  # a table that is read later asks for no more
    assert found.comparer.notes() == found.notes
    assert list(found.comparer.rows()) == list(found.rows.values())
    assert 60.0 < budget_s < 1500.0
    filled = Compared(monkeypatch, *PASSES, budget_s=budget_s, **options)
    assert not [row for row in filled.rows.values() if row.reason.startswith("not tried")]


def test_intervals_are_narrower_with_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def widths(budget_s: float) -> list[float]:
        found = Compared(monkeypatch, *PASSES[:4], cost=cost, noise=0.3, budget_s=budget_s)
        return [row.gain.high / row.gain.low for row in found.rows.values() if row.gain is not None]

    brief, long = widths(8.0), widths(60.0)
    assert max(long) < max(brief)
    assert sum(long) < 0.8 * sum(brief)


def test_it_ends_once_all_intervals_are_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Compared(monkeypatch, *PASSES[:4], cost=cost, budget_s=1000.0).took_s < 60.0


def test_the_time_left_goes_where_the_intervals_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"cost": lambda names: 0.02, "noise": 0.0, "noises": {"shaky": 0.5}}
    calls = Compared(monkeypatch, ToyEngine("steady"), ToyEngine("shaky"), **options).machine.calls
    assert calls["fp32: shaky"] > 4 * calls["fp32: steady"]


def test_a_compiler_that_is_cut_off_leaves_the_other_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = ToyCompiler("slow", seconds=100.0, said=4.0)
    found = Compared(monkeypatch, Toy("fold"), slow, cost=cost, budget_s=30.0)
    assert all("no time left" in reason for reason in found.reasons("slow"))
    assert all(found["fold", mode].gain is not None for mode in MODES)
    assert found.took_s <= 32.0


def test_interrupted_the_rows_so_far_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Compared(monkeypatch, *PASSES, cost=cost, interrupt_at=2.5)
    assert cut.took_s < 2.6
    filled = [key for key, row in cut.rows.items() if row.gain is not None]
    left = [key for key, row in cut.rows.items() if row.reason == INTERRUPTED]
    assert filled
    assert left
    assert all(cut.rows[key].reason.startswith("nothing to do") for key in set(cut.rows) - {*filled, *left})
    assert not [note for note in cut.notes if "budget_s" in note]
    assert f"interrupted: {len(left)} of {len(cut.rows)} cells are not filled" in cut.notes
    assert cut.interrupted


def test_interrupted_when_every_cell_is_filled_the_times_are_less_sure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Compared(monkeypatch, *PASSES, cost=cost)
    cut = Compared(monkeypatch, *PASSES, cost=cost, interrupt_at=0.95 * whole.took_s)
    assert not [row for row in cut.rows.values() if row.reason == INTERRUPTED]
    assert "interrupted: times are less sure" in cut.notes
    assert cut.interrupted
    assert not whole.interrupted
    assert not [note for note in whole.notes if "interrupted" in note]


def test_a_call_that_fails_is_its_own_cells_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Compared(monkeypatch, Toy("fold"), Toy("layout"), cost=cost, uncallable={"layout"})
    assert found["layout", "alone"].reason == "failed: RuntimeError: it does not run"
    assert found["fold", "alone"].gain is not None
