"""Data of an optimized model, from which its module is served and its files are written."""

from __future__ import annotations

import dataclasses

from torch import nn

from ampopt.ir.capture import Captured
from ampopt.ir.program import Program
from ampopt.ir.size_range import Sizes
from ampopt.ir.transform import Recipe
from ampopt.measure.ledger import Ledger


@dataclasses.dataclass(frozen=True)
class Optimized:
    """A model, its capture, and the program and recipe that were chosen for it.

    `original` is a private copy in evaluation mode, which is never called itself.
    """

    original: nn.Module
    captured: Captured
    program: Program
    recipe: Recipe
    report: Ledger
    sizes: Sizes = ()
    """The ranges of sizes that a program of its own answers, see `ampopt.deploy.sized_program`."""
