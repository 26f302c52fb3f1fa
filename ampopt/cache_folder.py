"""Where files that can be made again are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """$AMPOPT_CACHE (empty: None), else ~/.cache/ampopt/tuning; None for a user without a home, too."""
    if (told := os.environ.get("AMPOPT_CACHE")) is not None:
        return Path(told) if told else None
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return home / "ampopt" / "tuning"
