"""The command `ampopt diagnose`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

import ampopt
from ampopt.cli import options as cli
from ampopt.cli.model_source import anchored, check_function, load_function
from ampopt.cli.options import (
    check_request,
    console,
    fixed,
    model_and_call,
    readable_errors,
    write,
    write_report,
)
from ampopt.document.render import to_json
from ampopt.errors import InputError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ampopt.deploy.runtime import OptimizedModule


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
    optimized: Annotated[
        bool, Option("--optimized", help="Optimize it first, and show its kernels by layer.")
    ] = False,
    train: Annotated[bool, Option("--train", help="Diagnose a training step.")] = False,
    loss: Annotated[
        str | None, Option(metavar="FILE.py:NAME", help="With --train, a function of the model's result.")
    ] = None,
    optimizer: Annotated[
        str | None, Option(metavar="NAME", help="With --train, one of torch.optim, such as AdamW.")
    ] = None,
    step: Annotated[
        str | None,
        Option(metavar="FILE.py:NAME", help="With --train, your step(model, optimizer, *inputs)."),
    ] = None,
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
        training = {"--loss": loss, "--optimizer": optimizer, "--step": step}
        check_training(
            train, training, {"--batches": batches, "--trace": trace, "--optimized": optimized or None}
        )
        report_file, json_file, trace = fixed(report_file, json_file, trace)
        loss, step = (named and anchored(named) for named in (loss, step))
        loaded, args, kwargs, where = model_and_call(*source, train=train)
        from ampopt.diagnosis.text import WIDTH, to_rich

        fast = _optimized(loaded, args, kwargs, where, budget) if optimized else None
        found = ampopt.diagnose(
            loaded,
            args,
            example_kwargs=kwargs,
            precision=precision,
            batches=sizes,
            budget_s=budget,
            device=where,
            trace=trace,
            optimized=fast,
            train=train,
            loss=None if loss is None else load_function(loss, "--loss"),
            optimizer=None if optimizer is None else load_optimizer(optimizer),
            step=None if step is None else load_function(step, "--step"),
        )
        document = found.document()
        try:
            write_report(document, report_file)
            if json_file is not None:
                write(json_file, to_json(document))
        finally:  # where a file cannot be written, what was found is at least seen
            screen = console()
            if not screen.is_terminal:
                screen.width = WIDTH
            screen.print(to_rich(found, everything=verbose))


def _optimized(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any], device: Any, budget: float | None
) -> OptimizedModule | None:
    """The model as `optimize` makes it within the budget; None, and a line on stderr, without a column."""
    from ampopt.deploy.runtime import OptimizedModule

    fast = ampopt.optimize(model, args, example_kwargs=kwargs, device=device, budget_s=budget)
    if isinstance(fast, OptimizedModule):
        return fast
    typer.echo(f"there is no column of the optimized model: {fast.report.notes[0]}", err=True)
    return None


def check_training(train: bool, training: Mapping[str, str | None], calls: Mapping[str, object]) -> None:
    """Raise InputError for options of a training step without `--train`, and of calls with it."""
    for option, value in training.items():
        if value is not None and not train:
            raise InputError(f"{option} is of a training step: add --train")
        if value is not None and option != "--optimizer":
            check_function(value, option)
    for option, given in calls.items():
        if given is not None and train:
            raise InputError(f"{option} is of a call, not of a training step: leave it out with --train")


def load_optimizer(name: str) -> type[Optimizer]:
    """The class of `torch.optim` with a name, in any case. Raises InputError if there is none."""
    from torch import optim

    known = {n.lower(): c for n, c in vars(optim).items() if isinstance(c, type) and n != "Optimizer"}
    if name.lower() not in known:
        raise InputError(f"--optimizer {name}: choose one of {', '.join(c.__name__ for c in known.values())}")
    found: type[Optimizer] = known[name.lower()]
    return found


def parse_batches(text: str | None) -> tuple[int, ...]:
    """The batches of `1,2,4`. Raises InputError for anything but whole numbers from 1 on."""
    words = [] if text is None else text.split(",")
    if any(not word.strip().isdecimal() or int(word) < 1 for word in words):
        raise InputError(f"--batches {text}: give whole numbers from 1 on, such as 1,2,4,8")
    return tuple(map(int, words))
