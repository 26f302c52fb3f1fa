"""`LoadedModel`: a bundle's model with the original's call signature, and the self-test that it passes."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampopt.bundle.files import BundleFiles
from ampopt.bundle.of_one_process import OfOneProcess
from ampopt.deploy.failed_calls import FailedCalls
from ampopt.deploy.health import Callback, Event, Health, Monitor
from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import BundleError, InputError
from ampopt.ir.capture import Captured
from ampopt.ir.keywords import in_order
from ampopt.ir.normal_form import is_normal, normal_form
from ampopt.ir.numerics import relative_error
from ampopt.ir.plain_tensors import check_plain, without_derivatives
from ampopt.ir.signature import describe, flatten_call, flatten_outputs, shown, shown_all, tensors_of
from ampopt.ir.size_range import ranges_of, why_outside

MOST_OF_STRUCTURE = 300
"""Characters of a call's structure that a message shows."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run the model, and how many threads of the processor it takes.

    `original`: the captured model, which is asked where `call` fails; None: `call` asks it itself, or is it.
    """

    call: Callable[..., Any]
    threads: int
    original: Callable[..., Any] | None = None


class LoadedModel(OfOneProcess):
    """A loaded bundle's model with the original's call signature; its self-test has passed.

    `backend` is the name of what runs it: "ampopt" (the bundle's program), "onnxruntime", "openvino", or
    "original" (the captured model without any pass), with `threads` CPU threads. `notes` list differences
    from the machine that the bundle was made on, and why a backend is not used; `choice` holds the
    measurements of "auto" for each backend. Calls must have the shapes, dtypes and other arguments that the
    bundle was made for, or sizes in its ranges, see `sizes`; `health` counts calls that were refused, and
    those in which the backend failed, so that the captured model was asked: its error is raised. No
    backend has derivatives: a call under a transform, or the gradient of a result, raises InputError.

    A state that the model keeps goes from call to call, one at a time; see `reset_state`.
    """

    def __init__(
        self,
        files: BundleFiles,
        captured: Captured,
        way: Way,
        backend: str,
        initial: Sequence[Tensor] = (),
    ) -> None:
        """`initial`: the state before the first call. `way` then takes and gives it, see `with_state`."""
        self.manifest, self.backend, self.threads = files.manifest, backend, way.threads
        self.notes: list[str] = []
        self.choice: dict[str, str] = {}
        self.captured = captured
        self._call, self._original = way.call, way.original
        self._failed = FailedCalls(captured.program.device)
        call = way.call
        inner = call.health.chose_original if isinstance(call, OptimizedModule) else backend == "original"
        self._monitor = Monitor(chose_original=inner)
        self._initial, self._state = tuple(initial), tuple(initial)
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The original's result for the original's arguments.

        Raises InputError for calls of another signature.
        """
        kwargs = in_order(kwargs, self.captured.by_name)
        leaves, spec = flatten_call(args, kwargs)
        if spec != self.captured.spec:
            args, kwargs = _in_classes_of(self.captured.spec, (args, kwargs))
            leaves, spec = flatten_call(args, kwargs)
        try:
            check_plain(tensors_of(leaves))
            if reason := self._why_not(leaves, spec):
                raise InputError(f"this bundle was made for other calls: {reason}")
        except InputError as error:
            self._monitor.note(Event("refusal", str(error), "a call of another kind"))
            raise
        with torch.no_grad():
            result, failure = self._answer(args, kwargs)
        if failure is not None:
            call = shown_all(tensors_of(leaves))
            self._monitor.note(Event("original", failure, call))
            self._failed.tell(call, failure)
        return without_derivatives(result, leaves)

    def _answer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, str | None]:
        """The result of a call, and what the backend failed with if the captured model has given it.

        The state that the call leaves is the next one's.
        """
        if not self._initial:
            (result, _), failure = self._step_or_original(args, kwargs)
            return result, failure
        with self._lock:
            (result, left), failure = self._step_or_original(args, kwargs)
            with torch.inference_mode(mode=False), torch.no_grad():
                self._state = tuple(tensor.clone() for tensor in left)
        return result, failure

    def _step_or_original(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, Sequence[Tensor]], str | None]:
        try:
            return self.step(self._state, args, kwargs), None
        except Exception as error:
            if self._original is None:
                raise
            failure = self._failed.reason(error)
            if failure is None:
                raise
        return self._step(self._original, self._state, args, kwargs), failure

    def reset_state(self) -> None:
        """Reset the state to what it was when the model was optimized; a model without one has nothing to."""
        with self._lock:
            self._state = self._initial

    def step(
        self, state: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Sequence[Tensor]]:
        """The backend's result of a call from a state, and the next state. The state that is served stays."""
        return self._step(self._call, state, args, kwargs)

    def _step(
        self,
        call: Callable[..., Any],
        state: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, Sequence[Tensor]]:
        if not self._initial:
            return call(*args, **kwargs), ()
        result, left = call(args, dict(kwargs), list(state))
        return result, left

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The range of each size that may vary, by its name; empty: calls have the example's sizes."""
        return {each.name: (each.low, each.high) for each in ranges_of(self.captured.program.sizes)}

    @property
    def health(self) -> Health:
        """Counts of how calls were answered so far; see `ampopt.deploy.health.Health`."""
        own = self._monitor.health()
        if not isinstance(self._call, OptimizedModule):
            return own
        return dataclasses.replace(own + self._call.health, chose_original=own.chose_original)

    def on_health(self, callback: Callback) -> Callable[[], None]:
        """`OptimizedModule.on_health` for a loaded model."""
        stops = [self._monitor.tell(callback)]
        if isinstance(self._call, OptimizedModule):
            stops.append(self._call.on_health(callback))

        def stop() -> None:
            for each in stops:
                each()

        return stop

    def _why_not(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> str | None:
        own = self.captured
        if (is_other := spec != own.spec) and normal_form(leaves, spec)[1] != own.spec:
            why = _why_no_tensor(own.leaves, own.spec, leaves, spec)
            return why or f"it takes {_told(own.spec)}, and these are {_told(spec)}"
        if own.all_differ and (is_other or not is_normal(leaves, spec)):
            return "it takes nothing twice: its results depend on which of its arguments are the same"
        for mine, theirs in zip(self._fitting(leaves), leaves, strict=True):
            if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
                if (mine.shape, mine.dtype, mine.device) != (theirs.shape, theirs.dtype, theirs.device):
                    return f"it takes {describe(mine)}, not {describe(theirs)}"
            elif type(mine) is not type(theirs) or mine != theirs:
                return f"it takes {shown(mine)}, not {shown(theirs)}{_advice(mine, theirs)}"
        return self._why_outside(leaves)

    def _fitting(self, leaves: Sequence[Any]) -> list[Any]:
        """The example's leaves, with the call's sizes where a range says that they may vary."""
        sizes = iter(self.captured.program.sizes)
        found: list[Any] = []
        for mine, theirs in zip(self.captured.leaves, leaves, strict=True):
            named = next(sizes, {}) if isinstance(mine, Tensor) else {}
            if named and isinstance(theirs, Tensor) and theirs.dim() == mine.dim():
                shape = [theirs.shape[i] if i in named else size for i, size in enumerate(mine.shape)]
                mine = mine.new_empty(()).expand(shape)
            found.append(mine)
        return found

    def _why_outside(self, leaves: Sequence[Any]) -> str | None:
        """Why sizes that may vary are not in their ranges."""
        sizes = self.captured.program.sizes
        names = [entry["name"] for entry in self.manifest["inputs"]][: len(sizes)]
        return why_outside(sizes, names, [tensor.shape for tensor in tensors_of(leaves)]) if sizes else None


def _advice(wanted: object, given: object) -> str:
    """What to do about an argument that is no tensor where one is wanted."""
    if not isinstance(wanted, Tensor):
        return ""
    return ": give torch.from_numpy(array)" if isinstance(given, np.ndarray) else ": give a torch.Tensor"


def _why_no_tensor(
    own: Sequence[Any], own_spec: pytree.TreeSpec, leaves: Sequence[Any], spec: pytree.TreeSpec
) -> str | None:
    """That a call has a container at the place of a tensor: a list of numbers, or of one tensor."""
    mine, theirs = (pytree.tree_unflatten(list(call), its) for call, its in ((own, own_spec), (leaves, spec)))
    for wanted, given in zip(mine[0], theirs[0], strict=False):
        if isinstance(wanted, Tensor) and isinstance(given, (list, tuple, dict)):
            return f"it takes {describe(wanted)}, not a {type(given).__name__}{_advice(wanted, given)}"
    return None


def with_state(captured: Captured, count: int) -> Captured:
    """A capture whose state is the last `count` inputs and outputs, as that of a function without one.

    The function takes `(args, kwargs, state)` and gives `(result, state)`; the state is a list.
    """
    program = captured.program
    args, kwargs = pytree.tree_unflatten(list(captured.leaves), captured.spec)
    state = list(program.examples[len(program.examples) - count :])
    leaves, spec = flatten_call((args, kwargs, state), {})
    marks = [torch.empty(0) for _ in program.exit[: len(program.exit) - count]]
    layout = flatten_outputs((captured.layout.restore(marks), state))[1]
    return Captured(program, spec, tuple(leaves), layout)


@dataclasses.dataclass(frozen=True)
class SelfTestCall:
    """A self-test: a call's arguments, the flat outputs that it must have, and where it is in the ranges."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    place: str = ""
    state: tuple[Tensor, ...] = ()


def run_self_test(model: LoadedModel, test: SelfTestCall, tolerance: float) -> None:
    """Two calls: the first may capture what the second replays. The original is not asked in either."""
    for _ in range(2):
        with torch.no_grad(), _strictly(model):
            outputs = flatten_outputs(model.step(test.state, test.args, test.kwargs))[0]
        for number, (output, expected) in enumerate(zip(outputs, test.outputs, strict=True)):
            error = relative_error(output, expected)
            if not error <= tolerance:
                raise BundleError(
                    f"the self-test{test.place} fails on {model.backend}: output {number} has a relative "
                    f"error of {error:.3g}, and the manifest allows {tolerance:.3g}"
                )


@contextlib.contextmanager
def _strictly(model: LoadedModel) -> Iterator[None]:
    """Let a program that fails in the block be an error: else the original would answer in its place."""
    inner = model._call
    if not isinstance(inner, OptimizedModule):
        yield
        return
    before, inner.strict = inner.strict, True
    try:
        yield
    finally:
        inner.strict = before


def _in_classes_of(spec: pytree.TreeSpec, call: Any) -> Any:
    """A call whose namedtuples are of the classes of a spec that have their names and fields."""
    known: dict[tuple[str, tuple[str, ...]], type] = {}

    def note(value: Any) -> bool:
        if pytree.is_namedtuple_instance(value):
            known[type(value).__name__, value._fields] = type(value)
        return False

    pytree.tree_map(lambda leaf: leaf, pytree.tree_unflatten(range(spec.num_leaves), spec), is_leaf=note)

    def own(value: Any) -> Any:
        if not pytree.is_namedtuple_instance(value):
            return value
        kind = known.get((type(value).__name__, value._fields), type(value))
        return kind(*(recast(part) for part in value))

    def recast(value: Any) -> Any:
        return pytree.tree_map(own, value, is_leaf=pytree.is_namedtuple_instance)

    return recast(call) if known else call


def _told(spec: pytree.TreeSpec) -> str:
    """The arguments of a call: how many by position, the names of the others, and their structure if any."""
    args, kwargs = pytree.tree_unflatten(range(spec.num_leaves), spec)
    by_name = f" and by name {', '.join(kwargs)}" if kwargs else ", none by name"
    is_flat = all(isinstance(each, int) for each in (*args, *kwargs.values()))
    count = f"{len(args)} argument{'s' * (len(args) != 1)} by position{by_name}"
    return count if is_flat else f"{count} ({spec!s:.{MOST_OF_STRUCTURE}})"
