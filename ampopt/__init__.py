"""ampopt: a PyTorch vision model in, a faster verified one out."""

from __future__ import annotations

__version__ = "0.1.0"

from ampopt.api import optimize
from ampopt.compare import Comparison, compare
from ampopt.errors import (
    AmpoptError,
    CaptureError,
    InputError,
    MissingExtraError,
    PassError,
    VerificationError,
)
from ampopt.runtime import OptimizedModule

__all__ = [
    "AmpoptError",
    "CaptureError",
    "Comparison",
    "InputError",
    "MissingExtraError",
    "OptimizedModule",
    "PassError",
    "VerificationError",
    "compare",
    "optimize",
]
