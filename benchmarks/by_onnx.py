"""What a user would do with ONNX: a plain export, run by ONNX Runtime, OpenVINO or TensorRT."""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.ort.options import CPU, CUDA, SessionOptions
from ampopt.ort.session import OnnxRunner, onnxruntime, open_session
from ampopt.ort.tuning import tune
from ampopt.system.flags import older_flags_readable
from ampopt.system.quiet import quiet
from benchmarks.by_hand import Call
from benchmarks.ways import Border, Made, Ways, seconds_of

TUNING_S = 20.0
"""For the sweep of a session's options: a user who takes the trouble takes the time."""

SEARCHES = ("EXHAUSTIVE", "HEURISTIC")
"""DEFAULT takes the first algorithm that works, which has never been the fastest."""


def exported(model: nn.Module, inputs: tuple[Tensor, ...]) -> bytes:
    """A plain `torch.onnx.export` of the model as it is."""
    with tempfile.TemporaryDirectory() as folder, quiet(), older_flags_readable():
        path = Path(folder) / "model.onnx"
        torch.onnx.export(model, inputs, path, dynamo=True, verbose=False, external_data=False)
        return path.read_bytes()


def on_cpu(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """ONNX Runtime's CPU provider with its own defaults, and no more threads than the others have.

    It counts the machine's cores itself, those that this process may not use among them.
    """
    options = SessionOptions(CPU, threads=torch.get_num_threads(), spin_after_run=True)
    return _of_arrays(OnnxRunner(exported(model, inputs), options))


def on_cpu_tuned(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """ONNX Runtime's CPU provider with the best options that a sweep finds."""
    data = exported(model, inputs)
    found = tune(data, [tensor.numpy() for tensor in inputs], seconds=TUNING_S, providers=[CPU])
    return _of_arrays(OnnxRunner(data, found.best))


def _of_arrays(runner: OnnxRunner) -> Call:
    return lambda *tensors: [torch.from_numpy(a) for a in runner(*(t.numpy() for t in tensors))]


def openvino(model: nn.Module, inputs: tuple[Tensor, ...], _: Border) -> Ways:
    """OpenVINO on the CPU, float32 throughout, for latency, with each sensible number of threads.

    ImportError where it is not installed.
    """
    import openvino

    core = openvino.Core()
    network = core.read_model(exported(model, inputs))

    def make(own: dict[str, Any]) -> Made:
        hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", **own}
        request = core.compile_model(network, "CPU", hints).create_infer_request()

        def call(*tensors: Tensor) -> Sequence[Tensor]:
            found = request.infer([tensor.numpy() for tensor in tensors])
            return [torch.from_numpy(array) for array in found.to_tuple()]

        return Made(call, inputs)

    most = torch.get_num_threads()
    counts = sorted({most, max(1, most // 2)})
    ways: dict[str, dict[str, Any]] = {"its own threads": {}} if most == _cores() else {}
    for threads, pinned in itertools.product(counts, (True, False)):
        name = f"{threads} threads{', pinned' if pinned else ''}"
        ways[name] = {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": pinned}
    return {name: functools.partial(make, own) for name, own in ways.items()}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def on_cuda(model: nn.Module, inputs: tuple[Tensor, ...], border: Border) -> Ways:
    """ONNX Runtime's CUDA provider, tensors staying on the GPU, with its best options; TF32 is off."""
    options = [
        {"cudnn_conv_algo_search": search, "prefer_nhwc": nhwc, "enable_cuda_graph": graph}
        for graph, search, nhwc in itertools.product(("1", "0"), SEARCHES, ("1", "0"))
    ]
    if border.dtype is torch.float32:
        options = [{**native, "use_tf32": "0"} for native in options]  # in float16 it turns Tensor Cores off
    given = border.given(inputs)
    return {"": lambda: _fastest(border.model(model), given, CUDA, options)}


def tensorrt(model: nn.Module, inputs: tuple[Tensor, ...], border: Border) -> Ways:
    """ONNX Runtime's TensorRT provider. SessionError where TensorRT is not installed."""
    given, options = border.given(inputs), [{"trt_cuda_graph_enable": "True"}, {}]
    return {"": lambda: _fastest(border.model(model), given, "TensorrtExecutionProvider", options)}


def _fastest(
    model: nn.Module, inputs: tuple[Tensor, ...], provider: str, options: Sequence[dict[str, str]]
) -> Made:
    """The fastest of the sessions that load; RuntimeError with the last reason where none does.

    SessionError where the provider itself does not load.
    Those without a CUDA graph are tried only where none with one loads: they launch one by one.
    """
    open_session(_nothing(), _settings(), SessionOptions(provider))  # it may not load: an export takes longer
    data = exported(model, inputs)
    best: tuple[float, Made] | None = None
    reason: Exception | None = None
    for native in options:
        if best is not None and native.get("enable_cuda_graph") == "0":
            break
        try:
            call = _Bound(data, provider, native, inputs)
            seconds = seconds_of(functools.partial(call, *inputs), torch.cuda.synchronize)
        except Exception as failure:  # ONNX Runtime raises whatever its providers do
            reason = failure
            continue
        if best is None or seconds < best[0]:
            best = seconds, Made(call, inputs, ", ".join(f"{key}={value}" for key, value in native.items()))
    if best is None:
        raise RuntimeError(f"no session of {provider} loads and runs: {reason}")
    return best[1]


def _nothing() -> bytes:
    """A model that gives back the number that it gets."""
    import onnx

    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "nothing", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return bytes(model.SerializeToString())


def _settings() -> Any:
    settings = onnxruntime().SessionOptions()
    settings.log_severity_level = 4
    # The CPU provider's threads would spin on every core for 50 ms after a run, while others are timed.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    return settings


class _Bound:
    """A session on a GPU whose inputs and outputs are torch tensors that stay in their place.

    The next call overwrites the results.
    """

    def __init__(
        self, data: bytes, provider: str, native: dict[str, str], inputs: tuple[Tensor, ...]
    ) -> None:
        self._session = open_session(data, _settings(), SessionOptions(provider, native))
        self._inputs = [tensor.clone().contiguous() for tensor in inputs]
        self._outputs = [
            torch.empty(info.shape, dtype=_dtype(info.type), device=inputs[0].device)
            for info in self._session.get_outputs()
        ]
        self._binding = self._session.io_binding()
        for bind, infos, tensors in (
            (self._binding.bind_input, self._session.get_inputs(), self._inputs),
            (self._binding.bind_output, self._session.get_outputs(), self._outputs),
        ):
            for info, tensor in zip(infos, tensors, strict=True):
                kind = torch.empty(0, dtype=tensor.dtype).numpy().dtype
                bind(info.name, "cuda", tensor.device.index or 0, kind, list(tensor.shape), tensor.data_ptr())

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        for buffer, tensor in zip(self._inputs, tensors, strict=True):
            buffer.copy_(tensor)
        torch.cuda.current_stream().synchronize()  # the session has a stream of its own
        self._session.run_with_iobinding(self._binding)
        return self._outputs


def _dtype(name: str) -> torch.dtype:
    named = {"float": torch.float32, "float16": torch.float16, "double": torch.float64, "int64": torch.int64}
    return named[name.removeprefix("tensor(").removesuffix(")")]
