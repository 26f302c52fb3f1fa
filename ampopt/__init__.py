"""ampopt optimizes a PyTorch vision model for inference and verifies the result.

Public names are imported on first use, so that `ampopt.robot` runs a bundle without PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ampopt.errors import (
    AmpoptError,
    BundleError,
    CaptureError,
    ExportError,
    InputError,
    Interrupted,
    MissingExtraError,
    PassError,
    StrictError,
    VerificationError,
)
from ampopt.version import __version__

if TYPE_CHECKING:
    from ampopt.api import optimize
    from ampopt.bundle_load import load
    from ampopt.comparison import Comparison, compare
    from ampopt.deploy.loaded_model import LoadedModel
    from ampopt.deploy.runtime import OptimizedModule
    from ampopt.diagnosing import Diagnosis, diagnose
    from ampopt.ir.pipeline import Pipeline
    from ampopt.ir.transform import Engine, Pass
    from ampopt.passes import PIPELINE

__all__ = [
    "PIPELINE",
    "AmpoptError",
    "BundleError",
    "CaptureError",
    "Comparison",
    "Diagnosis",
    "Engine",
    "ExportError",
    "InputError",
    "Interrupted",
    "LoadedModel",
    "MissingExtraError",
    "OptimizedModule",
    "Pass",
    "PassError",
    "Pipeline",
    "StrictError",
    "VerificationError",
    "__version__",
    "compare",
    "diagnose",
    "load",
    "optimize",
]

_HOMES = {
    "PIPELINE": "ampopt.passes",
    "Engine": "ampopt.ir.transform",
    "Pass": "ampopt.ir.transform",
    "Pipeline": "ampopt.ir.pipeline",
    "optimize": "ampopt.api",
    "compare": "ampopt.comparison",
    "Comparison": "ampopt.comparison",
    "Diagnosis": "ampopt.diagnosing",
    "diagnose": "ampopt.diagnosing",
    "LoadedModel": "ampopt.deploy.loaded_model",
    "OptimizedModule": "ampopt.deploy.runtime",
    "load": "ampopt.bundle_load",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ampopt' has no attribute {name!r}")
    from ampopt.system.interrupts import interruptible, watched
    from ampopt.system.process_state import imports_kept  # it takes NumPy to load

    with watched(), imports_kept():  # what Ctrl-C leaves half imported stays so
        found = getattr(importlib.import_module(_HOMES[name]), name)
        with interruptible():
            return found


def __dir__() -> list[str]:
    return __all__
