"""The functions into which torch.onnx's exporter translates operators, read once in a process."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator
from typing import Any

EXPORTERS = "torch.onnx._internal.exporter._registration"
"""The module of torch 2.10 to 2.14 that has the class `ONNXRegistry`."""

_read: dict[object, Any] = {}
"""The registries that were read, by what they were asked for: an opset."""


@contextlib.contextmanager
def registry_kept() -> Iterator[None]:
    """Let the exporter use again, in the block, the registry that it has read in an earlier one.

    It reads the source code of 497 functions of onnxscript at each export, for 0.6 s on an AMD EPYC; what
    it reads is the same each time. After a failed export the next one reads anew: an operator that was
    missing may have been registered by then. An exporter of another structure reads as it does. Enter it
    within `capturing`: the class is the whole process's.
    """
    registry: Any = None
    with contextlib.suppress(ImportError):
        registry = getattr(importlib.import_module(EXPORTERS), "ONNXRegistry", None)
    method = getattr(registry, "__dict__", {}).get("from_torchlib")
    if not isinstance(method, classmethod) or not hasattr(registry(), "functions"):
        yield
        return

    def from_torchlib(cls: type, *asked: Any, **named: Any) -> Any:
        key = cls, asked, *named.items()
        if key not in _read:
            _read[key] = method.__func__(cls, *asked, **named)
        mine = copy.copy(_read[key])  # another thread's export may add the user's own functions
        mine.functions = {operator: [*found] for operator, found in mine.functions.items()}
        return mine

    registry.from_torchlib = classmethod(from_torchlib)
    try:
        yield
    except Exception:
        _read.clear()
        raise
    finally:
        registry.from_torchlib = method
