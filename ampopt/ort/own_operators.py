"""Operators of our own in ONNX Runtime's CPU graphs, `cpp/onnx_ops.cpp`: their library and activations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ampopt.ort.blocked import block_size
from ampopt.ort.options import SessionOptions
from ampopt.system.native import library

OWN_DOMAIN = "ampopt"

ACTIVATIONS = ("", "Relu", "LeakyRelu", "Clip")
"""Activations that the operators can fuse; they identify them by their index in this list."""


def own_library() -> Path:
    """The library of the compiled operators. Raises CompilerError."""
    return library("onnx_ops.cpp", f"BLOCK={block_size()}")


def threads_of(options: SessionOptions) -> int:
    """The number of threads among which an operator divides its work."""
    return options.threads or os.cpu_count() or 1


def import_domain(model: Any) -> None:
    """Let a model use our operators."""
    from onnx import helper

    if all(each.domain != OWN_DOMAIN for each in model.opset_import):
        model.opset_import.append(helper.make_opsetid(OWN_DOMAIN, 1))


def attributes(node: Any) -> dict[str, Any]:
    """A node's attributes by name."""
    from onnx import helper

    return {each.name: helper.get_attribute_value(each) for each in node.attribute}
