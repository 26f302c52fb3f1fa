"""Compares a model with optimized parts with the original, as a whole: on its example and on other inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.errors import InputError, first_line
from ampopt.ir.device_asserts import asserts_raised
from ampopt.ir.in_float64 import SCOPES, copy_in_float64
from ampopt.ir.lanes import FP32
from ampopt.ir.model_copy import private_copy, untouched_rng, working_copy
from ampopt.ir.numerics import fresh_draw, rounded_anew, roundings_of_sums
from ampopt.ir.settings import Settings, autocast_scope
from ampopt.ir.signature import copied, flatten_call, map_tensors, tensors_of
from ampopt.measure.metric import Metric, metric_value
from ampopt.measure.results import Distance, IncomparableError, distance, kept
from ampopt.search.options import auto_bound
from ampopt.system.flags import rounds_to_tf32
from ampopt.system.interrupts import check_interrupted

logger = logging.getLogger("ampopt")

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

    Results are compared whatever they are made of, see `measure.results`, or by the user's `metric`, which
    gets a result and the original's. `limit` is the largest relative error, or value of the metric. Where a
    threshold or an order lies within the original's own rounding, what it gives in float64 is as right.
    `is_auto`: `limit` is ampopt's own choice, and lower precision may have more where the original, as the
    process calls it, has an error itself, see `options.auto_bound`.
    """

    original: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: torch.device
    limit: float
    metric: Metric | None = None
    is_auto: bool = False

    def call(self, model: Answer, leaves: Sequence[Any] | None = None) -> Any:
        """The result for a call with these leaves (None: the example's), as it is served."""
        own, spec = flatten_call(self.args, self.kwargs)
        given = map_tensors(copied, leaves or own, {})[0]
        with Settings().scope(self.device), untouched_rng(self.device):
            args, kwargs = pytree.tree_unflatten(given, spec)
            return model(*args, **kwargs)

    def judge(self, answer: Answer, *, lower: bool = False) -> tuple[float, str | None]:
        """The error on the example, and why the answers are wrong: None if they are right.

        `lower`: something of it has lower precision than FP32.

        `answer` is called with the example and then with random inputs, as a copy of the original is, so that
        the states of both advance. Random inputs tell nothing if the original fails with them, or if rounding
        its weights in FP32 moves its result by more than FP32's largest error. Raises IncomparableError, or
        what `answer` raises for the example.
        """
        distances, limits = list[Distance](), self.lower_limits if lower else [self.limit] * (1 + DRAWS)
        for place, (leaves, _) in enumerate(self._expected):
            try:
                distances.append(self._nearest(place, self.call(answer, leaves), limits[place]))
            except Exception as error:
                check_interrupted(error)
                if not distances:
                    raise
                return distances[0].error, f"it fails on other inputs than the example: {first_line(error)}"
        first, *others = distances
        if not first.error <= limits[0]:
            return first.error, self._over(first, limits[0])
        pairs = list(zip(others, limits[1:], strict=False))
        if any(not each.error <= limit for each, limit in pairs):
            for (each, limit), by_rounding in zip(pairs, self._moved_by_rounding[1:], strict=True):
                tells = self.metric is not None or by_rounding <= FP32.limits.largest
                if tells and not each.error <= max(limit, AS_FAR * by_rounding):
                    return first.error, f"{self._over(each, limit)} on other inputs than the example"
        return first.error, None

    def _nearest(self, place: int, found: Any, limit: float) -> Distance:
        """The distance from the original's result for a call, or from that in float64 where it is near."""
        own = self._distance(self._expected[place][1], found)
        if own.error <= limit or self.metric is not None or place >= len(self._in_float64):
            return own
        exact = self._distance(self._in_float64[place], found)
        return exact if exact.error <= limit else own

    @functools.cached_property
    def called_errors(self) -> list[float]:
        """The original's error for each call as the process calls it, with its setting of TF32; else none."""
        if not self.is_auto or not rounds_to_tf32(self.device):
            return []
        original, spec = working_copy(self.original), flatten_call(self.args, self.kwargs)[1]
        found = list[float]()
        for place, (leaves, _) in enumerate(self._expected):
            with torch.no_grad(), untouched_rng(self.device), autocast_scope(self.device, None):
                args, kwargs = pytree.tree_unflatten(map_tensors(copied, leaves, {})[0], spec)
                found.append(self._nearest(place, kept(original(*args, **kwargs)), self.limit).error)
        return found

    @functools.cached_property
    def lower_limits(self) -> list[float]:
        """The limit of lower precision for each call; `limit` unless the original itself rounds more."""
        if not self.called_errors:
            return [self.limit] * (1 + DRAWS)
        return [max(self.limit, auto_bound(called)) for called in self.called_errors]

    @functools.cached_property
    def is_empty(self) -> bool:
        """Whether the original's results have no element, on no input: they tell nothing about precision."""
        leaves = [leaf for _, expected in self._expected for leaf in pytree.tree_leaves(expected)]
        return all(isinstance(leaf, Tensor) and leaf.numel() == 0 for leaf in leaves)

    def try_metric(self) -> None:
        """Raise InputError where the user's metric cannot compare the original's own results."""
        with contextlib.suppress(IncomparableError):
            (_, expected), *_ = self._expected
            try:
                self._distance(expected, expected)
            except Exception as error:
                check_interrupted(error)
                raise InputError(
                    f"metric={self.metric!r} fails on the original's own results: {first_line(error)}. "
                    "It gets a result and the original's, and returns a number"
                ) from error

    def _over(self, found: Distance, limit: float) -> str:
        if self.metric is not None:
            given = "NaN" if math.isnan(found.error) else f"{found.error:.2g}"
            return f"the metric gives {given} for the whole model, over the tolerance {limit:g}"
        return f"the whole model's error {found} is over {limit:.3g}"

    def _distance(self, expected: Any, found: Any) -> Distance:
        if self.metric is None:
            return distance(expected, found)
        if all_finite(expected) and not all_finite(found):
            return Distance(math.inf)
        return Distance(metric_value(self.metric, kept(found), kept(expected)))  # it may write into them

    @functools.cached_property
    def _expected(self) -> list[tuple[Sequence[Any], Any]]:
        """The original's results for the example and then for random inputs, as far as it takes them."""
        original, found = working_copy(self.original), list[tuple[Sequence[Any], Any]]()
        for leaves in self._rows():
            try:
                with asserts_raised(self.device):
                    found.append((leaves, kept(self.call(original, leaves))))
            except Exception as error:
                check_interrupted(error)
                if not found:
                    raise
                break
        return found

    @functools.cached_property
    def _in_float64(self) -> list[Any]:
        """The original's results in float64, rounded to float32, for as many calls as it can be called so."""
        found = list[Any]()
        for scope in SCOPES:
            try:
                model = copy_in_float64(self.original)
                for leaves, _ in self._expected:
                    given = map_tensors(_in(torch.float32, torch.float64), leaves, {})[0]
                    with asserts_raised(self.device), scope():
                        result = self.call(model, given)
                    found.append(
                        kept(pytree.tree_map_only(Tensor, _in(torch.float64, torch.float32), result))
                    )
            except Exception as error:
                check_interrupted(error)
                logger.debug("ampopt: the whole model is not compared in float64: %s", first_line(error))
            if found:
                break
        return found

    def _rows(self) -> Iterator[Sequence[Any]]:
        leaves, _ = flatten_call(self.args, self.kwargs)
        generator = torch.Generator().manual_seed(5)
        yield leaves
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            for _ in range(DRAWS):
                yield map_tensors(lambda tensor: fresh_draw(tensor, generator), leaves, {})[0]

    @functools.cached_property
    def _moved_by_rounding(self) -> list[float]:
        """How far each result of the original moves where its weights are rounded anew in FP32."""
        worst = [0.0] * len(self._expected)
        for seed in range(ROUNDINGS):
            moved = private_copy(self.original)
            generator = torch.Generator(self.device).manual_seed(seed)
            with torch.no_grad():
                for tensor in moved.parameters():
                    roundings = roundings_of_sums(FP32.dtype, seed)
                    tensor.copy_(rounded_anew(tensor, FP32.dtype, generator, roundings))
            for place, (leaves, expected) in enumerate(self._expected):
                with asserts_raised(self.device):
                    result = self.call(moved, leaves)
                error = self._distance(expected, result).error
                worst[place] = max(worst[place], error)
        return worst


def _in(own: torch.dtype, other: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Converts tensors of one dtype to another."""
    return lambda tensor: tensor.to(other) if tensor.dtype is own else tensor


def all_finite(result: Any) -> bool:
    """Whether all tensors of a result, as far as PyTorch finds them, have finite elements alone."""
    leaves = tensors_of(pytree.tree_leaves(result))
    return all(bool(torch.isfinite(each).all()) for each in leaves if each.layout is torch.strided)
