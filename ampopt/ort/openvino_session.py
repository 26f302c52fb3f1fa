"""Runs ONNX models with OpenVINO on the CPU. Nothing here needs PyTorch.

OpenVINO is imported with the first model, not with this module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ampopt.errors import InputError
from ampopt.ort.openvino_division import keep_divisions
from ampopt.ort.openvino_known import unknown_operator
from ampopt.ort.openvino_nan import keep_nan
from ampopt.ort.openvino_options import PRECISIONS, OpenVinoOptions
from ampopt.ort.options import SessionError
from ampopt.ort.session import Array, TensorInfo, check_array

_DTYPES = {
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "boolean": "bool",
    **{f"{kind[0]}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}


class OpenVinoRunner:
    """A compiled model. It takes NumPy arrays, and returns arrays that the caller owns.

    It may be called from several threads; each call in progress has a request of its own. OpenVINO reads an
    array where it is, and writes each output to memory that is new for each call.
    """

    def __init__(self, model: bytes | Path, options: OpenVinoOptions, *, repaired: bool = True) -> None:
        """Load an ONNX model of fixed sizes; from a path if its weights are in separate files.

        `repaired`: NaN is kept and divisions stay some, as in no session of OpenVINO's own.
        Raises SessionError if it does not load, loses NaN, or would compute in another precision.
        """
        self.options = options
        if (reason := why_not_precision(options.precision)) is not None:
            raise SessionError(reason)
        self._compiled, names = _compiled(model, options, repaired)
        ports = [*self._compiled.inputs, *self._compiled.outputs]
        infos = tuple(_info(port, name) for port, name in zip(ports, names, strict=True))
        count = len(self._compiled.inputs)
        self.inputs, self.outputs = infos[:count], infos[count:]
        self._new = [(tuple(info.fixed_shape), info.dtype) for info in self.outputs]
        self._idle: list[Any] = []

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """The outputs for these inputs, both in the model's order.

        Raises InputError if number, shape or dtype do not fit, SessionError if the run fails.
        """
        if len(arrays) != len(self.inputs):
            names = ", ".join(info.name for info in self.inputs)
            raise InputError(f"the model takes {len(self.inputs)} inputs ({names}), not {len(arrays)}")
        for info, array in zip(self.inputs, arrays, strict=True):
            check_array(info, array)
        return self.run([self.bound(np.require(array, requirements=["C", "W"])) for array in arrays])

    def bound(self, array: Array) -> Any:
        """An input for `run` that is read where this array is, which is contiguous and writeable."""
        return openvino().Tensor(array, shared_memory=True)

    def run(self, tensors: Sequence[Any]) -> tuple[Array, ...]:
        """Like a call, for inputs that `bound` made, without checks."""
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        arrays = tuple([np.empty(shape, dtype) for shape, dtype in self._new])
        try:
            for place, tensor in enumerate(tensors):
                request.set_input_tensor(place, tensor)
            for place, array in enumerate(arrays):
                request.set_output_tensor(place, self.bound(array))
            request.infer(share_outputs=True)
        except Exception as e:
            raise SessionError(f"OpenVINO failed to run the model with {self.options}: {e}") from e
        self._idle.append(request)
        return arrays


def openvino() -> Any:
    """The OpenVINO module. Raises SessionError if it is not installed."""
    try:
        return importlib.import_module("openvino")
    except ImportError as e:
        raise SessionError(f"OpenVINO cannot be imported ({e}): run  pip install openvino") from e


def openvino_version() -> str | None:
    """The installed version, without importing it; None if it is not installed."""
    if importlib.util.find_spec("openvino") is None:
        return None
    try:
        return importlib.metadata.version("openvino")
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not_precision(precision: str) -> str | None:
    """Why the processor does not compute in one of `PRECISIONS`; None if it does. Raises SessionError."""
    found = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    wanted = PRECISIONS[precision]
    return None if wanted in found else f"the processor does not compute in {wanted.lower()} by itself"


@functools.cache
def _core() -> Any:
    core = openvino().Core()
    if "CPU" not in core.available_devices:
        raise SessionError("this OpenVINO has no CPU device: run  pip install --force-reinstall openvino")
    return core


def first_unknown(model: bytes | Path, *, half: bool) -> str | None:
    """The first operator of an ONNX model that is not known, see `unknown_operator`. Raises SessionError."""
    try:
        return unknown_operator(_read(model), half=half)
    except SessionError:
        raise
    except Exception as e:
        raise SessionError(f"OpenVINO does not read the model: {e}") from e


def _read(model: bytes | Path) -> Any:
    return _core().read_model(model=model if isinstance(model, bytes) else str(model))


def _compiled(model: bytes | Path, options: OpenVinoOptions, repaired: bool) -> tuple[Any, list[str]]:
    """The compiled model, and the names of its inputs and outputs: compiled ones may have others, too."""
    core = _core()
    try:
        read = _read(model)
        names = [port.get_any_name() for port in (*read.inputs, *read.outputs)]
        if repaired:
            keep_nan(read)
            keep_divisions(read)
        compiled = core.compile_model(read, "CPU", options.native())
    except SessionError:
        raise
    except Exception as e:
        raise SessionError(f"OpenVINO does not load the model with {options}: {e}") from e
    taken = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if taken != options.precision:
        raise SessionError(f"OpenVINO would compute in {taken}, not {options.precision}")
    return compiled, names


def _info(port: Any, name: str) -> TensorInfo:
    kind = port.get_element_type().get_type_name()
    if kind not in _DTYPES:
        raise SessionError(f"{name!r} is a {kind}, which NumPy has no type for")
    sizes = tuple(size.get_length() if size.is_static else None for size in port.get_partial_shape())
    return TensorInfo(name, sizes, np.dtype(_DTYPES[kind]))
