"""Operators that read where floating-point values say, and do not check that: with NaN they end the process.

Found with torchvision 0.29 on a CPU: NaN in the offsets of `deform_conv2d` is a segmentation fault, and NaN
in the boxes of `roi_align` asks for a vector of any size. Infinities and large numbers did no harm.
"""

from __future__ import annotations

import torch

from ampopt.ir.graph import calls, where
from ampopt.ir.program import Program

_NAMES = ("torchvision::deform_conv2d", "torchvision::roi_align", "torchvision::ps_roi_align")


def why_nan_may_crash(program: Program) -> str | None:
    """Why NaN in its inputs may end the process; None if nothing is known that would."""
    for node in calls(program.graph):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _NAMES:
            return f"{where(node)} reads where values say, and NaN there ends the process"
    return None
