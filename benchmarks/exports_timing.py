"""Latencies of ONNX files beside a plain export of the same network, in a process without PyTorch.

    python -m benchmarks.exports_timing FOLDER --provider CUDAExecutionProvider --tolerances fp32=1e-5

Reads FOLDER/inputs.npz, plain.onnx and fp32.onnx, fp16.onnx; prints a JSON object, precision by precision.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from ampopt.measure.sampling import gain, interleave, latency, rested
from ampopt.ort.knobs import changed
from ampopt.ort.options import CPU, CUDA, SAFE_OPTIONS, SessionOptions
from ampopt.ort.session import Array, OnnxRunner, relative_error
from ampopt.ort.tuning import tune

TUNING_S = 4.0
"""For the sweep of the options of one file, loading included."""

TIMING_S = 1.0
"""For the calls in turn of one file and its peers."""

LONG_BATCH_S = 0.5
"""A batch of several samples whose call takes longer on a CPU is not timed."""

PAUSE_S = 0.1
"""Before a call on a CPU: with ONNX Runtime's own options threads spin for 50 ms after a run."""

_TF32 = {"provider_options": {"use_tf32": "1"}}


def timing(folder: Path, precision: str, provider: str, tolerance: float) -> dict[str, Any]:
    """What `timed` says of a file, or why there is nothing to say; options keep to the tolerance."""
    if precision == "fp16" and provider == CPU:
        return {"not_timed": "not timed: a CPU computes it in FP32"}
    with np.load(folder / "inputs.npz") as stored:
        arrays = tuple(stored.values())
    try:
        return timed(
            folder / f"{precision}.onnx", folder / "plain.onnx", arrays, precision, provider, tolerance
        )
    except Exception as failure:
        return {"not_timed": f"{type(failure).__name__}: {failure}"}


def timed(
    ours: Path,
    plain: Path,
    arrays: tuple[Array, ...],
    precision: str,
    provider: str,
    tolerance: float,
) -> dict[str, Any]:
    """Latencies of both files in this process, called in turn, and the ratios of those taken together.

    Ours has tuned options, the other ONNX Runtime's own. These allow TF32 on a GPU, which ours does not: for
    FP32 each file is timed there with the other's setting, too. `difference` is the relative error of our
    outputs against the plain file's.
    """
    runners = {"plain": OnnxRunner(plain, SessionOptions(provider, spin_after_run=True))}
    runners["plain"](*arrays)
    start = time.perf_counter()
    runners["plain"](*arrays)
    seconds = time.perf_counter() - start
    if provider == CPU and len(arrays[0]) > 1 and seconds > LONG_BATCH_S:
        return {"not_timed": f"not timed: a batch of {len(arrays[0])} takes {seconds:.1f} s"}
    half = precision == "fp16"
    tuning = tune(ours, arrays, seconds=TUNING_S, providers=[provider], tolerance=tolerance, tf32=half)
    pairs = {"plain / ours": ("plain", "ours")}
    runners["ours"] = OnnxRunner(ours, tuning.best)
    if provider == CUDA and not half:
        runners["plain without TF32"] = OnnxRunner(plain, SessionOptions.default(provider, tf32=False))
        runners["ours with TF32"] = OnnxRunner(ours, changed(tuning.best, _TF32))
        pairs["plain / ours, both with TF32"] = ("plain", "ours with TF32")
        pairs["plain / ours, both without TF32"] = ("plain without TF32", "ours")
    pause = PAUSE_S if provider == CPU else 0.0
    calls = {name: latency(functools.partial(runner, *arrays)) for name, runner in runners.items()}
    samplers = {name: rested(sampler, pause) for name, sampler in calls.items()}
    times = interleave(samplers, seconds=TIMING_S, least=12)
    outputs = (runners[name](*arrays) for name in ("ours", "plain"))
    return {
        **{name: measured.to_dict() for name, measured in times.items()},
        "gains": {key: dataclasses.asdict(gain(times[a], times[b])) for key, (a, b) in pairs.items()},
        "difference": max(map(relative_error, *outputs)),
        "tuning": tuning.to_dict(),
    }


def main() -> None:
    """Time the files of one network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--provider", choices=list(SAFE_OPTIONS), required=True)
    parser.add_argument("--tolerances", nargs="+", required=True, help="fp32=1e-5 fp16=1e-3")
    options = parser.parse_args()
    tolerances = dict(pair.split("=") for pair in options.tolerances)
    found = {
        name: timing(options.folder, name, options.provider, float(limit))
        for name, limit in tolerances.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
