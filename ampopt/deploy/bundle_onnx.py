"""The ONNX model of a bundle: the file, its session's options on this machine, and where it may run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ampopt.deploy.known_backend import Runner
from ampopt.deploy.onnx_export import OnnxReport, export_onnx
from ampopt.deploy.optimized import Optimized
from ampopt.deploy.self_test import SelfTest, storable
from ampopt.errors import ExportError, VerificationError
from ampopt.ir.transform import Recipe
from ampopt.measure.clocks import latency
from ampopt.measure.sampling import interleave
from ampopt.ort.knobs import thread_counts
from ampopt.ort.openvino_session import OpenVinoRunner, openvino_version
from ampopt.ort.options import CUDA, OPENVINO, PREFERRED
from ampopt.ort.session import Array, OnnxRunner, SessionError, onnxruntime, relative_error
from ampopt.ort.tuning import Tuning, tune
from ampopt.passes import Openvino

ONE_SIZE = "OpenVINO runs models of fixed sizes here, and sizes of this one vary"
"""Why a bundle for a range of sizes does not run in OpenVINO."""


@dataclasses.dataclass(frozen=True)
class WrittenOnnx:
    """What a manifest says of an ONNX model, and a function that gives what runs it here, by backend."""

    section: dict[str, Any]
    runners: Callable[[], dict[str, Runner]]


def write_onnx(
    optimized: Optimized, path: Path, precision: str, test: SelfTest, seconds: float, *, varies: bool
) -> WrittenOnnx:
    """Write the model at a path, verified; `seconds` to find its session's options. `varies`: sizes do.

    Raises ExportError, VerificationError, or the OSError for which the file cannot be written.
    """
    report, tuned = _exported(optimized, path, precision, test, seconds)
    why_not = report.why_not_openvino or (ONE_SIZE if varies else None)
    in_openvino = None if why_not else _in_openvino(path, optimized.recipe, precision, test)
    section = {
        "precision": precision,
        "opset": report.opset,
        "session": tuned.session(),
        "latency": _quantiles(tuned),
        "why_not_openvino": why_not,
        **({} if in_openvino is None else {"openvino": in_openvino[0]}),
    }

    def runners() -> dict[str, Runner]:
        best = tuned.best
        threads = 1 if best.provider == CUDA else best.threads or thread_counts()[-1]
        found = {"onnxruntime": Runner(OnnxRunner(_model(path, report), best), threads)}
        if in_openvino is not None:
            found["openvino"] = _in_order(in_openvino[1], list(test.inputs))
        return found

    return WrittenOnnx(section, runners)


def _in_order(runner: OpenVinoRunner, names: Sequence[str]) -> Runner:
    """What takes the inputs of these names; OpenVINO has an order of its own."""
    places = [names.index(info.name) for info in runner.inputs]

    def call(*arrays: Array) -> Sequence[Array]:
        return runner(*(arrays[place] for place in places))

    return Runner(call, runner.options.threads or thread_counts()[-1])


def _model(path: Path, report: OnnxReport) -> Path | bytes:
    """The model as ONNX Runtime reads it: by path where its weights lie beside it."""
    return path if report.data_sha256 is not None else path.read_bytes()


def _exported(
    optimized: Optimized, path: Path, precision: str, test: SelfTest, seconds: float
) -> tuple[OnnxReport, Tuning]:
    """Export, verify, and find the session's options that are fastest on this machine.

    The file keeps NaN in ONNX Runtime, too: a bundle's results are those of the module, whatever runs them.
    Raises the OSError for which the file cannot be written.
    """
    recipe = optimized.recipe
    try:
        report = export_onnx(
            optimized.original,
            optimized.captured,
            recipe.passes,
            path,
            precision=precision,
            tolerance=recipe.tolerance,
            metric=recipe.metric,
            sizes=optimized.sizes,
            keeps_nan=True,
        )
    except (ExportError, VerificationError) as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        hint = "" if "onnx=None" in str(error) else "; save(…, onnx=None) writes a bundle without ONNX"
        raise type(error)(f"{error}{hint}") from error
    arrays = [storable(tensor).numpy() for tensor in test.inputs.values()]
    found = onnxruntime().get_available_providers()
    left_out = OPENVINO if report.why_not_openvino else None
    tuned = tune(
        _model(path, report),
        arrays,
        seconds=seconds,
        providers=[name for name in PREFERRED if name in found and name != left_out],
        tolerance=test.tolerance,
        tf32=precision == "fp16",
    )
    return report, tuned


def _in_openvino(
    path: Path, recipe: Recipe, precision: str, test: SelfTest
) -> tuple[dict[str, Any], OpenVinoRunner] | None:
    """The manifest's `openvino` and what runs it, where the fastest program and the model run there."""
    step = next((step for step in recipe.passes if isinstance(step, Openvino)), None)
    if step is None or precision != "fp32":
        return None
    try:
        runner = OpenVinoRunner(path, step.chosen)
    except SessionError:
        return None  # the exported model has operators that the program does not have
    if {info.name for info in runner.inputs} != set(test.inputs):
        return None  # OpenVINO drops an input that nothing reads
    inputs = [storable(test.inputs[info.name]).numpy() for info in runner.inputs]
    outputs = runner(*inputs)
    for info, output in zip(runner.outputs, outputs, strict=True):
        error = relative_error(output, storable(test.outputs[info.name]).numpy())
        if not error <= test.tolerance:
            return None
    sampler = latency(lambda: runner(*inputs), torch.device("cpu"))
    timed = interleave({"call": sampler}, seconds=1.0, least=20)["call"].to_dict()
    found: dict[str, Any] = {"version": openvino_version(), "options": runner.options.to_dict()}
    return {**found, "latency": {name: timed[name] for name in ("p50_ms", "p99_ms")}}, runner


def _quantiles(tuned: Tuning) -> dict[str, Any]:
    row = next(row for row in reversed(tuned.rows) if row.options == tuned.best and row.median_ms is not None)
    return {"p50_ms": row.median_ms, "p99_ms": row.p99_ms}
