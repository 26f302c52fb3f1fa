"""The fixtures of the engine's tests that the hostile ones need, too."""

from __future__ import annotations

from tests.engine_fixtures import all_kept

__all__ = ["all_kept"]
