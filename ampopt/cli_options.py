"""What the commands share: their options, readable errors, files written as a whole or not at all."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from ampopt.errors import AmpoptError, InputError
from ampopt.input_source import example_call
from ampopt.model_source import FORMS, is_model_file, load_model

Model = Annotated[str, Argument(metavar="MODEL", help=FORMS)]
Shapes = Annotated[
    list[str] | None,
    Option("--input", metavar="SHAPE", help="1x3x480x640, or 1x16:int64 with a dtype; once for each input."),
]
Image = Annotated[Path | None, Option(help="Image as the input, resized to the size of --input.")]
Npz = Annotated[Path | None, Option(help="NumPy file: arr_0, arr_1, … positional, others by name.")]
Normalize = Annotated[bool, Option(help="Normalize the image with ImageNet's mean and deviation.")]
Weights = Annotated[Path | None, Option(help="State dict to load: .safetensors, .pt or .pth.")]
TrustModelFile = Annotated[
    bool, Option("--trust-model-file", help="Load a saved model although its file can execute code.")
]
Precision = Annotated[
    Literal["auto", "fp32", "amp"], Option(help="amp: mixed; auto: the fastest within the tolerance.")
]
Tolerance = Annotated[
    float | None,
    Option(
        min=0.0,
        help="Largest relative error against float64, ‖y - ref‖ / ‖ref‖, for each output. Default: a "
        "small multiple of eager's own in the same precision, and at most 1e-2 for auto to choose it.",
    ),
]
Budget = Annotated[float, Option(help="Seconds for everything; what does not fit is not tried.")]
Policy = Annotated[
    Literal["amp", "O1", "O2", "half"],
    Option(help="How mixed precision is decided: amp (autocast's own lists), O1, O2 (as apex), half."),
]
Device = Annotated[
    str | None, Option(help="cpu or cuda. Default: cuda, if there is one; a saved model's own.")
]
Exclude = Annotated[list[str] | None, Option(metavar="PASS", help="To leave out; repeatable.")]
Cache = Annotated[
    bool, Option(help="Use what an earlier call found for this model, and keep what this one finds.")
]
JsonFile = Annotated[Path | None, Option("--json", help="File to write the report to.")]
Verbose = Annotated[bool, Option("--verbose", help="Show the whole trace of an error.")]


def model_and_call(
    model: str,
    shapes: list[str] | None,
    image: Path | None,
    npz: Path | None,
    normalize: bool,
    weights: Path | None,
    trust_model_file: bool,
    device: str | None,
) -> tuple[torch.nn.Module, tuple[Any, ...] | None, dict[str, Any], str | None]:
    """The model, its positional and keyword arguments, and the device, as the options name them."""
    args, kwargs = example_call(shapes or (), image, npz, normalize=normalize)
    loaded = load_model(model, trust_file=trust_model_file, weights=weights)
    if not args and not kwargs:
        args, kwargs = loaded.args, dict(loaded.kwargs)
    if device is None and torch.cuda.is_available() and not is_model_file(model):
        device = "cuda"
    return loaded.model, args or None, kwargs, device


def console() -> Console:
    """Standard output; where it is no terminal, as wide as `str(report)`."""
    return Console(width=None if sys.stdout.isatty() else 170, markup=False, highlight=False)


@contextlib.contextmanager
def readable_errors(verbose: bool) -> Iterator[None]:
    """Turn every error into one paragraph on stderr and exit code 1; `verbose`: let it through."""
    try:
        yield
    except (Exception, SystemExit) as e:  # the user's code may exit; without a result, that is an error
        if verbose:
            raise
        text = str(e) if isinstance(e, AmpoptError) else f"{type(e).__name__}: {e}"
        text = textwrap.shorten(Text.from_ansi(text).plain, 2000, placeholder=" …")
        more = "" if isinstance(e, AmpoptError) else " (run with --verbose for the trace)"
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), text, more), soft_wrap=True)
        raise typer.Exit(1) from e


def check_destination(path: Path) -> None:
    """Raise InputError, before the long work, where a report could not be written."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file: name another one for the report")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(
            f"there is no folder {path.parent} that {path.name} can be written to: create it first"
        )


def write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    path = path.resolve()  # a link stays, and its target is replaced
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def finite(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: null stands for them."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
