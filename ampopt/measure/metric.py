"""A user's own distance in place of the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampopt.errors import InputError

Metric = Callable[[Any, Any], float]
"""A user's distance: (outputs, the original's outputs) -> number; 0 for equal, smaller is better."""

ROUNDED_ZERO = -1e-6
"""What counts as 0: rounding alone may give less, as in 1 - a cosine."""


def metric_value(metric: Metric, found: object, expected: object) -> float:
    """The number that a metric gives. It may be NaN, which is within no tolerance.

    Raises InputError for a number below 0, which would be within every tolerance, and is no distance.
    """
    value = float(metric(found, expected))
    if value < ROUNDED_ZERO:
        raise InputError(
            f"the metric gives {value:.3g}: let it return a distance, which is 0 for equal outputs, and "
            "larger for worse ones"
        )
    return 0.0 if value < 0 else value
