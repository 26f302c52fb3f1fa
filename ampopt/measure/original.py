"""The original model as what programs are compared with: in float64, in a lane, and rounded anew."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.errors import first_line
from ampopt.ir.capture import Captured
from ampopt.ir.device_asserts import asserts_raised, may_assert
from ampopt.ir.in_float64 import SCOPES, Scope, copy_in_float64
from ampopt.ir.lane_io import original_of
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.model_copy import private_copy, untouched_rng, working_copy
from ampopt.ir.numerics import ResultsRoundedAnew, relative_error, rounded_anew, roundings_of_sums, widened
from ampopt.ir.settings import Settings, autocast_scope
from ampopt.ir.signature import flatten_outputs
from ampopt.measure.clocks import synchronize
from ampopt.measure.draws import Draw, steps_of

Run = Callable[..., Sequence[Tensor]]
"""Takes and returns flat tensors; a state, if there is one, is last in both."""


@runtime_checkable
class HasOperators(Protocol):
    """A run whose operators cannot be seen, as those of a CUDA graph."""

    @property
    def by_operators(self) -> Run:
        """The same by operators that are called one by one."""


class Original:
    """Copies of the original model, called with flat tensors as its programs are.

    `captured` is the capture of the programs, `device` their device. `note` says what could not be done.
    """

    def __init__(self, model: nn.Module, captured: Captured) -> None:
        """`model`, a private copy on the program's device, is not called itself."""
        self.note: str | None = None
        self.kept_inputs: list[str] | None = None
        """The places of the state that hold an input of the call before; None before the first call."""
        self.captured = captured
        self._model = working_copy(model if captured.lifted is None else captured.lifted.model)
        self.device = captured.program.device
        self._may_assert = self.device.type == "cuda" and may_assert(captured.program)
        self._exact, self._scope = self._in_float64()
        self._references: dict[str, list[list[Tensor]]] = {}
        self.exact_s = 0.0
        """Seconds that the references of the last draw took."""

    def call_original(self, model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The original's flat outputs for flat input tensors, from a copy; the state is last in both."""
        state, count = self.captured.lifted, len(self.captured.inputs)
        if state is not None:
            state.write(model, [value.clone() for value in tensors[count:]])
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(x, Tensor) else x for x in self.captured.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.captured.spec)
        with untouched_rng(self.device):
            outputs = flatten_outputs(model(*args, **kwargs))[0]
        if state is None:
            return outputs
        values = state.read(model)
        if self.kept_inputs is None:
            self.kept_inputs = _kept(self.captured.state, values, tensors[:count])
        return [*outputs, *(value.clone() for value in values)]

    def _in_float64(self) -> tuple[nn.Module | None, Scope]:
        """The original in float64, and the scope in which it runs; None where it fails there, and a note.

        What is computed with all that it makes widened has to be near what it gives in float32.
        """
        reasons, examples = list[str](), self.captured.program.examples
        with Settings().scope(self.device):
            for scope in SCOPES:
                try:
                    exact = copy_in_float64(original_of(self._model))
                    with scope():
                        found = self.call_original(exact, _widened(examples))
                    if reasons and not self._is_near(found, self.call_original(self._model, examples)):
                        raise ValueError("what it gives with every number in float64 is another result")
                except Exception as error:
                    reasons.append(textwrap.shorten(first_line(error), 200, placeholder=" …"))
                    continue
                return exact, scope
        self.note = (
            f"the reference is the model in float32, because it fails in float64: {'; '.join(reasons)}"
        )
        return None, SCOPES[0]

    def _is_near(self, exact: Sequence[Tensor], own: Sequence[Tensor]) -> bool:
        """Whether results in float32 are as near those in float64 as a yardstick has to be."""
        if len(exact) != len(own):
            return False
        pairs = zip(own, exact, strict=True)
        return all(relative_error(mine, wide) <= FP32.limits.largest for mine, wide in pairs)

    def reference(self, draw: Draw) -> list[list[Tensor]]:
        """The original's outputs in float64, for each call of a draw."""
        if draw.name not in self._references:
            began = time.perf_counter()
            self._references[draw.name] = self.reference_within(draw)
            synchronize(self.device)
            self.exact_s = time.perf_counter() - began
        return self._references[draw.name]

    def reference_within(
        self, draw: Draw, mode: contextlib.AbstractContextManager[object] | None = None
    ) -> list[list[Tensor]]:
        """The outputs in float64, computed anew within a mode that may change what operators do."""
        exact, state = self._exact, self.captured.initial_state
        with Settings().scope(self.device), mode or contextlib.nullcontext():
            if exact is None:
                return self.steps(lambda *tensors: self.call_original(self._model, tensors), draw)
            wide = Draw(draw.name, tuple(_widened(tensors) for tensors in draw.calls))
            with self._asserts_raised(), self._scope():
                return steps_of(wide, lambda *tensors: self.call_original(exact, tensors), _widened(state))

    def eager(self, lane: Lane, model: nn.Module | None = None) -> Run:
        """The original model as a program of a lane: strict FP32, or under autocast."""

        def run(*tensors: Tensor) -> list[Tensor]:
            with lane.scope(self.device):
                return self.call_original(model or self._model, tensors)

        return run

    def as_called(self, *tensors: Tensor) -> list[Tensor]:
        """The original as the process calls it: its setting of TF32 is not changed."""
        with torch.no_grad(), autocast_scope(self.device, None):
            return self.call_original(self._model, tensors)

    def steps(self, run: Run, draw: Draw) -> list[list[Tensor]]:
        """What a function of flat tensors gives for each call of a draw.

        A draw may lead to an index out of range, or the rounding of a lane may: that raises, on a GPU, too.
        """
        with self._asserts_raised():
            return steps_of(draw, run, self.captured.initial_state)

    def _asserts_raised(self) -> contextlib.AbstractContextManager[object]:
        return asserts_raised(self.device) if self._may_assert else contextlib.nullcontext()

    def runs_rounded_anew(
        self,
        lane: Lane,
        seeds: Iterable[int],
        *,
        within: bool = False,
        unlimited: bool = False,
        roundings: float | None = None,
    ) -> Iterator[Run]:
        """Eager with weights and inputs rounded anew, and `within` all that it computes; once for each seed.

        `unlimited`: it computes in FP32, so that nothing overflows in the lane's dtype. `roundings`: the
        number for each result within (None: see `roundings_of_sums`); with 0 sums alone change. All are of
        one copy of the model, whose weights the next one rounds anew: a run is no use after the next was
        asked for.
        """
        model = private_copy(self._model)
        eager = self.eager(FP32 if unlimited else lane, model)
        for seed in seeds:
            generator = torch.Generator(self.device).manual_seed(seed)
            with torch.no_grad():
                for tensor, own in zip(_weights(model), _weights(self._model), strict=True):
                    tensor.copy_(rounded_anew(own, _lowered(own, lane), generator))

            def moved(
                *tensors: Tensor,
                run: Run = eager,
                seeded: torch.Generator = generator,
                sums: float = roundings_of_sums(lane.dtype, seed) if roundings is None else roundings,
            ) -> Any:
                inputs = [rounded_anew(tensor, _lowered(tensor, lane), seeded) for tensor in tensors]
                with ResultsRoundedAnew(lane.dtype, seeded, sums) if within else contextlib.nullcontext():
                    return run(*inputs)

            yield moved


def _kept(places: Sequence[str], state: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[str]:
    """The places of a state whose tensors share memory with inputs."""
    plain = [each for each in inputs if each.layout is torch.strided and each.numel()]
    given = {each.untyped_storage().data_ptr() for each in plain}
    pairs = zip(places, state, strict=True)
    return [place for place, value in pairs if value.untyped_storage().data_ptr() in given]


def _weights(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _widened(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(widened(tensor) for tensor in tensors)


def _lowered(tensor: Tensor, lane: Lane) -> torch.dtype:
    """The dtype that a lane rounds a weight or an input to: complex numbers keep theirs."""
    return tensor.dtype if tensor.is_complex() else lane.dtype
