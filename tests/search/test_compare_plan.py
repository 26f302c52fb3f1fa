"""The programs of each cell: without the pass and with it, in every mode."""

from __future__ import annotations

import pytest

from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.pipeline import Pipeline
from ampopt.measure.compared import MODES
from ampopt.passes import PIPELINE
from ampopt.search.compare_plan import Cell, Plan
from tests.helpers import BF16
from tests.support.comparing import Toy, ToyEngine, ToyKernel, ToyLaunch

BAKE, FOLD, KERNEL = Toy("bake-autocast"), Toy("fold"), ToyKernel("kernel")
ENGINE, OTHER, LAUNCH = ToyEngine("engine"), ToyEngine("other"), ToyLaunch("launch")
PLAN = Plan(Pipeline.of([Toy("noops"), BAKE, FOLD, KERNEL, ENGINE, OTHER, LAUNCH]), (FP32, BF16))


def pair(lane: Lane, mode: str, name: str, unreadable: tuple[str, ...] = ()) -> tuple[str, str]:
    (cell,) = (c for c in PLAN.cells if (c.lane, c.mode, c.step.name) == (lane, mode, name))
    left_out = tuple(step for step in PLAN.pipeline if step.name in unreadable)
    found = PLAN.pair(cell, left_out)
    before, after = (" ".join(step.name for step in steps) for steps in (found.before, found.after))
    return before, after


@pytest.mark.parametrize(
    ("mode", "name", "before", "after"),
    [
        ("alone", "fold", "bake-autocast", "bake-autocast fold"),
        ("alone", "bake-autocast", "", "bake-autocast"),
        ("alone", "engine", "bake-autocast", "bake-autocast engine"),
        ("alone", "launch", "bake-autocast", "bake-autocast launch"),
        ("cumulative", "noops", "launch", "noops launch"),
        ("cumulative", "fold", "noops bake-autocast launch", "noops bake-autocast fold launch"),
        ("left out", "fold", "noops bake-autocast kernel launch", "noops bake-autocast fold kernel launch"),
        ("cumulative", "launch", "noops bake-autocast fold kernel", "noops bake-autocast fold kernel launch"),
        ("left out", "launch", "noops bake-autocast fold kernel", "noops bake-autocast fold kernel launch"),
        *(
            (
                mode,
                "other",
                "noops bake-autocast fold kernel launch",
                "noops bake-autocast fold kernel other launch",
            )
            for mode in ("cumulative", "left out")
        ),
    ],
)
def test_the_programs_of_a_cell(mode: str, name: str, before: str, after: str) -> None:
    assert pair(BF16, mode, name) == (before, after)


def test_without_mixed_precision_a_pass_stands_alone() -> None:
    assert pair(FP32, "alone", "fold") == ("", "fold")


def test_what_an_engine_cannot_read_is_missing_from_its_program_alone() -> None:
    before, after = pair(FP32, "left out", "engine", unreadable=("kernel",))
    assert before == "noops bake-autocast fold kernel launch"
    assert after == "noops bake-autocast fold engine launch"


def test_cells_are_in_the_order_of_the_rows() -> None:
    plan = Plan(PIPELINE, (FP32, BF16))
    assert [(c.lane.name, c.mode, c.step.name) for c in plan.cells] == [
        (lane, mode, step.name) for lane in ("fp32", "amp") for mode in MODES for step in PIPELINE
    ]
    assert plan.of(FP32, ("left out", "alone"), PIPELINE.launches) == [
        c for c in plan.cells if c.lane is FP32 and c.mode != "cumulative" and c.step.name == "cuda-graph"
    ]


def test_equal_comparisons_have_equal_keys() -> None:
    def key(lane: Lane, mode: str, step: Toy) -> tuple[str, ...]:
        return PLAN.pair(Cell(lane, mode, step)).key(lane)

    assert key(FP32, "cumulative", ENGINE) == key(FP32, "left out", ENGINE) != key(FP32, "alone", ENGINE)
    assert key(FP32, "cumulative", FOLD) != key(BF16, "cumulative", FOLD) != key(BF16, "left out", FOLD)
