"""ncnn, MNN and LiteRT on a CPU, float32 throughout: how each converts a network and runs it.

Each runs in its own environment, so their packages are imported where they are used; there is no PyTorch but
in LiteRT's converter. All take and give NumPy arrays.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Run = Callable[..., list[Array]]


def convert(engine: str, folder: Path) -> None:
    """Write what the engine loads, from FOLDER/model.onnx or, for LiteRT, from model.pt."""
    if engine == "litert":
        _to_litert(folder)
        return
    if not (folder / "model.onnx").exists():
        raise FileNotFoundError("the network has no ONNX export to convert")
    tools, onnx = Path(sys.executable).parent, str(folder / "model.onnx")
    if engine == "ncnn":
        with np.load(folder / "inputs.npz") as stored:
            shapes = ",".join("[" + ",".join(map(str, array.shape)) + "]" for array in stored.values())
        # Half precision is ncnn's default for stored weights.
        _run([str(_pnnx()), onnx, f"inputshape={shapes}", "fp16=0"], folder)
    else:
        made = str(folder / "model.mnn")
        options = ["-f", "ONNX", "--modelFile", onnx, "--MNNModel", made, "--bizCode", "race"]
        _run([str(tools / "mnnconvert"), *options], folder)


def _pnnx() -> Path:
    """The converter itself: the script that the package installs imports PyTorch."""
    found = importlib.util.find_spec("pnnx")
    if found is None or found.origin is None:
        raise FileNotFoundError("pnnx is not installed")
    return Path(found.origin).parent / "pnnx"


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no message"]
        raise RuntimeError(f"{Path(command[0]).name} ended with status {done.returncode}: {said[-1]}")


def _to_litert(folder: Path) -> None:
    torch: Any = importlib.import_module("torch")
    litert_torch: Any = importlib.import_module("litert_torch")
    model = torch.load(folder / "model.pt", weights_only=False)  # of our own making
    inputs = torch.load(folder / "inputs.pt")
    litert_torch.convert(model.eval(), tuple(inputs)).export(str(folder / "model.tflite"))


def ncnn(folder: Path, inputs: tuple[Array, ...], threads: int) -> Run:
    """ncnn with its own defaults, but in float32. It has no batches: the first size of an array is 1."""
    if any(len(array) != 1 for array in inputs):
        raise ValueError("ncnn runs batches of 1 only")
    engine: Any = importlib.import_module("ncnn")
    net = engine.Net()
    net.opt.num_threads = threads
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    net.opt.use_bf16_storage = False
    if net.load_param(str(folder / "model.ncnn.param")) or net.load_model(str(folder / "model.ncnn.bin")):
        raise RuntimeError("ncnn does not load what pnnx made")
    names, results = sorted(net.input_names()), sorted(net.output_names())

    def run(*arrays: Array) -> list[Array]:
        with net.create_extractor() as extractor:
            for name, array in zip(names, arrays, strict=True):
                extractor.input(name, engine.Mat(array[0]))
            return [np.array(extractor.extract(name)[1])[None] for name in results]

    return run


def mnn(folder: Path, inputs: tuple[Array, ...], threads: int) -> Run:
    """MNN's session with its own defaults, in full precision."""
    engine: Any = importlib.import_module("MNN")
    interpreter = engine.Interpreter(str(folder / "model.mnn"))
    session = interpreter.createSession({"numThread": threads, "precision": "high", "backend": "CPU"})
    ins = interpreter.getSessionInputAll(session)
    outs = interpreter.getSessionOutputAll(session)
    float32, planar = engine.Halide_Type_Float, engine.Tensor_DimensionType_Caffe
    names, results = sorted(ins), sorted(outs)
    if len(names) != len(inputs):
        raise ValueError(f"MNN has {len(names)} inputs of {len(inputs)}")

    def run(*arrays: Array) -> list[Array]:
        for name, array in zip(names, arrays, strict=True):
            ins[name].copyFrom(engine.Tensor(array.shape, float32, array, planar))
        interpreter.runSession(session)
        found: list[Array] = []
        for name in results:
            shape = outs[name].getShape()
            host = engine.Tensor(shape, float32, np.empty(shape, np.float32), planar)
            outs[name].copyToHostTensor(host)
            found.append(np.array(host.getNumpyData()).reshape(shape))
        return found

    return run


def litert(folder: Path, _: tuple[Array, ...], threads: int) -> Run:
    """LiteRT's interpreter with XNNPACK, its default on a CPU."""
    module: Any = importlib.import_module("ai_edge_litert.interpreter")
    interpreter = module.Interpreter(model_path=str(folder / "model.tflite"), num_threads=threads)
    interpreter.allocate_tensors()
    ins, outs = interpreter.get_input_details(), interpreter.get_output_details()

    def run(*arrays: Array) -> list[Array]:
        for detail, array in zip(ins, arrays, strict=True):
            interpreter.set_tensor(detail["index"], array)
        interpreter.invoke()
        return [interpreter.get_tensor(detail["index"]) for detail in outs]

    return run


ENGINES: dict[str, Callable[[Path, tuple[Array, ...], int], Run]] = {
    "ncnn": ncnn,
    "mnn": mnn,
    "litert": litert,
}
"""What loads each engine's converted network."""
