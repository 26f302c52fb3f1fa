"""The command `ampopt diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

import ampopt
from ampopt.cli import options as cli
from ampopt.cli.model_source import is_model_file
from ampopt.cli.options import check_request, console, model_and_call, readable_errors, write, write_report
from ampopt.document.render import to_json
from ampopt.errors import InputError


def diagnose(
    model: cli.Model,
    shapes: cli.Shapes = None,
    image: cli.Image = None,
    npz: cli.Npz = None,
    normalize: cli.Normalize = True,
    weights: cli.Weights = None,
    trust_model_file: cli.TrustModelFile = False,
    precision: Annotated[str, Option(metavar="LANE", help="What to compare to FP32: amp or bf16.")] = "amp",
    batches: Annotated[
        str | None, Option(metavar="N,N,…", help="Batches to time in both lanes, such as 1,2,4,8.")
    ] = None,
    budget: cli.Budget = None,
    device: cli.Device = None,
    report_file: cli.ReportFile = None,
    json_file: cli.JsonFile = None,
    trace: Annotated[Path | None, Option(help="File to write a trace to, for Perfetto.")] = None,
    verbose: cli.Verbose = False,
) -> None:
    """Tell why a model is slow, and why AMP is slower: findings with remedies that were executed."""
    with readable_errors(verbose):
        source = (model, shapes, image, npz, normalize, weights, trust_model_file, device)
        written = {"--report": report_file, "--json": json_file, "--trace": trace}
        check_request(*source, budget, None, None, written)
        if precision not in ("amp", "bf16"):
            raise InputError(f"--precision {precision}: choose amp or bf16")
        sizes = parse_batches(batches)
        loaded, args, kwargs, where = model_and_call(*source)
        if not is_model_file(model):
            loaded.eval()  # as it was made, it is in training mode: that is no finding
        from ampopt.diagnosis.text import WIDTH, to_rich

        found = ampopt.diagnose(
            loaded,
            args,
            example_kwargs=kwargs,
            precision=precision,
            batches=sizes,
            budget_s=budget,
            device=where,
            trace=trace,
        )
        screen = console()
        if not screen.is_terminal:
            screen.width = WIDTH
        screen.print(to_rich(found, everything=verbose))
        document = found.document()
        write_report(document, report_file)
        if json_file is not None:
            write(json_file, to_json(document))


def parse_batches(text: str | None) -> tuple[int, ...]:
    """The batches of `1,2,4`. Raises InputError for anything but whole numbers from 1 on."""
    words = [] if text is None else text.split(",")
    if any(not word.strip().isdecimal() or int(word) < 1 for word in words):
        raise InputError(f"--batches {text}: give whole numbers from 1 on, such as 1,2,4,8")
    return tuple(map(int, words))
