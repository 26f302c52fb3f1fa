"""The names of precisions, without importing PyTorch; `ampopt.ir.lanes` defines each of them."""

from __future__ import annotations

from ampopt.errors import InputError
from ampopt.system.wording import argument

LANE_NAMES = ("fp32", "amp", "bf16")
"""The names of all lanes."""

IO = ("original", "lane")
"""Whose dtypes an optimized module takes and gives."""

AUTO = ("fp32", "amp")
"""The lanes of `precision="auto"`."""


def names_of(precision: object) -> tuple[str, ...]:
    """The lane names in a text: "auto", a lane's name, or several separated by commas.

    Raises InputError for an unknown lane.
    """
    if precision == "auto":
        return AUTO
    found = [name.strip() for name in precision.split(",")] if isinstance(precision, str) else []
    if not found or not set(found) <= {*LANE_NAMES}:
        choices = ", ".join(("auto", *LANE_NAMES))
        given = argument("precision", precision)
        raise InputError(f"{given}: choose from {choices}, or several, 'fp32,bf16'")
    return tuple(found)


def check_io(io: object, precision: str, lanes: int) -> None:
    """Raise InputError for an unknown `io`, and for "lane" unless `precision` names one lane."""
    if not isinstance(io, str) or io not in IO:
        raise InputError(f"{argument('io', io)}: choose from {', '.join(IO)}")
    if io == "lane" and lanes != 1:
        raise InputError(
            f"{argument('io', 'lane')} with {argument('precision', precision)}: the dtype of inputs and "
            f"outputs has to be known beforehand: name one lane, such as {argument('precision', 'amp')}"
        )
