"""Lets OpenVINO divide: it multiplies by the reciprocal, which no float32 holds of a number below 3e-39.

Measured with OpenVINO 2026.4: 0 / 1e-39 was NaN, and 1e-39 / 2e-39 infinity. Its compiler leaves a division
as it is where the operator says so. Correct because: a division is what the model says; one by a constant
whose reciprocal is an ordinary number stays a product, which may become a part of a convolution. So does one
by a square root: that of the least float32 is 4e-23. Kept, it would be wrong: of a division by the root of a
mean of squares OpenVINO makes a normalization of the last dimension, whatever the mean is over.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ampopt.ort.options import SessionError

_STAYS = "nonconvertable_divide_0"
"""The note that OpenVINO's compiler looks for; what it says is not read."""


class LostQuotientError(SessionError):
    """An operator, by its name in the model, that divides by several constants without a reciprocal."""

    def __init__(self, operator: str) -> None:
        self.operator, self.reason = operator, "OpenVINO multiplies by the reciprocals of weights"
        super().__init__(f"{self.reason}: {operator}")


def keep_divisions(model: Any) -> int:
    """Let the divisions of an `openvino.Model` stay divisions; returns how many there are.

    Raises LostQuotientError where the divisors are several constants: they become factors all the same.
    """
    divisions = [op for op in model.get_ordered_ops() if op.get_type_name() == "Divide" and _is_inexact(op)]
    for division in divisions:
        divisor = division.input_value(1).get_node()
        if divisor.get_type_name() == "Constant" and divisor.data.size > 1:
            raise LostQuotientError(division.get_friendly_name())
        division.get_rt_info()[_STAYS] = True
    return len(divisions)


def _is_inexact(division: Any) -> bool:
    """Whether the reciprocal of a divisor may be infinite, or a denormal number."""
    divisor = division.input_value(1).get_node()
    if not division.output(0).get_element_type().is_real():
        return False
    if divisor.get_type_name() != "Constant":
        return str(divisor.get_type_name()) != "Sqrt"
    with np.errstate(all="ignore"):
        reciprocals = np.abs(1 / divisor.data.astype(np.float32))
    return not ((reciprocals >= np.finfo(np.float32).tiny) & np.isfinite(reciprocals)).all()
