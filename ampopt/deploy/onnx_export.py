"""`export_onnx`: writes the portable program as an ONNX file, which appears only after verification."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampopt.deploy.onnx_dynamic import Dynamic, capture_dynamic, dims_of, doubled, one_more, ones
from ampopt.deploy.onnx_files import append_metadata, data_path, sha256_of, write_model
from ampopt.deploy.onnx_names import input_names_of, output_names_of
from ampopt.deploy.onnx_verify import OnnxCheck, OutputCheck, emulated, verify_onnx
from ampopt.deploy.portable import HALF, portable_program, why_not_openvino
from ampopt.engines.onnx_graph import OPSETS, Dims, dims_in, outer_dtype, to_onnx
from ampopt.engines.onnx_program import fit_onnx_runtime
from ampopt.errors import ExportError, InputError, VerificationError, need
from ampopt.ir.capture import Captured
from ampopt.ir.graph import where
from ampopt.ir.lane_io import original_of
from ampopt.ir.lanes import FP32
from ampopt.ir.matrix_forms import in_float64
from ampopt.ir.model_hash import model_hash
from ampopt.ir.program import Program
from ampopt.ir.resize_forms import of_one_size
from ampopt.ir.shapes import record_shapes
from ampopt.ir.size_range import Sizes, between, corners, shown
from ampopt.ir.symbolic_capture import at_sizes
from ampopt.ir.transform import Pass
from ampopt.measure.metric import Metric
from ampopt.system.atomic import replacing_together
from ampopt.system.places import place_of, told
from ampopt.system.wording import argument
from ampopt.version import __version__

PRECISIONS = {"fp32": FP32, "fp16": HALF}
"""The lane for each precision of an exported model."""


@dataclasses.dataclass(frozen=True)
class OnnxReport:
    """The result of an ONNX export and of its verification.

    `precision` is what the model computes in, `io` the dtype of its floating-point inputs and outputs.
    `outputs` holds each output's error on each provider, with eager's own error in the same precision.
    `nodes_off_gpu` is None if no CUDA provider was available. `data_sha256` is the hash of the external
    weights, None if they are in the model. `reason` says what failed and is None if nothing did, and
    `why_not_openvino` which operator OpenVINO computes otherwise than PyTorch, if it does.
    """

    path: str
    sha256: str
    data_sha256: str | None
    model_sha256: str
    target: str
    opset: int
    precision: str
    io: str
    inputs: tuple[str, ...]
    output_names: tuple[str, ...]
    rewrites: tuple[str, ...]
    outputs: tuple[OutputCheck, ...]
    metric: float | None
    reason: str | None
    why_not_openvino: str | None
    nodes: int
    nodes_off_gpu: tuple[str, ...] | None
    providers: tuple[str, ...]
    onnxruntime: str
    notes: tuple[str, ...]
    seconds: float

    @property
    def verified(self) -> bool:
        """Whether the errors of the file's outputs are within their limits."""
        return self.reason is None

    @property
    def error(self) -> float:
        """The largest relative error of an output over all providers."""
        return max((check.error for check in self.outputs), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {**dataclasses.asdict(self), "verified": self.verified, "error": self.error}


def export_onnx(
    original: nn.Module,
    captured: Captured,
    recipe: tuple[Pass, ...],
    path: str | os.PathLike[str],
    *,
    precision: str = "fp32",
    io: str | None = None,
    target: str = "onnxruntime",
    dynamic: Dynamic = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    tolerance: float | None = None,
    metric: Metric | None = None,
    force: bool = False,
    sizes: Sizes = (),
    keeps_nan: bool = False,
) -> OnnxReport:
    """Write a model as ONNX with its portable rewrites; it is verified before the file appears.

    Args:
        original: a private copy of the model in evaluation mode; it is the reference.
        captured: its capture, for whose example inputs the file is made.
        recipe: the passes of the optimized program; the portable ones are used.
        path: the output path, in a folder that is there; where it is a link, the file that it leads to is
            written. Weights over 2 GB go to `<path>.data`.
        precision: "fp32", or "fp16" with the casts of CUDA's autocast baked in.
        io: "fp32" or "fp16", the dtype of floating-point inputs and outputs; None: as the captured call has
            them, and "fp32" for bfloat16.
        target: "onnxruntime", "tensorrt" or "openvino"; decides the opset. A file of fixed sizes for
            "openvino" is verified there, too, where that is installed.
        dynamic: None for static shapes, "batch" for a dynamic dimension 0 of every input, or
            {input name: {dimension: name}}.
        input_names, output_names: None: the model's own parameter names, result keys or `output`.
        tolerance: largest relative error of an output; None: a small multiple of eager's own.
        metric: the user's metric, checked instead of the errors, at most `tolerance` (None: 0).
        force: keep a file that failed its verification, marked as failed in its metadata.
        sizes: the ranges of sizes that the file is for and verified at, where `dynamic` is None.
        keeps_nan: add what lets float32 operators keep NaN in ONNX Runtime, as `passes.OnnxRuntime` does.

    Raises:
        InputError: an argument does not fit. ExportError: ONNX cannot express the model, or its file cannot
        be written. VerificationError: the file's outputs are over the error limit. MissingExtraError: a
        package is missing. In all these cases no file is written, and an existing file stays unchanged.
    """
    started = time.perf_counter()
    for option, value in (("precision", precision), ("io", io)):
        if value not in PRECISIONS and (option, value) != ("io", None):
            raise InputError(f"{argument(option, value)}: choose from {', '.join(PRECISIONS)}")
    if target not in OPSETS:
        raise InputError(f"{argument('target', target)}: choose from {', '.join(OPSETS)}")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        need(package, "onnx")
    place = _place(path)
    inputs = input_names_of(captured, input_names)
    outputs = output_names_of(captured, inputs, output_names)
    if not outputs:
        raise ExportError(
            f"{type(original_of(original)).__name__} returns no tensors: there is nothing to export"
        )
    borders = zip((*inputs, *outputs), (*captured.program.entry, *captured.program.exit), strict=True)
    if parts := [name for name, border in borders if border.dtype.is_complex]:
        raise ExportError(
            f"{', '.join(parts)}: ONNX has no complex inputs or outputs: take and give real ones, of "
            "torch.view_as_real, and let the model use torch.view_as_complex; a bundle without ONNX, of "
            "save(…, onnx=None), may have them"
        )
    if captured.lifted is not None and not captured.lifted.from_start:
        raise ExportError(
            f"the model makes a state in its {captured.lifted.named} in its first calls, which the graph of "
            "one call cannot do: let it begin with tensors, of zeros perhaps"
        )
    sizes = sizes if dynamic is None else ()
    dims = dims_in(sizes) or dims_of(dynamic, captured, inputs)
    is_dynamic = any(dims)
    traced = capture_dynamic(original, captured, dims, sizes) if is_dynamic else captured
    program = portable_program(traced, recipe, PRECISIONS[precision], dynamic=is_dynamic)
    otherwise = why_not_openvino(program, inputs, varies=is_dynamic)
    model = to_onnx(
        program,
        io=io,
        target=target,
        input_names=inputs,
        output_names=outputs,
        dims=dims,
    )
    if keeps_nan:
        fit_onnx_runtime(model)
    model.producer_name, model.producer_version = "ampopt", __version__
    io = io or _io_of(captured)
    lane = PRECISIONS["fp16" if "fp16" in (precision, io) else "fp32"]
    with _writing(path), replacing_together(place, data_path(place)) as folder:
        written = folder / place.name
        write_model(model, written)
        _check_file(written)
        check = verify_onnx(
            written,
            original,
            _calls(original, captured, traced, dims, sizes),
            lane,
            outputs,
            small=[] if sizes else _at_symbols(ones(original, captured, dims), traced),
            tolerance=tolerance,
            metric=metric,
            program=emulated(program.run) if precision == "fp16" else None,
            in_openvino=target == "openvino" and otherwise is None and not is_dynamic,
            chooses=None if is_dynamic else program,
        )
        if check.reason is not None and not force:
            fault = "is wrong" if check.providers else "does not run here"
            node = of_one_size(program.graph) if is_dynamic else None
            hint = "" if node is None else f"; sizes vary, and its {where(node)} may have one size for all"
            if not check.providers and _has_float64(program):
                hint = "; ONNX Runtime has few operators in float64: optimize model.float()"
            raise VerificationError(
                f"the exported model {fault}, and was not written: {check.reason}{hint}; "
                f"{argument('force', True)} keeps it, marked as failed"
            )
        identity = model_hash(captured.program.graph)
        facts = _metadata(check, identity, precision, io, target)
        append_metadata(written, facts | ({"ampopt.sizes": shown(sizes)} if sizes else {}))
        data = data_path(written)
        hashes = sha256_of(written), sha256_of(data) if data.exists() else None
    return OnnxReport(
        path=str(Path(path)),
        sha256=hashes[0],
        data_sha256=hashes[1],
        model_sha256=identity,
        target=target,
        opset=model.opset_imports[""],
        precision=precision,
        io=io,
        inputs=inputs,
        output_names=outputs,
        rewrites=tuple(step.name for step in program.recipe),
        outputs=check.outputs,
        metric=check.metric,
        reason=check.reason,
        why_not_openvino=otherwise,
        nodes=sum(1 for _ in model.graph.all_nodes()),
        nodes_off_gpu=check.nodes_off_gpu,
        providers=check.providers,
        onnxruntime=str(need("onnxruntime", "onnx").__version__),
        notes=(
            *check.notes,
            *_of_openvino(target, otherwise),
            *_of_float64(target, program),
            *_how_to_keep(captured, inputs),
        ),
        seconds=time.perf_counter() - started,
    )


def _place(path: str | os.PathLike[str]) -> Path:
    """The place of the file, where a link to it leads."""
    if "\0" in str(path):
        raise InputError(f"the path {str(path)!r} has a NUL in it: give another one")
    if os.path.isdir(path):  # a name that is too long is none
        raise InputError(f"{path} is a folder: name the file, such as {Path(path) / 'model.onnx'}")
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{path} is not a regular file: name another one")
    with _writing(path):
        return place_of(path)


@contextlib.contextmanager
def _writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise ExportError where the block cannot write the file."""
    try:
        yield
    except OSError as error:
        raise ExportError(f"{str(path)!r} cannot be written: {told(error)}") from error


def _io_of(captured: Captured) -> str:
    """The `io` of a file that is made for a captured call as it is."""
    results = captured.program.exit[: len(captured.program.exit) - len(captured.state)]
    dtypes = (*(tensor.dtype for tensor in captured.inputs), *(border.dtype for border in results))
    return "fp16" if torch.float16 in (outer_dtype(dtype, None) for dtype in dtypes) else "fp32"


def _of_openvino(target: str, otherwise: str | None) -> list[str]:
    """What the maker of a file for OpenVINO is told, which nothing was verified in."""
    return [] if otherwise is None or target != "openvino" else [f"{otherwise}: choose another runtime"]


def _has_float64(program: Program) -> bool:
    weights = program.graph.state_dict().values()
    return any(tensor.dtype is torch.float64 for tensor in (*program.examples, *weights))


_WIDE = {
    "tensorrt": "which TensorRT does not have: it may refuse the file",
    "openvino": "which OpenVINO rounds to float32",
}


def _of_float64(target: str, program: Program) -> list[str]:
    """What the maker of a file for a runtime without float64 is told."""
    if target not in _WIDE or (node := in_float64(record_shapes(program))) is None:
        return []
    return [f"{where(node)} is computed in float64, {_WIDE[target]}"]


def _how_to_keep(captured: Captured, inputs: Sequence[str]) -> list[str]:
    """How the caller of a file keeps the model's state."""
    states = inputs[len(inputs) - len(captured.state) :]
    return [f"state: give the next call what this one returns as {name}_next for {name}" for name in states]


def _calls(
    original: nn.Module, captured: Captured, traced: Captured, dims: Dims, sizes: Sizes
) -> tuple[Captured, ...]:
    """The calls that a file is verified on: a dynamic one also on sizes that it was not made with."""
    if not any(dims):
        return (captured,)
    if sizes:
        places = (*corners(sizes), between(sizes))
        return captured, *(at_sizes(traced, sizes, wanted) for wanted in places)
    others = doubled(captured, dims), one_more(original, captured, dims)
    return captured, *_at_symbols([each for each in others if each is not None], traced)


def _at_symbols(calls: Sequence[Captured], traced: Captured) -> list[Captured]:
    """Calls of other sizes with the symbolic graph, which runs at those, too."""
    symbolic = traced.program.graph
    return [dataclasses.replace(each, program=each.program.replace(graph=symbolic)) for each in calls]


def _check_file(path: Path) -> None:
    """Raise ExportError where ONNX's own checker, with strict shape inference, finds the file invalid."""
    try:
        need("onnx", "onnx").checker.check_model(str(path), full_check=True)
    except Exception as error:
        reason = textwrap.shorten(str(error), 300, placeholder=" …")
        few = "; ONNX has few operators in bfloat16: optimize model.float()" if "bfloat16" in reason else ""
        raise ExportError(f"the exported model is not valid ONNX: {reason}{few}") from error


def _metadata(check: OnnxCheck, identity: str, precision: str, io: str, target: str) -> dict[str, str]:
    return {
        "ampopt.version": __version__,
        "ampopt.model_sha256": identity,
        "ampopt.lane": precision,
        "ampopt.io": io,
        "ampopt.target": target,
        "ampopt.error": f"{check.error:.3g}",
        "ampopt.verified": "no" if check.reason else "yes",
        **({"ampopt.failure": check.reason} if check.reason else {}),
        "ampopt.verified_on": ", ".join(check.providers),
    }
