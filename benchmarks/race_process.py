"""A contestant of the race that runs in PyTorch's process, see `benchmarks.race_protocol`.

python -m benchmarks.race_process CONTESTANT DEVICE IO FOLDER
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import first_line
from ampopt.ir.numerics import relative_error
from ampopt.ir.signature import flatten_outputs
from ampopt.measure.clocks import latency, synchronize
from ampopt.system.flags import cuda_math
from benchmarks.by_onnx import exported
from benchmarks.command_line import parser_for
from benchmarks.contestants import border_of, contestants
from benchmarks.host_time import beyond_replay
from benchmarks.race_networks import racer
from benchmarks.race_protocol import Facts, peak_bytes, resident_bytes, serve_pipe
from benchmarks.regimes import Block, Subject, block
from benchmarks.subjects import subject_of
from benchmarks.ways import Candidates, Made, UnusableDeviceError, make_all

SETTLED = 0.02
"""A warm-up ends when the median of its latest calls is this close to that of the calls before them."""

WINDOW, WARM_UP_S = 8, 3.0


def command(contestant: str, device: torch.device, io: str, folder: Path) -> list[str]:
    """What starts this file for a contestant; `folder` is where `write_parts` writes, maybe later."""
    return [sys.executable, "-m", "benchmarks.race_process", contestant, str(device), io, str(folder)]


class InTorch:
    """A contestant, from its ways to the fastest of them."""

    def __init__(self, name: str, device: torch.device, io: str, folder: Path) -> None:
        self._name, self._device, self._io, self._folder = name, device, io, folder
        self._candidates: Candidates | None = None
        self._made: Made | None = None
        self._subject: Subject | None = None
        self._before = self._resident = 0

    def make(self, most: str = "", won: str | None = None) -> Facts:
        """Make every way, or at most so many, or the one that won before.

        In the facts `unusable` says after how many the device was lost.
        """
        contestant = next(each for each in contestants(self._device) if each.name == self._name)
        assert contestant.make is not None
        model = torch.load(
            self._folder / "model.pt", map_location=self._device, weights_only=False
        )  # our own
        inputs = tuple(tensor.to(self._device) for tensor in torch.load(self._folder / "inputs.pt"))
        self._before, self._resident, start = peak_bytes(), resident_bytes(), time.perf_counter()
        border = border_of(contestant.lane, self._io, self._device)
        ways = list(contestant.make(model, inputs, border).items())
        if won is not None:
            ways = [(name, way) for name, way in ways if name == won]
        try:
            self._candidates = make_all(dict(ways[: int(most) if most else None]), self._look)
        except UnusableDeviceError as lost:
            return {"unusable": lost.place, "left_out": str(lost)}
        if not self._candidates.made:
            raise RuntimeError("; ".join(dict.fromkeys(self._candidates.failed.values())))
        return {"prepare_s": time.perf_counter() - start}

    def _look(self) -> None:
        """Raise where the device does not work any more, as after a capture that failed."""
        torch.ones(1, device=self._device).sum().item()
        synchronize(self._device)

    def choose(self) -> Facts:
        """Keep the fastest way; its error and what it took."""
        assert self._candidates is not None
        reference = torch.load(self._folder / "reference.pt")
        if len(self._candidates.made) > 1:
            self._candidates.drop_wrong(lambda found: error_of(_on_host(found), reference))
        name, made, tried = self._candidates.fastest(functools.partial(synchronize, self._device))
        self._candidates, self._made = None, made
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        outputs = _on_host(made.call(*made.inputs))
        facts = {
            "way": made.way,
            "won": name,
            "tried": tried,
            "relative_error": error_of(outputs, reference),
            "gives": sorted({str(output.dtype).removeprefix("torch.") for output in outputs}),
            "passes": _passes(made.call),
        }
        if self._device.type == "cuda":
            return facts
        kept = resident_bytes() - self._resident
        return {**facts, "bytes": peak_bytes() - self._before, "kept_bytes": kept}

    def settle(self) -> Facts:
        """Warm up; what a call of ampopt costs beyond the replay of its graph, if it has one."""
        assert self._made is not None
        made = self._made
        call = functools.partial(made.call, *made.inputs)
        warm_up(call, self._device)
        self._subject = subject_of(call, self._device)
        if self._device.type != "cuda" or not isinstance(made.call, OptimizedModule):
            return {}
        try:
            return {"beyond_replay_us": beyond_replay(made.call, made.inputs, self._device)}
        except Exception as failure:  # it is beside what is raced
            return {"beyond_replay_us": None, "beyond_replay_why": first_line(failure)}

    def block(self, regime: str) -> Block:
        """Time a block."""
        assert self._subject is not None
        return block(self._subject, regime)


def _on_host(outputs: object) -> list[Tensor]:
    return [output.cpu() for output in flatten_outputs(outputs)[0]]


def error_of(outputs: list[Tensor], reference: list[Tensor]) -> float | None:
    """The largest relative error of the outputs; None where they have NaN or infinities."""
    pairs = zip(outputs, reference, strict=True)
    error = max(relative_error(found, wanted) for found, wanted in pairs)
    return error if math.isfinite(error) else None


def write_parts(network: str, device: torch.device, folder: Path, *, as_onnx: bool = False) -> None:
    """Write what contestants read: the network, its inputs, and its flat outputs in float64.

    With `as_onnx` also what engines without PyTorch read; model.onnx is missing where the export fails.
    """
    model, inputs = racer(network)
    torch.save(model, folder / "model.pt")
    torch.save(inputs, folder / "inputs.pt")
    if as_onnx:
        np.savez(folder / "inputs.npz", *(tensor.numpy() for tensor in inputs))
        with contextlib.suppress(Exception):
            (folder / "model.onnx").write_bytes(exported(model, inputs))
    with torch.no_grad():
        double = model.double().to(device)
        expected = flatten_outputs(double(*(tensor.double().to(device) for tensor in inputs)))[0]
    torch.save([tensor.cpu() for tensor in expected], folder / "reference.pt")


def warm_up(call: Callable[[], object], device: torch.device) -> None:
    """Call until the latency has settled, see `SETTLED`, or `WARM_UP_S` have passed."""
    sample, end = latency(call, device), time.perf_counter() + WARM_UP_S
    taken: list[float] = []
    while time.perf_counter() < end:
        taken.append(sample())
        latest, earlier = sorted(taken[-WINDOW:]), sorted(taken[-2 * WINDOW : -WINDOW])
        if len(earlier) == WINDOW:
            middle = WINDOW // 2
            if abs(latest[middle] / earlier[middle] - 1) < SETTLED:
                return


def _passes(made: object) -> list[str] | None:
    """What ampopt kept, for its own rows; what it tried is printed."""
    if not isinstance(made, OptimizedModule):
        return None
    print(made.report, *made.program.recipe, sep="\n", file=sys.stderr)
    return [step.name for step in made.program.recipe]


def main() -> None:
    """See the module."""
    parser = parser_for(__doc__)
    parser.add_argument("contestant")
    parser.add_argument("device", type=torch.device)
    parser.add_argument("io")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig()
    logging.getLogger("ampopt").setLevel(logging.DEBUG)  # why a pass failed, in full
    # For everybody: TF32 is off, and cuDNN searches.
    strict = cuda_math(tf32=False, search=True) if arguments.device.type == "cuda" else None
    with torch.no_grad(), strict or contextlib.nullcontext():
        torch.empty(1, device=arguments.device)  # a GPU's libraries load while the reference is computed
        serve_pipe(lambda: InTorch(*vars(arguments).values()))


if __name__ == "__main__":
    main()
