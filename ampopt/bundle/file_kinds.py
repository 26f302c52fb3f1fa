"""Detects the type of a model or weights file from its bytes; nothing in the file is executed."""

from __future__ import annotations

import dataclasses
import io
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ampopt.system.plain_files import open_named

MOST_PICKLE_BYTES = 1 << 20
"""Number of bytes of a pickle that are examined; a state dict has some hundred bytes for each tensor."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """The type of a file: a name for the code, and a description for messages."""

    name: str
    words: str


EXPORTED = Kind("exported", "a program of torch.export")
TORCHSCRIPT = Kind("torchscript", "a TorchScript archive")
STATE = Kind("state", "a state dict or a checkpoint: weights only, without the model's code")
SAFETENSORS = Kind("safetensors", "a safetensors file: weights only, without the model's code")
UNKNOWN = Kind("unknown", "none of the files that PyTorch writes")

_STARTS = {
    b"\x89HDF": "an HDF5 file, as Keras writes it",
    b"GGUF": "a GGUF file",
    b"<?xml": "an XML file, as OpenVINO writes it",
    b"version https://git-lfs": "a pointer of Git LFS and not the file itself: run  git lfs pull",
    b"<!doctype": "a web page: the download went wrong",
    b"<html": "a web page: the download went wrong",
    b"\x1f\x8b": "compressed by gzip: unpack it first",
}

_DATA = ("collections", "builtins", "__builtin__", "_codecs", "copyreg", "numpy", "torch")
"""Packages whose names stand in pickled data; any other is of the user's own classes."""

_CODE = ("torch.nn.modules", "torch.nn.parallel", "torch.nn.utils", "torch.fx", "torch.ao")
"""Parts of PyTorch whose names stand in pickled models."""

_LEGACY_PICKLES = 4
"""Before PyTorch 1.6 a file began with a number, a version, the system's facts and then what was saved."""


_AFTER_VERSION = (0x12, 0x1A, 0x32, 0x3A, 0x42)
"""Tags of the fields 2, 3, 6, 7 and 8, all of a length, in onnx.proto's ModelProto."""


def kind_of_file(path: Path, what: str) -> Kind:
    """The type of a file. Raises InputError, naming the argument `what`, if the file cannot be read."""
    with open_named(path, what) as file:
        start = file.read(64)
        file.seek(0)
        if not start:
            return Kind("empty", "empty")
        if start.startswith(b"PK"):
            return _zipped(file)
        if start.startswith(b"\x80"):
            return _pickled(file.read(MOST_PICKLE_BYTES))
    for prefix, words in _STARTS.items():
        if start.lower().startswith(prefix.lower()):
            return Kind("foreign", words)
    if start[4:8] == b"TFL3":
        return Kind("foreign", "a TensorFlow Lite model")
    if start[8:10] in (b'{"', b"{}"):
        return SAFETENSORS
    # A ModelProto begins with ir_version, a small number, and then the producer, a text or the graph.
    if len(start) > 2 and start[0] == 0x08 and 3 <= start[1] <= 32 and start[2] in _AFTER_VERSION:
        return Kind("onnx", "an ONNX model, and ampopt takes the PyTorch model that it was made from")
    return UNKNOWN


def _zipped(file: BinaryIO) -> Kind:
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name.partition("/")[2] or name for name in archive.namelist()]
            if "manifest.json" in names:
                return Kind("bundle", "a bundle of ampopt: ampopt.load and `ampopt verify` take it")
            if any(name.startswith("data/aotinductor/") for name in names):
                return Kind(
                    "foreign", "a library that AOTInductor compiled, whose model is not in it any more"
                )
            if "archive_format" in names or "serialized_exported_program.json" in names:
                return EXPORTED
            if "constants.pkl" in names and any(name.startswith("code/") for name in names):
                return TORCHSCRIPT
            if any(name.endswith(".npy") for name in names):
                return Kind("arrays", "an archive of NumPy arrays: --npz takes it")
            for name in archive.namelist():
                if name.endswith("/data.pkl"):
                    with archive.open(name) as data:
                        return _pickled(data.read(MOST_PICKLE_BYTES))
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, NotImplementedError, EOFError):
        return Kind("damaged", "damaged or cut off: save, download or copy it again")
    return UNKNOWN


def _pickled(data: bytes) -> Kind:
    for module, name in _classes(data):
        if module.partition(".")[0] not in _DATA or module.startswith(_CODE):
            return Kind("pickled", f"a whole pickled model, or a checkpoint with one ({module}.{name})")
    return STATE


def _classes(data: bytes) -> list[tuple[str, str]]:
    """The modules and names that pickles would import, as far as they can be read; none is run."""
    found: list[tuple[str, str]] = []
    file = io.BytesIO(data)
    try:
        for _ in range(_LEGACY_PICKLES):
            found += _imports(file)
    except Exception:  # what is no pickle, or goes on behind what was read
        return found
    return found


def _imports(file: BinaryIO) -> Iterator[tuple[str, str]]:
    """The same of the next pickle in a file."""
    texts: list[str] = []  # what was pushed, as far as STACK_GLOBAL needs it
    memo: dict[int, str] = {}
    for op, argument, _ in pickletools.genops(file):
        if op.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            yield module, name
        elif op.name == "STACK_GLOBAL":
            yield texts[-2], texts[-1]
        elif op.name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0) if op.name != "MEMOIZE" else len(memo)] = texts[-1] if texts else ""
        elif op.name in ("GET", "BINGET", "LONG_BINGET"):
            texts.append(memo.get(int(argument or 0), ""))
        elif isinstance(argument, str):
            texts.append(argument)
