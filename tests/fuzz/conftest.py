"""The fixtures of the engine's tests that the hostile ones need, too."""

from __future__ import annotations

from tests.ampopt.conftest import all_kept

__all__ = ["all_kept"]
