"""The ways to run a saved network in a process that does nothing else.

Each takes the folder of a network, its inputs and a number of threads, and gives a function of NumPy arrays.
What a way needs is imported where it is used: its start and its memory are what is measured.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engines_on_cpu import ENGINES, Array, Run

BUNDLE = "network.ampopt"

AGAIN = {"ampopt.load again": "ampopt.load"}
"""Ways that are another once more, with the caches that its process left: a robot's second start."""


def robot(folder: Path, *_: object) -> Run:
    """The bundle without PyTorch, with as many threads as it was fastest with."""
    model = importlib.import_module("ampopt.robot").load(folder / BUNDLE)
    return lambda *arrays: _listed(model(*arrays))


def load(folder: Path, _: tuple[Array, ...], threads: int) -> Run:
    """The bundle in PyTorch's process."""
    torch = _torch(threads)
    model = importlib.import_module("ampopt").load(folder / BUNDLE)
    return _of_tensors(torch, model)


def eager(folder: Path, _: tuple[Array, ...], threads: int) -> Run:
    """The network as its user wrote it."""
    torch = _torch(threads)
    return _of_tensors(torch, torch.load(folder / "model.pt", weights_only=False))  # of our own making


def onnxruntime(folder: Path, _: tuple[Array, ...], threads: int) -> Run:
    """A plain export in ONNX Runtime with its own defaults."""
    ort: Any = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return lambda *arrays: list(session.run(None, dict(zip(names, arrays, strict=True))))


def openvino(folder: Path, _: tuple[Array, ...], threads: int) -> Run:
    """A plain export in OpenVINO, for latency and in float32."""
    core: Any = importlib.import_module("openvino").Core()
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    hints["INFERENCE_NUM_THREADS"] = str(threads)
    request = core.compile_model(core.read_model(folder / "model.onnx"), "CPU", hints).create_infer_request()
    return lambda *arrays: list(request.infer(list(arrays)).to_tuple())


WAYS: dict[str, Callable[[Path, tuple[Array, ...], int], Run]] = {
    "ampopt.robot": robot,
    "ONNX Runtime": onnxruntime,
    "OpenVINO": openvino,
    **ENGINES,
    "ampopt.load": load,
    "ampopt.load again": load,
    "eager": eager,
}


def _torch(threads: int) -> Any:
    torch = importlib.import_module("torch")
    torch.set_num_threads(threads)
    return torch


def _of_tensors(torch: Any, model: Callable[..., Any]) -> Run:
    def run(*arrays: Array) -> list[Array]:
        with torch.inference_mode():
            found = model(*map(torch.from_numpy, arrays))
        return [tensor.numpy() for tensor in _listed(found)]

    return run


def _listed(found: Any) -> list[Any]:
    """The outputs of networks that give one tensor, several, or a dict of them."""
    if isinstance(found, dict):
        found = list(found.values())
    return list(found) if isinstance(found, (list, tuple)) else [found]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
