"""Tables of operators that torch.export reads, looked through once for each capture."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

TABLES = "torch._export.utils"
"""The module of PyTorch 2.10 to 2.14 that has `_materialize_cpp_cia_ops`."""


@contextlib.contextmanager
def operators_found_once() -> Iterator[None]:
    """Let decompositions in the block ask for PyTorch's composite operators once.

    Each decomposition asks the dispatcher for all 700 of them, and for each its object, once for each of the
    17 namespaces, and an export to ONNX does so 60 times: 0.11 s of 0.6 on a Xeon. The first time makes the
    objects; the others find them made. Operators that are registered within the block, by another thread,
    are seen by the next one. Enter it within `capturing`: the function is the whole process's.
    """
    tables = sys.modules.get(TABLES)
    find = getattr(tables, "_materialize_cpp_cia_ops", None)
    if find is None:
        yield
        return
    found = False

    def find_once() -> None:
        nonlocal found
        if not found:
            find()
            found = True

    tables.__dict__["_materialize_cpp_cia_ops"] = find_once
    try:
        yield
    finally:
        tables.__dict__["_materialize_cpp_cia_ops"] = find
