"""The command line: `ampopt optimize`, `compare`, `diagnose`, `export`, `verify`, `passes` and `cache`.

PyTorch takes seconds to import: a command first checks everything that can be checked without it.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

import ampopt
from ampopt.bundle.destinations import check_distinct
from ampopt.cli import deploy as cli_deploy
from ampopt.cli import diagnose as cli_diagnose
from ampopt.cli import options as cli
from ampopt.cli.options import (
    check_lane_io,
    check_request,
    console,
    fixed,
    model_and_call,
    ranges,
    readable_errors,
    write,
    write_report,
)
from ampopt.document import text
from ampopt.document.markdown import to_markdown
from ampopt.document.render import to_json
from ampopt.errors import InputError, VerificationError
from ampopt.ir.precisions import names_of
from ampopt.measure import changes
from ampopt.measure.architecture import architecture_of
from ampopt.measure.baseline import read_baseline
from ampopt.system import cache_folder
from ampopt.system.standard_streams import lasting_streams
from ampopt.system.wording import in_options

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.command("diagnose")(cli_diagnose.diagnose)
app.command("export")(cli_deploy.export)
app.command("verify")(cli_deploy.verify)


def main() -> None:
    """The entry point of the `ampopt` script."""
    with lasting_streams():
        app()


REGRESSION = 3
"""The exit code of `compare --baseline` where a row is slower: 1 is an error, 2 one in the options."""


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
    baseline: Annotated[
        Path | None,
        Option(
            metavar="JSON",
            help="An earlier comparison's --json: tell what changed; fail where it is slower.",
        ),
    ] = None,
    threshold: Annotated[
        float,
        Option(help="With --baseline: exit code 3 where a row's whole interval is slower by this factor."),
    ] = 1.05,
    report_file: cli.ReportFile = None,
    dynamic: cli.Dynamic = None,
    json_file: cli.JsonFile = None,
    markdown_file: Annotated[Path | None, Option("--markdown", help="File to write the report to.")] = None,
    verbose: cli.Verbose = False,
) -> None:
    """Run a command: both have the same options, print the report on stdout, and write files on request."""
    with readable_errors(verbose):
        source = (model, shapes, image, npz, normalize, weights, trust_model_file, device)
        written = {"--report": report_file, "--json": json_file, "--markdown": markdown_file}
        check_request(*source, budget, exclude, passes, written)
        check_distinct(written, {"--baseline": baseline})
        check_lane_io(io, precision)
        then = _baseline(baseline, threshold, precision)
        sizes = ranges(dynamic)
        report_file, json_file, markdown_file = fixed(report_file, json_file, markdown_file)
        loaded, args, kwargs, where = model_and_call(*source)
        if then is not None:
            from ampopt.ir.arguments import as_module

            module, _ = as_module(loaded)
            changes.check_model(then, type(module).__name__, architecture_of(module))
            if args or kwargs:
                from ampopt.ir.signature import describe, flatten_call

                changes.check_inputs(then, [describe(t) for t in flatten_call(args or (), kwargs)[0]])
        from ampopt.measure import terminal

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
            **({} if comparing else {"cache": cache, "io": io, "dynamic": sizes}),
        )
        found = result if comparing else result.report
        changed, differing = _changed(then, found, threshold)
        document = found.document() if changed is None else found.document(changed)
        try:
            write_report(document, report_file)
            if json_file is not None:
                write(json_file, to_json(document))
            if markdown_file is not None:
                write(markdown_file, to_markdown(document))
        finally:  # where a file cannot be written, what was found is at least seen
            screen = console()
            if not comparing:
                screen.print(terminal.to_rich(found, everything=verbose))
            elif screen.is_terminal:
                screen.print(text.to_rich(document))
            else:
                screen.print(to_markdown(document), soft_wrap=True)
        if not comparing and found.lanes and not found.verified:
            raise VerificationError("no optimized program could be verified: the report says why")
        if differing is not None:
            raise differing
        if changed is not None and not changed.compared:
            raise InputError("nothing was measured in both runs: give both a longer --budget")
    if changed is not None and not changed.passed:
        raise typer.Exit(REGRESSION)


def _baseline(path: Path | None, threshold: float, precision: str) -> dict[str, Any] | None:
    """The earlier comparison, if there is one. Raises InputError if it is none, or of lanes not asked for."""
    if not 1 <= threshold < math.inf:
        raise InputError(f"--threshold {threshold:g}: give a factor of 1 or more, such as 1.05")
    if path is None:
        return None
    then = read_baseline(path)
    changes.check_lanes(then, set(names_of(precision)))
    return then


def _changed(
    then: Mapping[str, Any] | None, found: Any, threshold: float
) -> tuple[changes.Changes | None, InputError | None]:
    """What changed since the earlier comparison, if there is one, or the error that says why none can tell.

    The error is raised once what was found is written and printed: it took minutes.
    """
    try:
        return None if then is None else changes.changes(then, found.to_dict(), threshold), None
    except InputError as error:
        return None, error


def _without(command: Callable[..., None], *options: str) -> Callable[..., None]:
    """The same command, which does not take these options."""

    @functools.wraps(command)
    def taking_less(*args: Any, **kwargs: Any) -> None:
        command(*args, **kwargs)

    found = inspect.signature(command, eval_str=True)
    kept = [parameter for parameter in found.parameters.values() if parameter.name not in options]
    taking_less.__signature__ = found.replace(parameters=kept)  # type: ignore[attr-defined]
    return taking_less


app.command("optimize", help="Make a model faster for inference, and prove it: what was done, and why.")(
    _without(run, "baseline", "threshold")
)

# `compare` times everything anew, and what it compares is not called; only its rows have an earlier run's.
app.command("compare", help="Tell what each pass does to a model: alone, in sequence, left out.")(
    _without(run, "cache", "io", "dynamic")
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
def show_cache(
    clear: Annotated[bool, Option("--clear", help="Remove what the cache has made.")] = False,
) -> None:
    """Show the folder of tuning results, exports and compiled code, and its number of files; or clear it."""
    with readable_errors(verbose=False):
        if (folder := cache_folder.cache_folder()) is None:
            typer.echo("there is no cache: AMPOPT_CACHE is empty")
        elif clear:
            typer.echo(f"tuning results removed from {folder}: {cache_folder.clear(folder)}")
        else:
            count, size = cache_folder.size(folder)
            typer.echo(f"tuning results in {folder}: {count}, {size / 1024:.0f} KiB")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ampopt {ampopt.__version__}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool, Option("--version", "-V", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Makes PyTorch vision models fast: every optimization is applied, verified, timed, kept or reverted."""
    context.with_resource(in_options())
    cache_folder.cache_folder()  # of the current folder as it is before a model's code runs
