"""The command line: `ampopt optimize`, `compare`, `diagnose`, `export`, `verify`, `passes` and `cache`.

PyTorch takes seconds to import: a command first checks everything that can be checked without it.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

import ampopt
from ampopt.cli import deploy as cli_deploy
from ampopt.cli import diagnose as cli_diagnose
from ampopt.cli import options as cli
from ampopt.cli.options import (
    check_lane_io,
    check_request,
    console,
    finite,
    model_and_call,
    readable_errors,
    write,
)
from ampopt.errors import VerificationError
from ampopt.system import cache_folder

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.command("diagnose")(cli_diagnose.diagnose)
app.command("export")(cli_deploy.export)
app.command("verify")(cli_deploy.verify)


def main() -> None:
    """The entry point of the `ampopt` script."""
    app()


@app.command("optimize", help="Make a model faster for inference, and prove it: what was done, and why.")
def run(
    context: typer.Context,
    model: cli.Model,
    shapes: cli.Shapes = None,
    image: cli.Image = None,
    npz: cli.Npz = None,
    normalize: cli.Normalize = True,
    weights: cli.Weights = None,
    trust_model_file: cli.TrustModelFile = False,
    precision: cli.Precision = "auto",
    tolerance: cli.Tolerance = None,
    budget: cli.Budget = None,
    policy: cli.Policy = "amp",
    nan: cli.Nan = "keep",
    device: cli.Device = None,
    exclude: cli.Exclude = None,
    passes: cli.Passes = None,
    cache: cli.Cache = True,
    io: cli.Io = "original",
    json_file: cli.JsonFile = None,
    markdown_file: Annotated[Path | None, Option("--markdown", help="File to write the report to.")] = None,
    verbose: cli.Verbose = False,
) -> None:
    """Run a command: both have the same options, print the report on stdout, and write files on request."""
    with readable_errors(verbose):
        source = (model, shapes, image, npz, normalize, weights, trust_model_file, device)
        written = {"--json": json_file, "--markdown": markdown_file}
        check_request(*source, budget, exclude, passes, written)
        check_lane_io(io, precision)
        loaded, args, kwargs, where = model_and_call(*source)
        from ampopt.measure import report, terminal

        comparing = context.info_name == "compare"
        function: Callable[..., Any] = ampopt.compare if comparing else ampopt.optimize
        result = function(
            loaded,
            args,
            example_kwargs=kwargs,
            precision=precision,
            tolerance=tolerance,
            budget_s=budget,
            policy=policy,
            nan=nan,
            device=where,
            exclude=tuple(exclude or ()),
            passes=passes,
            **({} if comparing else {"cache": cache, "io": io}),
        )
        found = result if comparing else result.report
        screen = console()
        if comparing and not screen.is_terminal:
            screen.print(str(found), soft_wrap=True)
        else:
            screen.print(found.to_rich() if comparing else terminal.to_rich(found, everything=verbose))
        if json_file is not None:
            write(json_file, json.dumps(finite(found.to_dict()), indent=2, allow_nan=False) + "\n")
        if markdown_file is not None:
            write(markdown_file, found.to_markdown() if comparing else report.to_markdown(found))
        if not comparing and not found.verified:
            raise VerificationError("no optimized program could be verified: the report says why")


def _without(command: Callable[..., None], *options: str) -> Callable[..., None]:
    """The same command, which does not take these options."""

    @functools.wraps(command)
    def taking_less(*args: Any, **kwargs: Any) -> None:
        command(*args, **kwargs)

    found = inspect.signature(command, eval_str=True)
    kept = [parameter for parameter in found.parameters.values() if parameter.name not in options]
    taking_less.__signature__ = found.replace(parameters=kept)  # type: ignore[attr-defined]
    return taking_less


# `compare` times everything anew, and what it compares is not called.
app.command("compare", help="Tell what each pass does to a model: alone, in sequence, left out.")(
    _without(run, "cache", "io")
)


@app.command("passes")
def list_passes(
    name: Annotated[str | None, Argument(help="Tell this one's proof and its options.")] = None,
    as_json: Annotated[bool, Option("--json", help="As JSON, on stdout.")] = False,
    verbose: cli.Verbose = False,
) -> None:
    """List all passes in pipeline order, or show one pass's proof and options."""
    from ampopt.cli import passes

    with readable_errors(verbose):
        rows = passes.rows() if name is None else [passes.details(name)]
        if as_json:
            typer.echo(json.dumps(rows if name is None else rows[0], indent=2))
        else:
            console().print(
                passes.table(rows) if name is None else passes.page(name), soft_wrap=name is not None
            )


@app.command("cache")
def show_cache(clear: Annotated[bool, Option("--clear", help="Remove everything.")] = False) -> None:
    """Show the folder of tuning results, exports and compiled code, and its number of files; or clear it."""
    if (folder := cache_folder.cache_folder()) is None:
        typer.echo("there is no cache: AMPOPT_CACHE is empty")
    elif clear:
        typer.echo(f"tuning results removed from {folder}: {cache_folder.clear(folder)}")
    else:
        sizes = [file.lstat().st_size for file in cache_folder.kept_files(folder)]
        typer.echo(f"tuning results in {folder}: {len(sizes)}, {sum(sizes) / 1024:.0f} KiB")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ampopt {ampopt.__version__}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    version: Annotated[
        bool, Option("--version", "-V", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Makes PyTorch vision models fast: every optimization is applied, verified, timed, kept or reverted."""
