"""Writing an ONNX file so that its path holds the old model, the new one or nothing, never a mixture."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

EXTERNAL_BYTES = 2**31 - 2**24
"""Weights larger than this go to a file of their own: one protobuf message holds at most 2 GiB."""


@contextlib.contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """A new folder on the file system of `path`, removed after the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def data_path(path: Path) -> Path:
    """Where the external weights of a model are."""
    return path.with_name(path.name + ".data")


def write_model(model: Any, path: Path) -> None:
    """Write an `onnx_ir.Model`, with its weights in `<name>.data` beside it where they are large."""
    import onnx_ir

    weights = [value.const_value for value in model.graph.initializers.values()]
    size = sum(weight.nbytes for weight in weights if weight is not None)
    external = data_path(path).name if size > EXTERNAL_BYTES else None
    onnx_ir.save(model, path, external_data=external)


def append_metadata(path: Path, entries: Mapping[str, str]) -> None:
    """Add metadata to a written model without touching the bytes that were verified.

    A protobuf message that is two messages joined is their merge, and lists add up.
    """
    import onnx

    extra = onnx.ModelProto()
    onnx.helper.set_model_props(extra, dict(entries))
    with path.open("ab") as file:
        file.write(extra.SerializeToString())


def publish(written: Path, path: Path) -> bool:
    """Move a model and its external weights, if any, to their final place; whether there were any.

    One file is replaced in one step. Two are not: so the old model goes first, its weights are replaced
    next, and the new model comes last. Killed between, there is no model, rather than one with the other's
    weights.
    """
    external = data_path(written).exists()
    for file in (data_path(written), written) if external else (written,):
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
    if external:
        path.unlink(missing_ok=True)
        os.replace(data_path(written), data_path(path))
    os.replace(written, path)
    return external


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
