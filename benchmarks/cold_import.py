"""A cold process: it imports ampopt as a stranger does, who has PyTorch, and goes on as `cold_process`.

    python -m benchmarks.cold_import NETWORK DEVICE FILE [--seconds S] [--compile]

The benchmarks' own modules import much of ampopt, so they come after it.
"""

from __future__ import annotations

import importlib
import time

import torch  # noqa: F401


def import_s() -> float:
    """The seconds that a first `ampopt.optimize` takes until it can be called."""
    start = time.perf_counter()
    getattr(importlib.import_module("ampopt"), "optimize")  # noqa: B009
    return time.perf_counter() - start


if __name__ == "__main__":
    took = import_s()
    importlib.import_module("benchmarks.cold_process").main(took)
