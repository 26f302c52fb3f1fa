"""ampopt: a PyTorch vision model in, a faster verified one out."""

from __future__ import annotations

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
from ampopt.version import __version__

__all__ = [
    "AmpoptError",
    "CaptureError",
    "Comparison",
    "InputError",
    "MissingExtraError",
    "OptimizedModule",
    "PassError",
    "VerificationError",
    "__version__",
    "compare",
    "optimize",
]
