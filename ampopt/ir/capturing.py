"""A lock: one thread at a time captures, exports, traces or compiles.

`torch.export`, the steps after it, and inductor replace methods of `nn.Module`, flags and tables of the whole
process while they run, so two at the same time break each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ampopt.ir.export_repairs import right_sizes
from ampopt.ir.operator_tables import operators_found_once
from ampopt.ir.transforms_ended import transforms_ended
from ampopt.system import turns
from ampopt.system.garbage import collected_later
from ampopt.system.process_state import imports_kept, process_kept
from ampopt.system.quiet import quiet


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Hold the lock, with output suppressed; enter before `Settings.scope` and before gradients are off.

    Garbage is collected after it. Calls of captured programs do not wait for it.
    """
    with (
        turns.capturing.taken(),
        process_kept(),
        imports_kept(),
        quiet(),
        collected_later(),
        right_sizes(),
        operators_found_once(),
        transforms_ended(),
    ):
        yield
