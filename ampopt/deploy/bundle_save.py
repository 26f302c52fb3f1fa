"""`Deployable.save`: saves the model as a bundle with its self-test, for another machine.

A bundle holds the captured model (not the program optimized for this machine) with the recipe of the passes
that were kept: a robot with the same device and libraries replays them, another robot measures them again. It
also holds the portable program as ONNX, and a self-test that every backend has to pass.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from ampopt.bundle.call_file import write_call
from ampopt.bundle.files import bundle_errors, write_bundle
from ampopt.bundle.program_file import write_program
from ampopt.bundle.stored_sizes import StoredSizes, in_corner, stored_sizes, write_sizes
from ampopt.bundle.stored_state import write_state
from ampopt.deploy.onnx_export import OnnxReport, export_onnx
from ampopt.deploy.onnx_names import input_names_of, output_names_of
from ampopt.deploy.onnx_verify import OnnxVerifier
from ampopt.deploy.optimized import Optimized
from ampopt.deploy.portable import HALF
from ampopt.deploy.recipe_file import write_recipe
from ampopt.deploy.sized_program import SizedProgram
from ampopt.deploy.torchscript_file import why_not_torchscript, write_torchscript
from ampopt.engines.executable import executable
from ampopt.errors import ExportError, InputError, VerificationError
from ampopt.ir import numerics
from ampopt.ir.capture import Captured
from ampopt.ir.graph import aten, calls, where
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.lifted_state import LiftedState
from ampopt.ir.model_hash import model_hash
from ampopt.ir.normal_form import tells_equal_from_same
from ampopt.ir.program import Program
from ampopt.ir.symbolic_capture import at_sizes
from ampopt.ir.transform import Family, Recipe, replay
from ampopt.measure.clocks import latency
from ampopt.measure.draws import Draw
from ampopt.measure.frames import frame_call
from ampopt.measure.sampling import Measurement, interleave
from ampopt.measure.tied_values import tells_places
from ampopt.ort.openvino_session import OpenVinoRunner, openvino_version
from ampopt.ort.options import OPENVINO, PREFERRED
from ampopt.ort.session import SessionError, onnxruntime, relative_error
from ampopt.ort.tuning import Tuning, tune
from ampopt.passes import BakeAutocast, Openvino
from ampopt.system.environment import device_name, environment
from ampopt.system.wording import argument
from ampopt.version import __version__

if TYPE_CHECKING:
    from ampopt.deploy.deployable import Deployable

OTHERS = 2
"""Number of inputs like the example that may take its place in a self-test."""

LARGEST_TOLERANCE = 0.5
"""Largest tolerance of a self-test: with a larger one, outputs of zeros would pass."""

ONE_SIZE = "OpenVINO runs models of fixed sizes here, and sizes of this one vary"
"""Why a bundle for a range of sizes does not run in OpenVINO."""


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """Inputs and the original's outputs by name, and the largest relative error of an output that passes.

    `corners` holds the same of other sizes, for a program for a range of them.
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    tolerance: float
    corners: tuple[SelfTest, ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for safetensors: contiguous copies on the CPU.

        bfloat16, which NumPy does not have, is stored as float32.
        """
        named = {f"input.{name}": t for name, t in self.inputs.items()}
        named |= {f"output.{name}": t for name, t in self.outputs.items()}
        own = {name: _storable(tensor) for name, tensor in named.items()}
        for number, corner in enumerate(self.corners):
            own |= {in_corner(number, name): tensor for name, tensor in corner.tensors().items()}
        return own


def save_bundle(
    module: Deployable,
    optimized: Optimized,
    sized: SizedProgram | None,
    path: str | os.PathLike[str],
    *,
    onnx: str | None = "auto",
    cpp: bool = False,
    sign_key: str | os.PathLike[str] | None = None,
    as_folder: bool = False,
    tune_s: float = 10.0,
) -> None:
    """Write the bundle of an optimized module; see `Deployable.save`.

    `sized`: the module's program for a range of sizes, which the bundle then holds instead of that for the
    example's.
    """
    if onnx not in ("auto", "fp32", "fp16", None):
        raise InputError(f"onnx={onnx!r}: choose 'auto', 'fp32', 'fp16', or None for a bundle without ONNX")
    captured, original, recipe = optimized.captured, optimized.original, optimized.recipe
    if captured.lifted is not None:
        _check_state(captured, captured.lifted)
    _check_sizes(captured.program.graph)
    inputs = input_names_of(captured)
    if not inputs:
        raise ExportError(
            f"{module.report.model} takes no tensors: a bundle holds a model that does, and export_onnx "
            "writes this one"
        )
    outputs = output_names_of(captured, inputs)
    stored = StoredSizes() if sized is None else stored_sizes(sized.sizes)
    held, steps = (captured, recipe.passes) if sized is None else (_with_sizes(sized), sized.program.recipe)
    calls = [captured, *(at_sizes(held, stored.sizes, corner) for corner in stored.corners)]
    precision = recipe.lane.onnx if onnx == "auto" else onnx
    lanes = {recipe.lane, *([HALF] if precision == "fp16" else [])}
    tolerance = recipe.tolerance if recipe.metric is None else None
    test = _self_test(original, calls, inputs, outputs, lanes, tolerance)
    _pass_test(optimized.program, test)
    if sized is not None:
        for each in (test, *test.corners):
            _pass_test(sized.program, each)
    states = len(captured.state)
    all_differ = tells_equal_from_same(original, captured.leaves, captured.spec, captured.program.device)
    data, weights = write_program(held.program)
    program = {"program": data, "recipe": write_recipe(steps)}
    files: dict[str, bytes | Path] = {
        "program.json": json.dumps(program, allow_nan=False).encode(),
        "weights.safetensors": safetensors.torch.save(weights),
        "self_test.safetensors": safetensors.torch.save(test.tensors()),
        "report.json": json.dumps(module.report.to_dict(), indent=1).encode(),
    }
    if cpp:
        flat = list(test.inputs.values()), list(test.outputs.values())
        files["program.pt"] = write_torchscript(_for_libtorch(optimized), *flat, test.tolerance)
    manifest: dict[str, Any] = {
        "ampopt": __version__,
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "model": {"name": module.report.model, "sha256": model_hash(captured.program.graph)},
        "lane": {"name": recipe.lane.name, "dtype": _dtype(recipe.lane.dtype)},
        "inputs": _border(test.inputs),
        "outputs": _border(test.outputs),
        "tolerance": test.tolerance,
        "latency": _latency(module, captured),
        "fingerprint": environment(captured.program.device),
        "call": write_call(dataclasses.replace(captured, all_differ=all_differ)),
        **({"sizes": write_sizes(stored)} if stored else {}),
        **({"state": write_state(inputs[-states:], outputs[-states:])} if states else {}),
    }
    with bundle_errors(path, "cannot be saved"), tempfile.TemporaryDirectory(prefix="ampopt-") as folder:
        if precision is not None:
            model = Path(folder) / "model.onnx"
            exported, tuned = _onnx(optimized, model, precision, test, tune_s)
            why_not = exported.why_not_openvino or (ONE_SIZE if stored else None)
            manifest["onnx"] = {
                "precision": precision,
                "opset": exported.opset,
                "session": tuned.session(),
                "latency": _quantiles(tuned),
                "why_not_openvino": why_not,
                **({} if why_not else _in_openvino(model, recipe, precision, test)),
            }
            files |= {file.name: file for file in sorted(Path(folder).iterdir())}
        key = None if sign_key is None else Path(sign_key)
        write_bundle(path, manifest, files, sign_key=key, as_folder=as_folder)


def _check_state(captured: Captured, lifted: LiftedState) -> None:
    """Raise ExportError for a state that is more than inputs and outputs of the program."""
    if not lifted.from_start:
        raise ExportError(
            f"the model makes a state in its {lifted.named} in its first calls, which the graph of one call "
            "cannot do: let it begin with tensors, of zeros perhaps"
        )
    if lifted.writes and lifted.shares:
        raise ExportError(
            f"the model writes to its {lifted.named}, which shares memory with other tensors: a bundle "
            "cannot hold such a state; give each tensor memory of its own"
        )
    borders = zip(captured.program.examples, captured.program.entry, strict=True)
    if any(tensor.dtype != border.dtype for tensor, border in borders):
        raise ExportError(
            f"the model keeps a state in its {lifted.named}, and takes inputs of other dtypes: optimize "
            f"it with {argument('io', 'original')} for a bundle"
        )


def _check_sizes(graph: fx.GraphModule) -> None:
    """Raise ExportError for a graph that checks a number which its inputs' values decide: a size, mostly."""
    if (node := next(calls(graph, (aten._assert_scalar.default,)), None)) is None:
        return
    while node.all_input_nodes and not _gives_tensors(node):
        node = node.all_input_nodes[0]
    raise ExportError(
        f"the values of the model's inputs decide its sizes, at {where(node)}, and a bundle's program has "
        "fixed ones: leave that step out, or write a file with export_onnx, which may hold it"
    )


def _gives_tensors(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and any(
        "Tensor" in str(result.type) for result in node.target._schema.returns
    )


def _for_libtorch(optimized: Optimized) -> Program:
    """The program that C++ runs: this machine's own, or without kernels where only this process has them."""
    recipe, native = optimized.recipe, _with_casts(optimized.program)
    if why_not_torchscript(native) is None:
        return native
    plain = tuple(step for step in recipe.passes if step.family in (Family.REWRITE, Family.PLACEMENT))
    return _with_casts(replay(plain, recipe.lane.start(optimized.captured.program)))


def _with_casts(program: Program) -> Program:
    """The program with its autocast, which a trace does not see, written out as casts, which it does."""
    return program if not program.under_autocast else BakeAutocast().apply(program).program


def _with_sizes(sized: SizedProgram) -> Captured:
    """The capture with symbolic sizes, before any pass."""
    captured = sized.captured
    return dataclasses.replace(captured, program=captured.program.replace(sizes=sized.sizes))


def _self_test(
    original: nn.Module,
    calls: Sequence[Captured],
    inputs: Sequence[str],
    outputs: Sequence[str],
    lanes: set[Lane],
    tolerance: float | None,
) -> SelfTest:
    """The inputs of calls, the first of which is the example's, with the original's outputs.

    These are computed in float64, and rounded to the dtypes that the original returns. Inputs like the
    example take its place where an output of it hangs on the order of equal values.
    """
    tests, bounds = [], [0.0]
    for call in calls:
        verifier = OnnxVerifier(original, call, draws=OTHERS if tells_places(call.program) else 0)
        draw = verifier.ties.first_without()
        examples = (*draw.calls[0], *call.initial_state)
        own = verifier.eager(FP32)(*examples)
        expected = [
            exact.to(mine.dtype) if mine.is_floating_point() else mine
            for exact, mine in zip(verifier.reference(draw)[0], own, strict=True)
        ]
        named = dict(zip(inputs, examples, strict=True)), dict(zip(outputs, expected, strict=True))
        tests.append(named)
        if tolerance is None:
            bounds += [lane.limits.allowed(_usual_error(verifier, lane, draw)) for lane in lanes]
    allowed = min(max(bounds), LARGEST_TOLERANCE) if tolerance is None else tolerance
    example, *corners = [SelfTest(*named, allowed) for named in tests]
    return dataclasses.replace(example, corners=tuple(corners))


def _usual_error(verifier: OnnxVerifier, lane: Lane, draw: Draw) -> float:
    """Eager's largest error on a draw in a lane, or what rounding changes there; overflow is none."""
    own = [error for error in verifier.own_errors(lane, draw) if error < 1.0]
    return max([*verifier.largest_jumps(lane, draw), *own], default=0.0)


def _pass_test(program: Program, test: SelfTest) -> None:
    """Raise VerificationError where a program would not pass its bundle's self-test, and so not be loaded."""
    outputs = executable(program)(*test.inputs.values())
    for (name, expected), output in zip(test.outputs.items(), outputs, strict=True):
        error = numerics.relative_error(output, expected)
        if not error <= test.tolerance:
            raise VerificationError(
                f"a bundle of this model would not load, and was not written: on inputs of {_shapes(test)}, "
                f"output {name!r} of its program has an error of {error:.2g} against the model in float64, "
                f"over {test.tolerance:.2g}; optimize with a larger {argument('tolerance=')} to accept that"
            )


def _shapes(test: SelfTest) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in test.inputs.values())


def _onnx(
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
    model = path if report.data_sha256 is not None else path.read_bytes()
    arrays = [_storable(tensor).numpy() for tensor in test.inputs.values()]
    found = onnxruntime().get_available_providers()
    left_out = OPENVINO if report.why_not_openvino else None
    tuned = tune(
        model,
        arrays,
        seconds=seconds,
        providers=[name for name in PREFERRED if name in found and name != left_out],
        tolerance=test.tolerance,
        tf32=precision == "fp16",
    )
    return report, tuned


def _in_openvino(path: Path, recipe: Recipe, precision: str, test: SelfTest) -> dict[str, Any]:
    """The manifest's `openvino`, where the fastest program runs in it and the ONNX model does so, too."""
    step = next((step for step in recipe.passes if isinstance(step, Openvino)), None)
    if step is None or precision != "fp32":
        return {}
    try:
        runner = OpenVinoRunner(path, step.chosen)
    except SessionError:
        return {}  # the exported model has operators that the program does not have
    if {info.name for info in runner.inputs} != set(test.inputs):
        return {}  # OpenVINO drops an input that nothing reads
    inputs = [_storable(test.inputs[info.name]).numpy() for info in runner.inputs]
    outputs = runner(*inputs)
    for info, output in zip(runner.outputs, outputs, strict=True):
        error = relative_error(output, _storable(test.outputs[info.name]).numpy())
        if not error <= test.tolerance:
            return {}
    call = functools.partial(runner, *inputs)
    sampler = latency(call, torch.device("cpu"))
    timed = interleave({"call": sampler}, seconds=1.0, least=20)["call"].to_dict()
    found: dict[str, Any] = {"version": openvino_version(), "options": runner.options.to_dict()}
    return {"openvino": {**found, "latency": {name: timed[name] for name in ("p50_ms", "p99_ms")}}}


def _quantiles(tuned: Tuning) -> dict[str, Any]:
    row = next(row for row in reversed(tuned.rows) if row.options == tuned.best and row.median_ms is not None)
    return {"p50_ms": row.median_ms, "p99_ms": row.p99_ms}


def _latency(module: Deployable, captured: Captured) -> dict[str, Any]:
    """Of one call back to back as a robot makes it: inputs from host memory, outputs in host memory."""
    device = captured.program.device
    served = module if captured.lifted is None else copy.deepcopy(module)  # its state stays
    call = frame_call(served, captured, captured.inputs, device)
    timed: Measurement = interleave({"call": latency(call, device)}, seconds=1.0, least=20)["call"]
    found = timed.to_dict()
    return {"p50_ms": found["p50_ms"], "p99_ms": found["p99_ms"], "device": device_name(device)}


def _border(tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(t.shape), "dtype": _dtype(t.dtype), "layout": "contiguous"}
        for name, t in tensors.items()
    ]


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _storable(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu().contiguous().clone()
    return plain.float() if plain.dtype is torch.bfloat16 else plain
