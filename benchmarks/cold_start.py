"""A default call in a cold process with empty caches, as a stranger makes it: every benchmark has its row.

`default_call` starts `benchmarks.cold_import`; `benchmarks.cold_lines` shows what rows keep of it.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.race_protocol import emptied
from benchmarks.results_files import Row, commit

MOST_S = 1200.0
"""After which a cold process is ended."""


def default_call(
    network: str,
    device: torch.device,
    *,
    seconds: float = 0.0,
    compiled: bool = False,
    thorough: bool = False,
    most_s: float = MOST_S,
) -> Row:
    """`ampopt.optimize(model, x)` in a cold process; `error` or `skipped` says why there are no figures.

    `seconds` of sampling follow, and at least a minimum; with `compiled`, `torch.compile` runs beside it,
    and with `thorough` its max-autotune, too.
    """
    row: Row = {"network": network, "commit": commit()}
    with tempfile.TemporaryDirectory(prefix="ampopt-cold-") as folder:
        file = Path(folder) / "row.json"
        command = [sys.executable, "-m", "benchmarks.cold_import", network, str(device), str(file)]
        command += ["--seconds", str(seconds), *(["--compile"] * compiled), *(["--thorough"] * thorough)]
        end: Row = {}
        try:
            env = {**emptied(Path(folder), os.environ), **compiled_modules()}
            done = subprocess.run(command, env=env, timeout=most_s, check=False)
            if done.returncode or not file.exists():
                end = {"error": f"its process ended with status {done.returncode}"}
        except subprocess.TimeoutExpired:
            end = {"error": f"its process took longer than {most_s:.0f} s"}
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return {**row, **known, **end}


IMPORTED = "ampopt.search.worker, torch.export, torch._inductor.compile_fx, torch._inductor.async_compile"
"""What a default call imports, and with it nearly everything else."""


@functools.cache
def compiled_modules() -> Mapping[str, str]:
    """The environment in which processes find Python's compiled modules, as an installation leaves them.

    An image may lack those of PyTorch, and not let anybody write them there. Then every process would compile
    the sources first, for 12 s on the host of an H200; here the first one does, in a folder of its own.
    """
    if Path(importlib.util.cache_from_source(torch.__file__)).exists():
        return {}
    folder = tempfile.TemporaryDirectory(prefix="ampopt-modules-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    found = {"PYTHONPYCACHEPREFIX": folder.name, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([sys.executable, "-c", f"import {IMPORTED}"], env={**os.environ, **found}, check=False)
    return found


def add_option(parser: argparse.ArgumentParser) -> None:
    """What every other benchmark has, so that it can do without its cold default call."""
    parser.add_argument(
        "--no-default-call",
        dest="default_call",
        action="store_false",
        help="no default call in a cold process beside the first network, which takes a minute or two",
    )


def beside(row: Row, network: str, device: torch.device) -> Row:
    """A benchmark's row with a cold default call of a network."""
    return {**row, "default_call": default_call(network, device)}
