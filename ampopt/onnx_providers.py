"""ONNX Runtime sessions: one for each provider that is installed, and where each of its nodes ran."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampopt.errors import MissingExtraError

CPU, CUDA, OPENVINO = "CPUExecutionProvider", "CUDAExecutionProvider", "OpenVINOExecutionProvider"

_OPTIONS: dict[str, dict[str, str]] = {
    CPU: {},
    # strict float32, as the verification's limits are; and no search over algorithms that are used once
    CUDA: {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"},
    OPENVINO: {},
}


def need(package: str) -> Any:
    """An optional package of the `onnx` extra. Raises MissingExtraError where it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(package, "onnx") from error


def providers() -> tuple[str, ...]:
    """The providers that this installation of ONNX Runtime offers, of those that ampopt verifies on."""
    available = need("onnxruntime").get_available_providers()
    return tuple(name for name in _OPTIONS if name in available)


class Session:
    """An ONNX file on one provider (what that cannot run, on the CPU), called with flat torch tensors."""

    def __init__(self, path: Path, provider: str) -> None:
        runtime = need("onnxruntime")
        self.provider = provider
        self._directory = tempfile.TemporaryDirectory(prefix="ampopt-profile-")
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        options.enable_profiling = provider == CUDA
        options.profile_file_prefix = os.path.join(self._directory.name, "profile")
        wanted: list[Any] = [(provider, _OPTIONS[provider])]
        if provider != CPU:
            wanted.append((CPU, {}))
        self._session = runtime.InferenceSession(str(path), options, providers=wanted)

    @property
    def is_on_provider(self) -> bool:
        """Whether the provider came up; ONNX Runtime goes on without one whose libraries are missing."""
        return self.provider in self._session.get_providers()

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Run the model on tensors of any device; floating-point inputs are rounded to what it takes."""
        feeds = {}
        for taken, tensor in zip(self._session.get_inputs(), tensors, strict=True):
            as_taken = tensor.half() if taken.type == "tensor(float16)" else tensor
            feeds[taken.name] = as_taken.detach().cpu().numpy()
        return [torch.from_numpy(array) for array in self._session.run(None, feeds)]

    def nodes_elsewhere(self) -> tuple[str, ...]:
        """The nodes that ran on another provider than CUDA, as `name (operator)`; ends the profile."""
        events = json.loads(Path(self._session.end_profiling()).read_text(encoding="utf-8"))
        return nodes_off(events, self.provider)

    def close(self) -> None:
        """Free the session and remove its profile."""
        del self._session
        self._directory.cleanup()


def nodes_off(events: Sequence[dict[str, Any]], provider: str) -> tuple[str, ...]:
    """The nodes in ONNX Runtime's profile whose kernels belong to another provider than `provider`."""
    found: dict[str, None] = {}
    for event in events:
        facts = event.get("args", {})
        if event.get("cat") == "Node" and facts.get("provider", provider) != provider:
            name = str(event["name"]).removesuffix("_kernel_time")
            found[f"{name} ({facts.get('op_name', 'unknown operator')})"] = None
    return tuple(found)


@contextlib.contextmanager
def session(path: Path, provider: str) -> Iterator[Session]:
    """A `Session` for a `with` block."""
    opened = Session(path, provider)
    try:
        yield opened
    finally:
        opened.close()
