"""Writes an ONNX model to a file, and large weights to a separate file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EXTERNAL_BYTES = 2**31 - 2**24
"""Weights larger than this go to a separate file: one protobuf message holds at most 2 GiB."""


def data_path(path: Path) -> Path:
    """The path of a model's external weights."""
    return path.with_name(path.name + ".data")


def write_model(model: Any, path: Path) -> None:
    """Write an `onnx_ir.Model`; large weights go to `<name>.data` in the same folder."""
    import onnx_ir

    weights = [value.const_value for value in model.graph.initializers.values()]
    size = sum(weight.nbytes for weight in weights if weight is not None)
    external = data_path(path).name if size > EXTERNAL_BYTES else None
    onnx_ir.save(model, path, external_data=external)


def append_metadata(path: Path, entries: Mapping[str, str]) -> None:
    """Add metadata to a written model without changing the bytes that were verified.

    Two concatenated protobuf messages are one merged message, in which lists are concatenated.
    """
    import onnx

    extra = onnx.ModelProto()
    onnx.helper.set_model_props(extra, dict(entries))
    with path.open("ab") as file:
        file.write(extra.SerializeToString())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
