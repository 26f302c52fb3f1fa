"""Operators of PyTorch that end the process with inputs that they do not check.

Found with torchvision 0.29 on a CPU: NaN in the offsets of `deform_conv2d` is a segmentation fault, and NaN
in the boxes of `roi_align` asks for a vector of any size. Infinities and large numbers did no harm. The
smallest integer divided by -1 towards zero is a fault of the processor (PyTorch 2.14).
"""

from __future__ import annotations

import torch
from torch import fx

from ampopt.ir.graph import arguments, calls, where
from ampopt.ir.program import Program

_NAMES = ("torchvision::deform_conv2d", "torchvision::roi_align", "torchvision::ps_roi_align")


def why_nan_may_crash(program: Program) -> str | None:
    """Why NaN in its inputs may end the process; None if nothing is known that would."""
    for node in calls(program.graph):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _NAMES:
            return f"{where(node)} reads where values say, and NaN there ends the process"
    return None


def divides_towards_zero(program: Program) -> bool:
    """Whether a division may end the process with the smallest integer; by a number but -1 none does."""
    divisions = [node for node in calls(program.graph) if node.kwargs.get("rounding_mode") == "trunc"]
    by = [arguments(node)["other"] for node in divisions]
    return any(divisor == -1 or isinstance(divisor, fx.Node) for divisor in by)
