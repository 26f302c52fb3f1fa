"""Collects garbage later: exporters and compilers make millions of objects, few of which are garbage."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_blocks = 0
_was_enabled = False


@contextlib.contextmanager
def collected_later() -> Iterator[None]:
    """Collect no garbage automatically during the block, which saves about a fifth of its time.

    If blocks overlap in several threads, the last one to end lets it be collected again; if it was disabled
    before, it stays so. What is not in a cycle is freed at once, as always.
    """
    global _blocks, _was_enabled
    with _lock:
        if _blocks == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0 and _was_enabled:
                gc.enable()
