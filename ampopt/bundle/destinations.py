"""Checks output paths and the packages needed to write them, before the long work begins."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ampopt.bundle.files import check_target
from ampopt.bundle.signing import sign
from ampopt.errors import InputError, require
from ampopt.system.places import place_of, told
from ampopt.system.plain_files import path_of

SPARE = "-" * 48
"""What a name has to leave room for: a file is written under a longer one first."""

ONNX_PACKAGES = ("onnx", "onnx_ir", "onnxscript", "onnxruntime")

TEXT = "a text"

FOREIGN = {
    **dict.fromkeys((".engine", ".plan", ".trt"), "an engine of TensorRT, which builds it from ONNX itself"),
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".safetensors"), "PyTorch weights"),
    **dict.fromkeys((".ts", ".pt2"), "a program of PyTorch; a bundle with cpp has one"),
    **dict.fromkeys((".xml", ".bin"), "an OpenVINO model, which OpenVINO makes from ONNX itself"),
    **dict.fromkeys((".tflite", ".pb", ".h5", ".keras"), "a TensorFlow model"),
    **dict.fromkeys((".mlmodel", ".mlpackage"), "a Core ML model"),
    **dict.fromkeys((".ort", ".mnn", ".param", ".gguf"), "another runtime's model"),
    **dict.fromkeys((".json", ".toml", ".yaml", ".yml", ".csv", ".md", ".txt", ".html", ".log"), TEXT),
    **dict.fromkeys((".py", ".pyi", ".pyc", ".pyd", ".so", ".cpp", ".pem"), "code or a key"),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".npz", ".npy"), "an image or arrays"),
    **dict.fromkeys((".gz", ".tar", ".tgz", ".xz", ".7z"), "another archive"),
}
"""File suffixes of formats other than ONNX and bundles, with the name of the format."""

NO_TEXT = {
    **{suffix: kind for suffix, kind in FOREIGN.items() if kind != TEXT},
    ".onnx": "an ONNX model",
    ".ampopt": "a bundle",
    ".zip": "an archive or a bundle",
    **dict.fromkeys((".gz", ".xz"), "a compressed file, which this one would not be"),
}
"""File suffixes of what is no text, with the name of the format."""


def is_onnx(path: str | os.PathLike[str]) -> bool:
    """Whether a file name asks for ONNX.

    Raises InputError for a suffix of a format that ampopt does not write.
    """
    suffix = path_of(path).suffix.lower()
    if suffix in FOREIGN:
        raise InputError(
            f"{os.fspath(path)}: {suffix} stands for {FOREIGN[suffix]}: "
            "choose a name that ends in .onnx for ONNX, or in .ampopt for a bundle"
        )
    return suffix == ".onnx"


def check_onnx(path: str | os.PathLike[str]) -> None:
    """Raise InputError or MissingExtraError if no ONNX file can be written to `path`."""
    place = path_of(path)
    if not is_onnx(place) and place.suffix.lower() == ".ampopt":
        raise InputError(
            f"{place}: .ampopt stands for a bundle, which `save` writes: name it {place.stem}.onnx"
        )
    if os.path.isdir(place):  # a name that is too long is none
        raise InputError(f"{place} is a folder: name the file, such as {place / 'model.onnx'}")
    check_file(place)
    is_onnx(os.path.realpath(place))  # a link may lead to code, or to another model
    for package in ONNX_PACKAGES:
        require(package, "onnx")


def check_bundle(
    path: str | os.PathLike[str], *, onnx: bool, sign_key: str | os.PathLike[str] | None
) -> None:
    """Raise the errors of saving a bundle as `path` (with or without ONNX) that can be detected beforehand.

    InputError for a suffix of another format, or an invalid key; MissingExtraError; BundleError if `path`
    holds another file or cannot be written.
    """
    if is_onnx(path):
        raise InputError(
            f"{os.fspath(path)}: .onnx stands for ONNX alone, which `export_onnx` writes: "
            f"name the bundle {Path(path).stem}.ampopt"
        )
    for package in ONNX_PACKAGES if onnx else ():
        require(package, "onnx")
    if sign_key is not None:
        sign(path_of(sign_key), b"")  # a key that cannot be used says so
    check_target(path)


def check_file(path: Path) -> None:
    """Raise InputError if no file can be written for a name: see `place_of`; nor where no regular file is."""
    if os.path.isdir(path):
        raise InputError(f"{path} is a folder, not a regular file: name a file in it")
    if "\0" in str(path):
        raise InputError(f"the path {str(path)!r} has a NUL in it: give another one")
    try:
        os.lstat(f"{path}{SPARE}")
    except OSError as e:
        if e.errno == errno.ENAMETOOLONG:
            raise InputError(f"{path} is too long a name for this system: give a shorter one") from e
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{path} is not a regular file: name another one")
    try:
        folder = place_of(path).parent
    except OSError as e:
        raise InputError(f"{str(path)!r} cannot be written: {told(e)}") from e
    try:
        with tempfile.TemporaryFile(dir=folder):  # what permissions say is not all: a disk may be read-only
            pass
    except OSError as e:
        raise InputError(f"{path} cannot be written: nothing can be made in its folder ({e.strerror})") from e


def check_text(path: Path) -> None:
    """Raise InputError if no text can be written for a name, see `check_file`, or if it stands for another
    format, as does what a link leads to: the code that was diagnosed, a model, an image may be there.
    """
    check_file(path)
    for place in (path, Path(os.path.realpath(path))):
        if (kind := NO_TEXT.get(place.suffix.lower())) is not None:
            leads = "" if place == path else f" leads to {place}, and"
            raise InputError(f"{path}{leads or ':'} {place.suffix} stands for {kind}: name another file")


def check_distinct(written: Mapping[str, Path | None], read: Mapping[str, Path | None]) -> None:
    """Raise InputError if two outputs have the same path, or an output has an input's; by option.

    An output in a folder that is an input, such as a bundle, has its path, too.
    """
    places: dict[Path, str] = {}
    for option, path in {**read, **written}.items():
        if path is None:
            continue
        place = Path(os.path.realpath(path))
        if option in written:
            if place in places:
                raise InputError(f"{places[place]} and {option} are the same file, {path}: name another one")
            if inside := [each for each in place.parents if places.get(each) in read]:
                raise InputError(f"{option} {path} is a file in {places[inside[0]]}: name another one")
        places[place] = option
