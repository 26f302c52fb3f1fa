"""`FailedCalls`: whether the original is asked in place of a program that has raised an error in a call.

A program takes and gives tensors, and does nothing else: it writes to no input, draws no random numbers, and
its state is set once it has answered. So a call in which it has failed can be made again.
"""

from __future__ import annotations

import logging

import torch

from ampopt.errors import first_line, lacks_memory
from ampopt.measure.clocks import synchronize
from ampopt.system.interrupts import check_interrupted

logger = logging.getLogger("ampopt")


class FailedCalls:
    """Calls of a module in which a program has failed; the first that the original answers is logged."""

    def __init__(self, device: torch.device) -> None:
        """`device` is the program's."""
        self._device, self._has_told = device, False

    def reason(self, error: Exception) -> str | None:
        """Why the original is asked: what the program has failed with.

        None where the original would meet the error, too: memory is out, or the device is left unusable.
        Raises KeyboardInterrupt where an engine has swallowed one.
        """
        check_interrupted(error)
        if lacks_memory(error) or not self._works():
            return None  # raised from here, the error would keep the tensors of the call alive
        return f"its program failed: {first_line(error)}"

    def _works(self) -> bool:
        try:
            synchronize(self._device)
        except Exception:  # of the device, which the failed call has left so: that call's error is raised
            return False
        return True

    def tell(self, call: str, reason: str) -> None:
        """Log that the original has answered a call for a reason."""
        log = logger.debug if self._has_told else logger.warning
        self._has_told = True
        log("ampopt: the original model has answered a call with %s, because %s", call, reason)
