"""Small bundles for the tests of their container: a manifest of schema 1 and a few files."""

from __future__ import annotations

import io
import random
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ampopt.bundle import archive as bundle_zip
from ampopt.bundle.files import BundleFiles, open_bundle, write_bundle
from ampopt.errors import BundleError

FORMS = pytest.mark.parametrize("as_folder", [False, True], ids=["zip", "folder"])
FILES: dict[str, bytes] = {
    "model.onnx": random.Random(1).randbytes(3000),
    "program.json": b'{"nodes": []}\n',
    "weights.safetensors": random.Random(2).randbytes(5000),
    "report.json": b"",
}
SIZE = 1 << 20


def fields(**changes: Any) -> dict[str, Any]:
    """A manifest as `write_bundle` takes it, without `files`."""
    image = {"name": "x", "shape": [1, 3, 224, 224], "dtype": "float32", "layout": "contiguous"}
    return {
        "schema": 1,
        "ampopt": "0.1.0",
        "created": "2026-11-21T09:00:00Z",
        "model": {"name": "ResNet", "sha256": "0" * 64},
        "lane": {"name": "amp", "dtype": "float16"},
        "inputs": [image],
        "outputs": [{"name": "output", "shape": [1, 1000], "dtype": "float32", "layout": "contiguous"}],
        "tolerance": 0.01,
        "latency": {"p50_ms": 1.2, "p99_ms": 1.5, "device": "a CPU"},
        "fingerprint": {"ampopt": "0.1.0", "device": "a CPU"},
        "onnx": {
            "precision": "fp16",
            "opset": 18,
            "session": {"onnxruntime": "1.31.1", "prefer_nhwc": True},
            "latency": {"p50_ms": 2.0, "p99_ms": 3.0},
        },
        "call": {"args": [0], "kwargs": {}},
    } | changes


def save(path: Path, files: Mapping[str, bytes | Path] = FILES, **options: Any) -> Path:
    """Save a bundle of `files` at `path`."""
    write_bundle(path, fields(), files, **options)
    return path


def archive(contents: Mapping[str, bytes] | Iterable[tuple[str, bytes]]) -> bytes:
    """The bytes of a zip file of `contents`, written as a bundle is but without looking at them."""
    pairs = contents.items() if isinstance(contents, Mapping) else contents
    buffer = io.BytesIO()
    bundle_zip.write(buffer, ((name, len(data), zlib.crc32(data), [data]) for name, data in pairs))
    return buffer.getvalue()


def unpacked(path: Path) -> dict[str, bytes]:
    """All files of a bundle with the manifest, in their order, unchecked."""
    with path.open("rb") as file:
        found = {}
        for entry in bundle_zip.read_entries(file, path.stat().st_size):
            file.seek(entry.start)
            found[entry.name] = file.read(entry.size)
    return found


def contents(bundle: BundleFiles) -> dict[str, bytes]:
    """What an open bundle gives for each of its names."""
    return {name: bundle.read(name) for name in bundle.names}


def refuses(path: Path, reason: str) -> None:
    """Opening is refused for this reason, and the message names the bundle."""
    with pytest.raises(BundleError, match=f"(?s){path.name}.*{reason}"):
        open_bundle(path)


def version(number: int) -> dict[str, bytes | Path]:
    """Files whose every byte is of one version."""
    return {name: bytes([number]) * size for name, size in (("a.bin", SIZE), ("b.bin", 10), ("c.bin", SIZE))}
