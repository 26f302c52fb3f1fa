"""Compares a model with optimized parts with the original, as a whole: on its example and on other inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.errors import first_line
from ampopt.ir.lanes import Lane
from ampopt.ir.model_copy import private_copy, untouched_rng, working_copy
from ampopt.ir.numerics import fresh_draw, rounded_anew, roundings_of_sums
from ampopt.ir.settings import Settings
from ampopt.ir.signature import copied, flatten_call, map_tensors
from ampopt.measure.results import Distance, distance, kept
from ampopt.system.interrupts import check_interrupted

DRAWS = 2
"""Number of calls with random inputs like the example's, after the call with the example."""

AS_FAR = 2.0
"""Largest ratio of the error to what rounding does to the original, if it is over the limit for other inputs.

Boxes that noise suppresses, or not, are another number of boxes.
"""

ROUNDINGS = 3
"""Number of runs of the original with weights rounded anew, to learn that."""

Answer = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class WholeCheck:
    """Compares what answers calls with `original`, a private copy of the model, which is not called itself.

    Results are compared whatever they are made of, see `measure.results`. `limit` is the largest relative
    error; the parts compute in `lane`.
    """

    original: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: torch.device
    limit: float
    lane: Lane

    def call(self, model: Answer, leaves: Sequence[Any] | None = None) -> Any:
        """The result for a call with these leaves (None: the example's), as it is served."""
        own, spec = flatten_call(self.args, self.kwargs)
        given = map_tensors(copied, leaves or own, {})[0]
        with Settings().scope(self.device), untouched_rng(self.device):
            args, kwargs = pytree.tree_unflatten(given, spec)
            return model(*args, **kwargs)

    def judge(self, answer: Answer) -> tuple[float, str | None]:
        """The error on the example, and why the answers are wrong: None if they are right.

        `answer` is called with the example and then with random inputs, as a copy of the original is, so that
        the states of both advance. Random inputs tell nothing if the original fails with them, or if rounding
        its weights moves its result by more than the lane's largest error. Raises IncomparableError, or
        what `answer` raises for the example.
        """
        original, rows, distances = working_copy(self.original), list(self._rows()), list[Distance]()
        for leaves in rows:
            try:
                expected = kept(self.call(original, leaves))
            except Exception as error:
                check_interrupted(error)
                if not distances:
                    raise
                break
            try:
                distances.append(distance(expected, self.call(answer, leaves)))
            except Exception as error:
                check_interrupted(error)
                if not distances:
                    raise
                return distances[0].error, f"it fails on other inputs than the example: {first_line(error)}"
        first, *others = distances
        if not first.error <= self.limit:
            return first.error, f"the whole model's error {first} is over {self.limit:g}"
        if any(not each.error <= self.limit for each in others):
            moved = self._moved_by_rounding(rows[: len(distances)])
            for each, by_rounding in zip(others, moved[1:], strict=True):
                tells = by_rounding <= self.lane.limits.largest
                if tells and not each.error <= max(self.limit, AS_FAR * by_rounding):
                    over = f"the whole model's error {each} is over {self.limit:g}"
                    return first.error, f"{over} on other inputs than the example"
        return first.error, None

    def _rows(self) -> Iterator[Sequence[Any]]:
        leaves, _ = flatten_call(self.args, self.kwargs)
        generator = torch.Generator().manual_seed(5)
        yield leaves
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            for _ in range(DRAWS):
                yield map_tensors(lambda tensor: fresh_draw(tensor, generator), leaves, {})[0]

    def _moved_by_rounding(self, rows: Sequence[Sequence[Any]]) -> list[float]:
        """How far each result of the original moves where its weights are rounded anew."""
        worst = [0.0] * len(rows)
        for seed in range(ROUNDINGS):
            original, moved = working_copy(self.original), private_copy(self.original)
            generator = torch.Generator(self.device).manual_seed(seed)
            with torch.no_grad():
                for tensor in moved.parameters():
                    roundings = roundings_of_sums(self.lane.dtype, seed)
                    tensor.copy_(rounded_anew(tensor, self.lane.dtype, generator, roundings))
            for place, leaves in enumerate(rows):
                expected = kept(self.call(original, leaves))
                worst[place] = max(worst[place], distance(expected, self.call(moved, leaves)).error)
        return worst
