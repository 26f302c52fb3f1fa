"""Short ways to a program for a range of sizes, made and verified without timing anything."""

from __future__ import annotations

from typing import Any

from torch import nn

from ampopt.deploy.onnx_names import input_names_of
from ampopt.deploy.optimized import Optimized
from ampopt.deploy.runtime import OptimizedModule
from ampopt.deploy.sized_program import sized_program, verify_sizes
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.size_ranges import Asked, sizes_of
from ampopt.ir.transform import Pass, Recipe, replay
from ampopt.measure.ledger import Ledger
from tests.support.planted import captured_of


def sized_module(
    model: nn.Module,
    *args: Any,
    dynamic: Asked,
    passes: tuple[Pass, ...] = (),
    lane: Lane = FP32,
    **options: Any,
) -> OptimizedModule:
    """A module with a verified program for the ranges; NoSizedProgramError where there is none."""
    original, captured = captured_of(model, *args)
    program = replay(passes, lane.start(captured.program))
    recipe, report = Recipe(lane, program.recipe), Ledger("model", {}, ())
    names = input_names_of(captured)[: len(captured.inputs)]
    sizes = sizes_of(dynamic, names, captured.inputs)
    optimized = Optimized(original, captured, program, recipe, report)
    sized = sized_program(optimized, sizes)
    verify_sizes(optimized, sized, lambda: True, draws=1)
    return OptimizedModule(original, captured, program, recipe, report, sized=sized, **options)
