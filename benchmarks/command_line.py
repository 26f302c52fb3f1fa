"""What the command lines of the benchmarks have in common: the device, and the folder for results."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def parser_for(about: str | None) -> argparse.ArgumentParser:
    """A parser for the module with this docstring, whose first line it tells."""
    return argparse.ArgumentParser(description=about.splitlines()[0] if about else None)


def add_place(parser: argparse.ArgumentParser) -> None:
    """The options for where to measure and where to write."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=RESULTS)


def device_of(options: argparse.Namespace) -> torch.device:
    """The device that `--device` names; of several GPUs the first."""
    return torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
