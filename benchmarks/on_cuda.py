"""What benchmarks of the race's networks on a GPU have in common: options, and a row for each network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampopt.ir.capture import Captured, capture
from ampopt.ir.lanes import Lane, lanes_for
from ampopt.ir.model_copy import private_copy
from ampopt.system.environment import environment
from benchmarks import cold_start
from benchmarks.anybody import anybody
from benchmarks.command_line import RESULTS, parser_for
from benchmarks.race_networks import RACE
from benchmarks.results_files import Row, commit, results_folder, told


def row_of(
    name: str, device: torch.device, measure: Callable[[nn.Module, Captured, Lane], dict[str, Any]]
) -> Row:
    """A network in every lane, by what `measure` finds for it on the device, or why it failed."""
    model, inputs = anybody(name)
    original = private_copy(model).to(device).eval()
    captured = capture(original, tuple(tensor.to(device) for tensor in inputs), {}, device)
    lanes: dict[str, dict[str, Any]] = {}
    for lane in lanes_for("auto", device):
        try:
            lanes[lane.name] = measure(original, captured, lane)
        except Exception as failure:
            lanes[lane.name] = {"error": told(failure)}
    return {"network": name, "environment": environment(device), "commit": commit(), "lanes": lanes}


def run(
    about: str | None,
    measure: Callable[[str, torch.device], Row],
    write: Callable[[Path, Row], None],
    *,
    networks: Sequence[str] = RACE,
    default: Sequence[str] = RACE,
) -> None:
    """Measure every network asked for on the command line, and write each one's row at once.

    `networks` may be asked for; without any it is those of `default`.
    """
    parser = parser_for(about)
    parser.add_argument("--models", nargs="+", choices=networks, default=list(default), metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS)
    cold_start.add_option(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, and CUDA graphs are what is measured")
    device = torch.device("cuda", 0)
    folder = results_folder(options.out, device)
    for name in options.models:
        with torch.no_grad():
            row = measure(name, device)
        if name == options.models[0] and options.default_call:
            row = cold_start.beside(row, name, device)
        write(folder, row)
        torch.cuda.empty_cache()
