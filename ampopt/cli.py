"""The command line: `ampopt optimize`, `ampopt compare`, `ampopt passes`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

import ampopt
from ampopt import report
from ampopt.errors import AmpoptError, InputError, VerificationError
from ampopt.input_source import example_call
from ampopt.model_source import FORMS, is_model_file, load_model
from ampopt.passes import ENGINES, LAUNCHES, PIPELINE

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """The entry of the `ampopt` script."""
    app()


@app.command("optimize", help="Make a model faster for inference, and prove it: what was done, and why.")
@app.command("compare", help="Tell what each pass does to a model: alone, in sequence, left out.")
def run(
    context: typer.Context,
    model: Annotated[str, Argument(metavar="MODEL", help=FORMS)],
    shapes: Annotated[
        list[str] | None,
        Option(
            "--input", metavar="SHAPE", help="1x3x480x640, or 1x16:int64 with a dtype; once for each input."
        ),
    ] = None,
    image: Annotated[Path | None, Option(help="Image as the input, resized to the size of --input.")] = None,
    npz: Annotated[
        Path | None, Option(help="NumPy file: arr_0, arr_1, … positional, others by name.")
    ] = None,
    normalize: Annotated[bool, Option(help="Normalize the image with ImageNet's mean and deviation.")] = True,
    weights: Annotated[Path | None, Option(help="State dict to load: .safetensors, .pt or .pth.")] = None,
    trust_model_file: Annotated[
        bool, Option("--trust-model-file", help="Load a saved model although its file can execute code.")
    ] = False,
    precision: Annotated[
        Literal["auto", "fp32", "amp"], Option(help="amp: mixed; auto: the fastest within the tolerance.")
    ] = "auto",
    tolerance: Annotated[
        float | None,
        Option(
            min=0.0,
            help="Largest relative error against float64, ‖y - ref‖ / ‖ref‖, for each output. Default: a "
            "small multiple of eager's own in the same precision, and at most 1e-2 for auto to choose it.",
        ),
    ] = None,
    budget: Annotated[float, Option(help="Seconds for everything; what does not fit is not tried.")] = 60.0,
    policy: Annotated[
        Literal["amp", "O1", "O2", "half"],
        Option(help="How mixed precision is decided: amp (autocast's own lists), O1, O2 (as apex), half."),
    ] = "amp",
    device: Annotated[
        str | None, Option(help="cpu or cuda. Default: cuda, if there is one; a saved model's own.")
    ] = None,
    exclude: Annotated[list[str] | None, Option(metavar="PASS", help="To leave out; repeatable.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="File to write the report to.")] = None,
    markdown_file: Annotated[Path | None, Option("--markdown", help="File to write the report to.")] = None,
    verbose: Annotated[bool, Option("--verbose", help="Show the whole trace of an error.")] = False,
) -> None:
    """Both commands take the same options and end alike: the report on stdout, and in files on request."""
    with _readable_errors(verbose):
        for path in filter(None, (json_file, markdown_file)):
            _check_destination(path)
        args, kwargs = example_call(shapes or (), image, npz, normalize=normalize)
        loaded = load_model(model, trust_file=trust_model_file, weights=weights)
        if not args and not kwargs:
            args, kwargs = loaded.args, dict(loaded.kwargs)
        if device is None and torch.cuda.is_available() and not is_model_file(model):
            device = "cuda"
        comparing = context.info_name == "compare"
        function: Callable[..., Any] = ampopt.compare if comparing else ampopt.optimize
        result = function(
            loaded.model,
            args or None,
            example_kwargs=kwargs,
            precision=precision,
            tolerance=tolerance,
            budget_s=budget,
            policy=policy,
            device=device,
            exclude=tuple(exclude or ()),
        )
        found = result if comparing else result.report
        _console().print(str(found) if comparing else report.to_rich(found), soft_wrap=comparing)
        if json_file is not None:
            _write(json_file, json.dumps(_finite(found.to_dict()), indent=2, allow_nan=False) + "\n")
        if markdown_file is not None:
            _write(markdown_file, found.to_markdown() if comparing else report.to_markdown(found))
        if not comparing and not found.verified:
            raise VerificationError("no optimized program could be verified: the report says why")


@app.command("passes")
def list_passes(as_json: Annotated[bool, Option("--json", help="As JSON, on stdout.")] = False) -> None:
    """List every pass, in the order in which they are applied."""
    rows = [
        {
            "name": step.name,
            "family": step.family.value,
            "numerics": step.numerics.value,
            "portability": "portable" if step.portable else "native",
            "summary": step.summary,
        }
        for step in (*PIPELINE, *ENGINES, *LAUNCHES)
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(*rows[0], box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*row.values())
    _console().print(table)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ampopt {ampopt.__version__}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Makes PyTorch vision models fast: every optimization is applied, verified, timed, kept or reverted."""


def _console() -> Console:
    """Standard output; where it is no terminal, as wide as `str(report)`."""
    return Console(width=None if sys.stdout.isatty() else 170, markup=False, highlight=False)


@contextlib.contextmanager
def _readable_errors(verbose: bool) -> Iterator[None]:
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


def _check_destination(path: Path) -> None:
    """Raise InputError, before the long work, where a report could not be written."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file: name another one for the report")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(
            f"there is no folder {path.parent} that {path.name} can be written to: create it first"
        )


def _write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    path = path.resolve()  # a link stays, and its target is replaced
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _finite(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: null stands for them."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
