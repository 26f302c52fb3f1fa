"""An ONNX Runtime session with options as data, a checked provider, and optionally fixed buffers.

Nothing here needs PyTorch. ONNX Runtime is imported with the first session, not with this module.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import math
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ampopt.errors import InputError
from ampopt.ort.knobs import cores_to_pin
from ampopt.ort.options import CPU, CUDA, LEVELS, SessionError, SessionOptions
from ampopt.system.pinned import HostCopies, cuda_runtime
from ampopt.system.quiet import quiet

Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "Array",
    "FixedBuffers",
    "Node",
    "OnnxRunner",
    "SessionError",
    "SessionOptions",
    "TensorInfo",
    "check_array",
    "native_options",
    "onnxruntime",
    "open_session",
    "relative_error",
]

_DTYPES: dict[str, str] = {
    "tensor(float16)": "float16",
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    **{f"tensor({kind}{bits})": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}


class Node(NamedTuple):
    """A node of the model as stored in its file."""

    name: str
    op: str


class TensorInfo(NamedTuple):
    """An input or output; a dynamic dimension is a name or None."""

    name: str
    shape: tuple[int | str | None, ...]
    dtype: np.dtype[Any]

    @property
    def fixed_shape(self) -> list[int]:
        """The shape as numbers. Raises SessionError if a dimension is dynamic."""
        sizes = [size for size in self.shape if isinstance(size, int)]
        if len(sizes) < len(self.shape):
            raise SessionError(f"fixed buffers need fixed sizes, and {self.name!r} has shape {self.shape}")
        return sizes


class OnnxRunner:
    """A model loaded with ONNX Runtime. It takes NumPy arrays, and returns arrays that the caller owns.

    With fixed buffers, calls from several threads wait for each other; ONNX Runtime captures a separate CUDA
    graph in each calling thread.
    """

    def __init__(self, model: bytes | Path, options: SessionOptions, *, library: Path | None = None) -> None:
        """Load a model; from a path if its weights are in separate files.

        `library`: a library of custom operators. Raises SessionError if the model does not load, or loads
        without the requested provider: ONNX Runtime by itself would silently use the CPU.
        """
        self.options = options
        self._session = open_session(model, native_options(options, library), options)
        self.inputs = tuple(_info(argument) for argument in self._session.get_inputs())
        self.outputs = tuple(_info(argument) for argument in self._session.get_outputs())
        self._names = [info.name for info in self.outputs]
        self.nodes = _nodes(self._session)
        self._buffers = (
            FixedBuffers(self._session, self.inputs, self.outputs, options) if options.io_binding else None
        )

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """The outputs for these inputs, both in the model's order.

        Raises InputError if number, shape or dtype do not fit, SessionError if the run fails.
        """
        self._check(arrays)
        if self._buffers is None:
            return tuple(self.run({info.name: a for info, a in zip(self.inputs, arrays, strict=True)}))
        try:
            return self._buffers.run(arrays)
        except Exception as e:
            raise self._failure(e) from e

    def run(self, feeds: dict[str, Array]) -> Sequence[Array]:
        """Like a call, for arrays by input name, without checks and without fixed buffers."""
        try:
            outputs: Sequence[Array] = self._session.run(self._names, feeds)
        except Exception as e:
            raise self._failure(e) from e
        return outputs

    def _failure(self, error: Exception) -> SessionError:
        return SessionError(f"ONNX Runtime failed to run the model with {self.options}: {error}")

    def _check(self, arrays: Sequence[Array]) -> None:
        if len(arrays) != len(self.inputs):
            names = ", ".join(info.name for info in self.inputs)
            raise InputError(f"the model takes {len(self.inputs)} inputs ({names}), not {len(arrays)}")
        for info, array in zip(self.inputs, arrays, strict=True):
            check_array(info, array)


def check_array(info: TensorInfo, array: object) -> None:
    """Raise InputError if an argument is not an array of the input's dtype and shape."""
    if not isinstance(array, np.ndarray):
        raise InputError(f"input {info.name!r} takes a NumPy array, not {type(array).__name__}")
    if isinstance(array, np.ma.MaskedArray):
        raise InputError(
            f"input {info.name!r} takes no mask, and what one hides would be read: give .filled(number)"
        )
    if array.dtype != info.dtype:
        raise InputError(
            f"input {info.name!r} takes {info.dtype}, not {array.dtype}: convert it with .astype()"
        )
    fits = len(array.shape) == len(info.shape) and all(
        have == want for have, want in zip(array.shape, info.shape, strict=True) if isinstance(want, int)
    )
    if not fits:
        raise InputError(f"input {info.name!r} takes shape {info.shape}, not {array.shape}")


class FixedBuffers:
    """Inputs and outputs bound once to buffers on the provider's device; a call copies, runs, copies back.

    Outputs arrive in page-locked memory if the CUDA runtime is found, see `pinned`.
    """

    def __init__(
        self,
        session: Any,
        inputs: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
        options: SessionOptions,
    ) -> None:
        """Allocate and bind buffers.

        Raises SessionError if a size is not fixed or the device lacks memory.
        """
        place = (
            "cuda" if options.provider == CUDA else "cpu",
            int(options.provider_options.get("device_id", 0)),
        )
        value = onnxruntime().OrtValue.ortvalue_from_shape_and_type
        shapes = {info: info.fixed_shape for info in (*inputs, *outputs)}
        try:
            self._inputs = [value(shapes[info], info.dtype, *place) for info in inputs]
            self._outputs = [value(shapes[info], info.dtype, *place) for info in outputs]
            self._binding = session.io_binding()
            for info, buffer in zip(inputs, self._inputs, strict=True):
                self._binding.bind_ortvalue_input(info.name, buffer)
            for info, buffer in zip(outputs, self._outputs, strict=True):
                self._binding.bind_ortvalue_output(info.name, buffer)
        except Exception as e:
            raise SessionError(
                f"cannot bind the model's inputs and outputs to memory on {place[0]}: {e}"
            ) from e
        self._session = session
        self._lock = threading.Lock()
        runtime = cuda_runtime() if options.provider == CUDA else None
        self._copies = runtime and [HostCopies(runtime, tuple(shapes[i]), i.dtype) for i in outputs]

    def run(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Run once. The outputs are copies, because the next run overwrites the buffers."""
        with self._lock:
            for buffer, array in zip(self._inputs, arrays, strict=True):
                buffer.update_inplace(np.ascontiguousarray(array))  # older versions copy memory, not values
            self._binding.synchronize_inputs()  # the provider's own stream does not wait for these copies
            self._session.run_with_iobinding(self._binding)
            self._binding.synchronize_outputs()
            if self._copies:
                pairs = zip(self._copies, self._outputs, strict=True)
                return tuple(copies.copy(buffer.data_ptr()) for copies, buffer in pairs)
            return tuple(np.array(buffer.numpy()) for buffer in self._outputs)


def onnxruntime() -> Any:
    """The ONNX Runtime module. Raises SessionError if it is not installed."""
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as e:
        raise SessionError(
            f"ONNX Runtime cannot be imported ({e}): run  pip install onnxruntime  or, for an NVIDIA GPU,"
            "  pip install onnxruntime-gpu  and never both"
        ) from e


def open_session(model: bytes | Path, native: Any, options: SessionOptions) -> Any:
    """Open ONNX Runtime's session of a model with `native_options`, on the options' provider only.

    Raises SessionError if it fails.
    """
    ort = onnxruntime()
    available = ort.get_available_providers()
    if options.provider not in available:
        raise SessionError(
            f"this onnxruntime {ort.__version__} has no {options.provider}, only {', '.join(available)}"
            + (": run  pip install onnxruntime-gpu  in its place" if options.provider == CUDA else "")
        )
    if options.provider == CUDA and (reason := _why_no_driver()) is not None:
        raise SessionError(f"{CUDA} needs an NVIDIA GPU with its driver, which cannot be loaded: {reason}")
    said = _preload(ort) if options.provider == CUDA else ""
    providers: list[Any] = [(options.provider, dict(options.provider_options))]
    if options.provider != CPU:
        providers.append(CPU)
    source = model if isinstance(model, bytes) else str(model)
    try:
        session = ort.InferenceSession(source, native, providers=providers, enable_fallback=0)
    except Exception as e:
        raise SessionError(
            f"ONNX Runtime {ort.__version__} does not load the model with {options}: {e}"
        ) from e
    vars(session)["_model_bytes"] = None  # which it keeps, to be made anew for other providers
    if options.provider not in (found := session.get_providers()):
        raise SessionError(
            f"{options.provider} did not load, and ONNX Runtime would run the model on {', '.join(found)}."
            f" It needs a GPU with its driver and the libraries that its log names on stderr. {said}".rstrip()
        )
    return session


def _why_no_driver() -> str | None:
    """Why there is no NVIDIA driver; ONNX Runtime would write that, and more, to stderr in red."""
    if sys.platform != "linux":
        return None
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return None


def _preload(ort: Any) -> str:
    """Load CUDA and cuDNN from NVIDIA's wheels, which also torch uses; returns what was said of failures."""
    if not hasattr(ort, "preload_dlls"):
        return ""
    with quiet(said := io.StringIO()):  # others write to the standard output meanwhile
        ort.preload_dlls()
    return " ".join(said.getvalue().split())


_STOPS = ("session.force_spinning_stop", "1")
_LINGERS, _LINGERS_SINCE = ("session.intra_op.spin_duration_us", "1000"), (1, 26)
"""The two choices: threads rest at once after a run, or a millisecond later, for a call that follows soon."""


def _pinned_to(cores: Sequence[int]) -> tuple[str, str]:
    """The entry that keeps each thread but the caller's on one of the cores, which it counts from 1."""
    return "session.intra_op_thread_affinities", ";".join(str(core + 1) for core in cores)


def _version(ort: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in ort.__version__.split(".")[:2])


def native_options(options: SessionOptions, library: Path | None = None) -> Any:
    """ONNX Runtime's options object for our options, with a library of operators. Raises SessionError."""
    ort = onnxruntime()
    level = getattr(ort.GraphOptimizationLevel, LEVELS[options.optimization], None)
    if level is None:
        raise SessionError(f"onnxruntime {ort.__version__} has no optimization {options.optimization!r}")
    native = ort.SessionOptions()
    native.log_severity_level = 4  # what fails is raised; its log would write the same to stderr, in red
    native.graph_optimization_level = level
    native.execution_mode = getattr(
        ort.ExecutionMode, "ORT_PARALLEL" if options.parallel else "ORT_SEQUENTIAL"
    )
    native.intra_op_num_threads = options.threads or 0
    native.add_session_config_entry("session.intra_op.allow_spinning", str(int(options.spinning)))
    if not options.spin_after_run:
        entry = _LINGERS if _version(ort) >= _LINGERS_SINCE else _STOPS
        native.add_session_config_entry(*entry)
    if options.pinned and (cores := cores_to_pin(options)):
        native.intra_op_num_threads = 1 + len(cores)
        native.add_session_config_entry(*_pinned_to(cores))
    native.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if library is not None:
        if _version(ort) < _LIBRARIES_SINCE:
            raise SessionError(f"onnxruntime {ort.__version__} cannot run our operators in parallel")
        native.register_custom_ops_library(str(library))
    return native


_LIBRARIES_SINCE = (1, 17)


def _info(argument: Any) -> TensorInfo:
    if argument.type not in _DTYPES:
        raise SessionError(f"{argument.name!r} is a {argument.type}, which NumPy has no type for")
    return TensorInfo(argument.name, tuple(argument.shape), np.dtype(_DTYPES[argument.type]))


def _nodes(session: Any) -> dict[str, tuple[Node, ...]] | None:
    """The nodes of the file by the provider that runs them; None where ONNX Runtime is older than 1.24."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    found: dict[str, list[Node]] = {}
    for part in session.get_provider_graph_assignment_info():
        found.setdefault(part.ep_name, []).extend(Node(n.name, n.op_type) for n in part.get_nodes())
    return {provider: tuple(nodes) for provider, nodes in found.items()}


def relative_error(actual: Array, reference: Array) -> float:
    """‖actual − reference‖ / ‖reference‖ in float64; for integers and booleans, the share that differs.

    Infinite if shapes differ, or if NaN or infinity is in one array and not at the same position in the
    other.
    """
    if actual.shape != reference.shape:
        return math.inf
    if not np.issubdtype(reference.dtype, np.floating):
        return float(np.mean(actual != reference)) if reference.size else 0.0
    a, r = actual.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(r)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(
        a[~finite], r[~finite], equal_nan=True
    ):
        return math.inf
    difference, norm = np.linalg.norm(a[finite] - r[finite]), np.linalg.norm(r[finite])
    return float(difference / norm) if norm > 0 else float(difference)
