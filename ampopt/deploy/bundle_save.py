"""`Deployable.save`: saves the model as a bundle with its self-test, for another machine.

A bundle holds the captured model (not the program optimized for this machine) with the recipe of the passes
that were kept: a robot with the same device and libraries replays them, another robot measures them again. It
also holds the portable program as ONNX, and a self-test that every backend has to pass.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ampopt.bundle.call_file import write_call
from ampopt.bundle.files import bundle_errors, write_bundle
from ampopt.bundle.program_file import write_program
from ampopt.bundle.stored_sizes import StoredSizes, stored_sizes, write_sizes
from ampopt.bundle.stored_state import write_state
from ampopt.bundle.written_memory import with_written_memory
from ampopt.deploy.bundle_onnx import write_onnx
from ampopt.deploy.carried_exports import exports_file
from ampopt.deploy.known_backend import CHOOSING_S, backend_file
from ampopt.deploy.onnx_names import input_names_of, output_names_of
from ampopt.deploy.optimized import Optimized
from ampopt.deploy.portable import HALF
from ampopt.deploy.recipe_file import write_recipe
from ampopt.deploy.self_test import pass_test, self_test_of
from ampopt.deploy.sized_program import SizedProgram
from ampopt.deploy.torchscript_file import why_not_torchscript, write_torchscript
from ampopt.errors import ExportError, InputError, first_line
from ampopt.ir.capture import Captured
from ampopt.ir.graph import aten, calls, where
from ampopt.ir.lifted_state import LiftedState
from ampopt.ir.model_hash import model_hash
from ampopt.ir.normal_form import tells_equal_from_same
from ampopt.ir.program import Program
from ampopt.ir.symbolic_capture import at_sizes
from ampopt.ir.transform import Family, replay
from ampopt.measure.clocks import latency
from ampopt.measure.frames import frame_call
from ampopt.measure.headline import is_busy
from ampopt.measure.sampling import Measurement, interleave
from ampopt.passes import BakeAutocast
from ampopt.system.environment import device_name, environment
from ampopt.system.interrupts import check_interrupted
from ampopt.system.wording import argument
from ampopt.version import __version__

if TYPE_CHECKING:
    from ampopt.deploy.deployable import Deployable

logger = logging.getLogger("ampopt")


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
    was_busy = is_busy()  # which the search for the session's options may make the machine
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
    test = self_test_of(original, calls, inputs, outputs, lanes, tolerance)
    pass_test(optimized.program, test)
    if sized is not None:
        for each in (test, *test.corners):
            pass_test(sized.program, each)
    states = len(captured.state)
    all_differ = tells_equal_from_same(original, captured.leaves, captured.spec, captured.program.device)
    filled = held.program.with_graph(with_written_memory(held.program.graph))
    data, weights = write_program(filled)
    program = {"program": data, "recipe": write_recipe(steps)}
    files: dict[str, bytes | Path] = {
        "program.json": json.dumps(program, allow_nan=False).encode(),
        "weights.safetensors": safetensors.torch.save(weights),
        "self_test.safetensors": safetensors.torch.save(test.tensors()),
        "report.json": json.dumps(module.report.to_dict(), indent=1).encode(),
        **({} if stored else _if_possible(lambda: exports_file(optimized))),
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
            written = write_onnx(optimized, model, precision, test, tune_s, varies=bool(stored))
            manifest["onnx"] = written.section
            files |= {file.name: file for file in sorted(Path(folder).iterdir())}
            if not (was_busy or stored or states) and tune_s >= CHOOSING_S:
                given = list(test.inputs.values())
                files |= _if_possible(lambda: backend_file(optimized.program, given, written.runners()))
        key = None if sign_key is None else Path(sign_key)
        write_bundle(path, manifest, files, sign_key=key, as_folder=as_folder)


def _if_possible(make: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
    """Files that save a load time and nothing else; none where an engine fails, which the log tells."""
    try:
        return make()
    except Exception as error:  # whatever an engine raises
        check_interrupted(error)
        logger.warning("ampopt: the bundle's first load will take longer, because %s", first_line(error))
        return {}


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
    """Raise ExportError for a graph that checks a number which its inputs' values decide: a size, a place."""
    if (node := next(calls(graph, (aten._assert_scalar.default,)), None)) is None:
        return
    number = node
    while node.all_input_nodes and not _gives_tensors(node):
        number, node = node, node.all_input_nodes[0]
    if any(reader.target in _SELECTIONS for reader in _readers(number)):
        raise ExportError(
            f"a value decides which place the model reads or writes, at {where(node)}, and a bundle's "
            "program has fixed ones: give that tensor to index_select or index_copy_, or write a file "
            "with export_onnx, which may hold it"
        )
    raise ExportError(
        f"the values of the model's inputs decide its sizes, at {where(node)}, and a bundle's program has "
        "fixed ones: leave that step out, or write a file with export_onnx, which may hold it"
    )


_SELECTIONS = aten.select.int, aten.select_scatter.default
"""Operators that read or write at one place, which is a number."""


def _readers(number: fx.Node) -> set[fx.Node]:
    """What reads a number, or one that is computed from it."""
    found, todo = set[fx.Node](), [number]
    while todo:
        node = todo.pop()
        new = set[fx.Node]() if _gives_tensors(node) else set(node.users) - found
        found |= new
        todo += new
    return found


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
