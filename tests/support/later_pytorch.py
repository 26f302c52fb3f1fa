"""The marks of tests of what only a later PyTorch captures."""

from __future__ import annotations

import pytest
import torch

needs_places_of_values = pytest.mark.skipif(
    torch.__version__ < "2.14",
    reason=f"torch {torch.__version__} captures no place that is computed of values (pull request 186138)",
)
