"""Runs a bundle's ONNX model with the manifest's inputs and outputs, and its self-test. No PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from ampopt.bundle.files import BundleFiles
from ampopt.bundle.of_one_process import OfOneProcess
from ampopt.bundle.stored_sizes import StoredSizes, in_corner, read_sizes
from ampopt.bundle.stored_state import read_state
from ampopt.errors import BundleError, InputError
from ampopt.ir.size_range import ranges_of, why_outside
from ampopt.ort.openvino_options import OpenVinoOptions
from ampopt.ort.openvino_session import OpenVinoRunner
from ampopt.ort.session import (
    Array,
    OnnxRunner,
    SessionError,
    TensorInfo,
    check_array,
    relative_error,
)

SELF_TEST = "self_test.safetensors"


class RobotModel(OfOneProcess):
    """A bundle's model, ready to be called; its self-test has passed.

    `inputs` and `outputs` are in the manifest's order. `options` are those of the session; `notes` say where
    they differ from the bundle's, and why. `sizes` has the range of each size that may vary, by its name.
    `example` has the inputs of the self-test, and `error` is the largest relative error of its outputs.

    A state that the model keeps is none of its `inputs` and `outputs`: each call takes it and leaves the next
    one, one call at a time; see `reset_state`.
    """

    def __init__(self, files: BundleFiles, runner: OnnxRunner | OpenVinoRunner, notes: Sequence[str]) -> None:
        """Run the self-test. Raises BundleError if the model does not fit the manifest."""
        self.manifest, self.options, self.notes = files.manifest, runner.options, tuple(notes)
        self._stored = stored = read_sizes(files.manifest)
        self.sizes = {each.name: (each.low, each.high) for each in ranges_of(stored.sizes)}
        own_inputs = _border(runner.inputs, files.manifest["inputs"], "inputs")
        self._taken = _inputs(own_inputs, stored, files.manifest)
        self._given = _border(runner.outputs, files.manifest["outputs"], "outputs")
        state = read_state(files.manifest)
        self._next = dict(zip(state.inputs, state.outputs, strict=True))
        self.inputs = self._taken[: len(self._taken) - len(state)]
        self.outputs = self._given[: len(self._given) - len(state)]
        self._runner, self._lock = runner, threading.RLock()
        example = self_test_tensors(files, "input", self._taken)
        self.example = {info.name: example[info.name] for info in self.inputs}
        self._initial = {name: example[name] for name in state.inputs}
        self._state = dict(self._initial)
        self.error = self._self_test(example, self_test_tensors(files, "output", self._given), "")
        for number, corner in enumerate(stored.corners):
            given = self_test_tensors(files, in_corner(number, "input"), self._taken)
            outputs = self_test_tensors(files, in_corner(number, "output"), self._given)
            place = " at " + ", ".join(f"{name} {size}" for name, size in corner.items())
            _check_corner(corner, stored, given, self._taken, place)
            self.error = max(self.error, self._self_test(given, outputs, place))

    def __call__(self, /, *arrays: Array, **named: Array) -> Array | dict[str, Array]:
        """Run the model on arrays in the order of `inputs`, or by name.

        Returns the output, or a dict by name where there are several. Raises InputError where an array is
        missing, unknown, given twice, or not of the input's dtype and shape; SessionError where the run
        fails; the state is then what it was.
        """
        bound = self._bound(arrays, named, self.inputs)
        if not self._next:
            outputs = self._run(bound)
        else:
            with self._lock:
                outputs = self._run({**bound, **self._state})
                self._state = {name: outputs.pop(given).copy() for name, given in self._next.items()}
        return outputs[self.outputs[0].name] if len(self.outputs) == 1 else outputs

    def reset_state(self) -> None:
        """Reset the state to what it was when the model was optimized; a model without one has nothing to."""
        with self._lock:
            self._state = dict(self._initial)

    def step(self, *arrays: Array) -> tuple[Array, ...]:
        """One run on all inputs in the manifest's order, the state's last, to all outputs. The state stays.

        Raises InputError and SessionError as a call.
        """
        outputs = self._run(self._bound(arrays, {}, self._taken))
        return tuple(outputs[info.name] for info in self._given)

    @property
    def engine(self) -> str:
        """What runs the model: "onnxruntime" or "openvino"."""
        return "openvino" if isinstance(self.options, OpenVinoOptions) else "onnxruntime"

    @property
    def expected(self) -> Mapping[str, Any]:
        """The latency of this engine on the machine that the bundle was made on, as the manifest has it."""
        onnx: Mapping[str, Any] = self.manifest["onnx"]
        timed: Mapping[str, Any] = onnx.get(self.engine, onnx)["latency"]
        return timed

    def _bound(
        self, arrays: Sequence[Array], named: Mapping[str, Array], border: Sequence[TensorInfo]
    ) -> dict[str, Array]:
        names = [info.name for info in border]
        if len(arrays) > len(names):
            raise InputError(f"the model takes {len(names)} inputs ({', '.join(names)}), not {len(arrays)}")
        bound = dict(zip(names, arrays, strict=False))
        for name, array in named.items():
            if name in bound or name not in names:
                reason = "is given twice" if name in bound else f"is none of {', '.join(names)}"
                raise InputError(f"input {name!r} {reason}")
            bound[name] = array
        if missing := [name for name in names if name not in bound]:
            raise InputError(f"input {missing[0]!r} is missing")
        for info in border:
            check_array(info, bound[info.name])
        shapes = [bound[name].shape for name in names]
        if self._stored and (outside := why_outside(self._stored.sizes, names, shapes)):
            raise InputError(f"this bundle was made for other sizes: {outside}")
        return bound

    def _run(self, bound: Mapping[str, Array]) -> dict[str, Array]:
        feeds = [bound[info.name].astype(info.dtype, copy=False) for info in self._runner.inputs]
        found = dict(zip((info.name for info in self._runner.outputs), self._runner(*feeds), strict=True))
        return {info.name: found[info.name].astype(info.dtype, copy=False) for info in self._given}

    def _self_test(self, inputs: Mapping[str, Array], expected: Mapping[str, Array], place: str) -> float:
        """The largest error of two runs: the first may capture a CUDA graph that the second one replays."""
        tolerance, largest = self.manifest["tolerance"], 0.0
        for _ in range(2):
            try:
                outputs = self._run(self._bound((), inputs, self._taken))
            except (InputError, SessionError) as e:
                raise BundleError(f"the bundle's self-test{place} does not run: {e}") from e
            for name, output in outputs.items():
                error = relative_error(output, expected[name])
                if not error <= tolerance:
                    raise BundleError(
                        f"the bundle's self-test{place} fails with {self.options}: output {name!r} has a "
                        f"relative error of {error:.3g}, and the manifest allows {tolerance:.3g}"
                    )
                largest = max(largest, error)
        return largest


def self_test_tensors(files: BundleFiles, kind: str, border: Sequence[TensorInfo]) -> dict[str, Array]:
    """The self-test's inputs (`kind` is `input`) or outputs by name. Raises BundleError if one is missing."""
    try:
        tensors = safetensors.numpy.load(files.read(SELF_TEST))
    except (SafetensorError, KeyError, ValueError) as e:  # KeyError: a dtype that NumPy does not have
        raise BundleError(f"{SELF_TEST} of the bundle cannot be read without PyTorch: {e!r}") from e
    if missing := [info.name for info in border if f"{kind}.{info.name}" not in tensors]:
        raise BundleError(f"{SELF_TEST} of the bundle has no {kind}.{missing[0]}")
    return {info.name: np.array(tensors[f"{kind}.{info.name}"]) for info in border}


def _check_corner(
    corner: Mapping[str, int],
    stored: StoredSizes,
    inputs: Mapping[str, Array],
    border: Sequence[TensorInfo],
    place: str,
) -> None:
    """Raise BundleError where a corner's inputs are not of its sizes."""
    for info, named in zip(border, stored.sizes, strict=True):
        shape = inputs[info.name].shape
        wanted = {index: corner[each.name] for index, each in named.items()}
        if len(shape) != len(info.shape) or any(shape[index] != size for index, size in wanted.items()):
            raise BundleError(
                f"{SELF_TEST} of the bundle{place}: input {info.name!r} has shape {list(shape)}"
            )


def _inputs(
    border: tuple[TensorInfo, ...], stored: StoredSizes, manifest: Mapping[str, Any]
) -> tuple[TensorInfo, ...]:
    """The inputs with the names of ranges in the place of sizes that vary, and with no other such places.

    Raises BundleError where the ONNX model fixes a size that has a range.
    """
    if not stored:
        return border
    found = []
    for info, entry, named in zip(border, manifest["inputs"], stored.sizes, strict=True):
        for index, each in named.items():
            if each.low < each.high and isinstance(info.shape[index], int):
                raise BundleError(
                    f"{info.name!r} has shape {info.shape} in the ONNX model, and the manifest says that its "
                    f"dimension {index} is {each}"
                )
        sizes = (named[i].name if i in named else size for i, size in enumerate(entry["shape"]))
        found.append(TensorInfo(info.name, tuple(sizes), info.dtype))
    return tuple(found)


def _border(
    found: Sequence[TensorInfo], listed: Sequence[Mapping[str, Any]], kind: str
) -> tuple[TensorInfo, ...]:
    """The manifest's inputs or outputs, checked against the ONNX model's. Raises BundleError.

    Floating-point tensors may have another precision inside the model; they are converted at its border. A
    dtype that NumPy does not have, such as bfloat16, is the ONNX model's.
    """
    infos = {info.name: info for info in found}
    names = [entry["name"] for entry in listed]
    if set(infos) != set(names):
        raise BundleError(
            f"the ONNX model has {kind} {', '.join(infos)}, and the manifest says {', '.join(names)}"
        )
    return tuple(_agreed(infos[entry["name"]], entry) for entry in listed)


def _agreed(info: TensorInfo, entry: Mapping[str, Any]) -> TensorInfo:
    dtype = np.dtype(entry["dtype"]) if hasattr(np, entry["dtype"]) else info.dtype
    floating = np.issubdtype(dtype, np.floating) and np.issubdtype(info.dtype, np.floating)
    same_shape = len(info.shape) == len(entry["shape"]) and all(
        have == want for have, want in zip(info.shape, entry["shape"], strict=True) if isinstance(have, int)
    )
    if not same_shape or not (floating or dtype == info.dtype):
        raise BundleError(
            f"{info.name!r} has {info.dtype} and shape {info.shape} in the ONNX model, and the manifest says"
            f" {entry['dtype']} and {tuple(entry['shape'])}"
        )
    return TensorInfo(info.name, info.shape, dtype)
