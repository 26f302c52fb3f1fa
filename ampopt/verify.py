"""Verification: programs against the original model in float64, on its examples and on fresh draws."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.capture import Captured, private_copy, untouched_rng
from ampopt.numerics import FLOORS, MULTIPLES, Check, fresh_draw, relative_error, rounded_anew
from ampopt.program import Settings
from ampopt.signature import flatten_outputs

Metric = Callable[[Any, Any], float]
"""A user's own distance: (outputs, the original's outputs) -> number; 0 for equal, smaller is better."""

Run = Callable[..., Sequence[Tensor]]
"""Flat input tensors in, flat output tensors out."""

LARGEST_LIMIT = 0.5
"""However wrong eager is itself: outputs of zeros have an error of 1, and must not pass."""

ROUNDINGS = 6
"""How often eager is rounded anew to learn how much rounding alone can move an output."""


class Verifier:
    """Compares programs with the original model in float64, on the example inputs and on fresh draws.

    The limit for each output is a small multiple of eager's own error in the same lane. A model with a
    discontinuity (the arg-max of a pooling window) can answer rounding alone with a jump that eager just
    happens not to make; so where a program is over the limit on a draw, eager itself is run on that draw
    with its weights and inputs rounded anew, and what that does to the output counts as eager's own error.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        *,
        tolerance: float | None = None,
        metric: Metric | None = None,
        draws: int = 2,
        seed: int = 0,
    ) -> None:
        """Compute the references. `model` is a private copy in evaluation mode on the program's device."""
        self.tolerance, self.metric = tolerance, metric
        self.note: str | None = None
        self._model, self._captured = model, captured
        self._device = captured.program.device
        generator = torch.Generator().manual_seed(seed)
        examples = captured.program.examples
        self.inputs: list[tuple[Tensor, ...]] = [examples]
        if examples:
            drawn = [tuple(fresh_draw(e, generator) for e in examples) for _ in range(draws)]
            self.inputs += [tensors for tensors in drawn if self._takes(tensors)]
        self.references = self._float64_references()
        self._own: dict[torch.dtype, list[list[float]]] = {}
        self._jumps: dict[tuple[torch.dtype, int], list[float]] = {}

    def call_original(self, model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The original model's flat outputs for flat input tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(x, Tensor) else x for x in self._captured.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._captured.spec)
        with untouched_rng(self._device):
            return flatten_outputs(model(*args, **kwargs))[0]

    def _takes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the original can be called with a draw: offsets or indices may not be drawn at random."""
        try:
            self.eager(torch.float32)(*tensors)
        except Exception as error:
            reason = textwrap.shorten(str(error) or type(error).__name__, 120, placeholder=" …")
            self.note = (
                f"a random input was left out of the verification, because the model refuses it: {reason}"
            )
            return False
        return True

    def _float64_references(self) -> list[list[Tensor]]:
        with Settings().scope(self._device):
            try:
                exact = private_copy(self._model).double()
                wide = [tuple(t.double() if t.is_floating_point() else t for t in x) for x in self.inputs]
                return [self.call_original(exact, x) for x in wide]
            except Exception as error:
                reason = textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" …")
                self.note = f"the reference is the model in float32, because it fails in float64: {reason}"
                return [self.call_original(self._model, x) for x in self.inputs]

    def eager(self, dtype: torch.dtype, model: nn.Module | None = None) -> Run:
        """The original model as a program of a lane: strict FP32, or autocast to a lower `dtype`."""
        settings = Settings(autocast=None if dtype is torch.float32 else dtype)

        def run(*tensors: Tensor) -> list[Tensor]:
            with settings.scope(self._device):
                return self.call_original(model or self._model, tensors)

        return run

    def own_error(self, dtype: torch.dtype) -> float:
        """Eager's largest relative error in the lane of `dtype`, over outputs and draws."""
        return max((max(errors, default=0.0) for errors in self._own_errors(dtype)), default=0.0)

    def _own_errors(self, dtype: torch.dtype) -> list[list[float]]:
        if dtype not in self._own:
            self._own[dtype] = list(self._errors(self.eager(dtype)))
        return self._own[dtype]

    def _errors(self, run: Run) -> Iterator[list[float]]:
        """For each draw, the error of each output."""
        for draw in range(len(self.inputs)):
            yield self._draw_errors(run, draw)

    def _draw_errors(self, run: Run, draw: int, inputs: Sequence[Tensor] | None = None) -> list[float]:
        outputs, reference = run(*(inputs or self.inputs[draw])), self.references[draw]
        if len(outputs) != len(reference):
            return [float("inf")] * len(reference)
        return [relative_error(o, r) for o, r in zip(outputs, reference, strict=True)]

    def largest_jumps(self, dtype: torch.dtype, draw: int) -> list[float]:
        """How far rounding alone moves eager's outputs on a draw; see the class."""
        if (dtype, draw) not in self._jumps:
            worst = [0.0] * len(self.references[draw])
            for seed in range(ROUNDINGS):
                generator = torch.Generator().manual_seed(seed)
                model = private_copy(self._model)
                with torch.no_grad():
                    for tensor in (*model.parameters(), *model.buffers()):
                        tensor.copy_(rounded_anew(tensor, dtype, generator))
                inputs = [rounded_anew(t, dtype, generator) for t in self.inputs[draw]]
                errors = self._draw_errors(self.eager(dtype, model), draw, inputs)
                worst = [max(pair) for pair in zip(worst, errors, strict=True)]
            self._jumps[dtype, draw] = worst
        return self._jumps[dtype, draw]

    def check(self, run: Run, dtype: torch.dtype) -> Check:
        """Verify something that maps flat inputs to flat outputs, as a program of the lane of `dtype`."""
        if self.metric is not None:
            return self._check_metric(run, self.metric)
        worst = Check(0.0, float("inf"), None)
        largest_own = self.own_error(dtype)
        for draw, errors in enumerate(self._errors(run)):
            for output, error in enumerate(errors):
                limit = self._limit(dtype, draw, output, error, largest_own)
                if not error <= limit or not math.isfinite(error):
                    text = f"output {output}: error {error:.2g} is over {limit:.2g}"
                    return Check(error, limit, f"{text} (eager's own: {largest_own:.2g})")
                if error >= worst.error:
                    worst = Check(error, limit, None)
        return worst

    def _limit(self, dtype: torch.dtype, draw: int, output: int, error: float, largest_own: float) -> float:
        if self.tolerance is not None:
            return self.tolerance
        own = self._own_errors(dtype)
        usual = statistics.median_low(
            [errors[output] for errors in own]
        )  # no draw's jump is another's licence
        limit = self._allowed(dtype, max(usual, own[draw][output] if own[draw][output] < 1.0 else 0.0))
        limit = min(limit, LARGEST_LIMIT)
        if limit < error < 1.0:
            limit = max(limit, self._allowed(dtype, self.largest_jumps(dtype, draw)[output]))
        return limit

    @staticmethod
    def _allowed(dtype: torch.dtype, own: float) -> float:
        """What eager's own error permits; an infinite one, from an overflow, permits nothing."""
        return max(MULTIPLES[dtype] * own if math.isfinite(own) else 0.0, FLOORS[dtype])

    def _check_metric(self, run: Run, metric: Metric) -> Check:
        limit = self.tolerance if self.tolerance is not None else 0.0
        restore, worst = self._captured.layout.restore, 0.0
        for tensors, reference in zip(self.inputs, self.references, strict=True):
            outputs = run(*tensors)
            pairs = zip(outputs, reference, strict=True)
            if any(bool((torch.isfinite(r) & ~torch.isfinite(o)).any()) for o, r in pairs):
                return Check(float("inf"), limit, "NaN or Inf where the original has none")
            value = float(metric(restore(list(outputs)), restore(reference)))
            worst = max(worst, value if value == value else float("inf"))
        reason = None if worst <= limit else f"the metric gives {worst:.3g}, over the tolerance {limit:.3g}"
        return Check(worst, limit, reason)
