"""What a file may compute where the order of equal values, which PyTorch leaves open, moves the outputs.

`topk`, an unstable `sort`, `kthvalue`, `median` and `mode` tell the places of values. Where two are equal it
is not defined which place comes first, and runtimes have orders of their own. An image of one colour makes
all scores of a detector equal.

The captured program runs with such values in some orders. A file's errors on a draw are allowed where one of
these runs explains all outputs together: an output is within its own limit, and stays so in the run; or its
error is near its change in the run, and its norm near the norm there.

Correct because: without equal values no run moves an output, and nothing is allowed. With them, what keeps
the original's places is not allowed the values of other places, and what lost a bound or a scale has other
norms. What is wrong may still pass where the norms stay within a factor of `AS_LARGE`, and so do errors in
places among equal values. So only files have this licence: the choices of passes and engines have to be
seen, see `measure.followed`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ampopt.ir.graph import arguments, aten, calls
from ampopt.ir.lanes import Lane
from ampopt.ir.numerics import is_rounded, relative_error, widened
from ampopt.ir.program import Program
from ampopt.measure.draws import Draw
from ampopt.measure.original import Original
from ampopt.system.interrupts import check_interrupted

_CHOOSING = {aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim, aten.mode.default}
_ORDERING = {aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default} | _CHOOSING

ORDERS = 4
"""Number of runs with equal values in orders at random, beside the order of their places, which is ONNX's."""

AS_FAR = 2.0
"""Largest ratio, either way, of an error to the change of an output in the run that explains it."""

AS_LARGE = 2.0**0.5
"""Largest ratio, either way, of the norm of such an output to that in the run."""


def tells_places(program: Program) -> bool:
    """Whether outputs can hang on the order of equal values."""
    return any(_is_open(node) for node in calls(program.graph, _ORDERING))


def _is_open(node: fx.Node) -> bool:
    return node.target is not aten.sort.stable or not arguments(node)["stable"]


@dataclasses.dataclass(frozen=True)
class Reordered:
    """The relative change of each output in a run with another order, and its norm.

    The change is infinite where NaN or infinity is in other elements, or the run raises an error.
    """

    jumps: tuple[float, ...]
    norms: tuple[float, ...]

    def explains(self, output: int, error: float, limit: float, norm: float) -> bool:
        """Whether an output of a file is within its limit here, too, or is as this run makes it."""
        jump, size = self.jumps[output], self.norms[output]
        if error <= limit:
            return jump <= AS_FAR * limit
        is_as_far = jump / AS_FAR <= error <= self.most(output)
        return is_as_far and size / AS_LARGE <= norm <= size * AS_LARGE

    def most(self, output: int) -> float:
        """The largest error of an output that this run explains."""
        return AS_FAR * self.jumps[output]


class TiedValues:
    """Runs the captured program of `original` with values that are as good as equal in other orders."""

    def __init__(self, original: Original, usual: Sequence[Draw], *, least_norm: float) -> None:
        """`usual`: the example, and random inputs like it.

        An output's norm counts as at least the share `least_norm` of that on the example.
        """
        self._original, self._program, self._usual = original, original.captured.program, usual
        self._least_norm = least_norm
        self._runs: dict[tuple[str, float], list[Reordered]] = {}
        self._tells_places = tells_places(self._program)

    def runs(self, draw: Draw, near: float) -> list[Reordered]:
        """The runs on a draw; values may change places that differ by a share of no more than `near`."""
        if not self._tells_places:
            return []
        if (draw.name, near) not in self._runs:
            self._runs[draw.name, near] = list(self._reordered(draw, near))
        return self._runs[draw.name, near]

    def judged(
        self,
        outputs: Sequence[Sequence[Tensor]],
        lane: Lane,
        draw: Draw,
        found: list[tuple[int, float, float]],
    ) -> list[tuple[int, float, float]]:
        """What was found of outputs (places, errors and limits), with the limits of a run that explains it.

        Outside of the examples' range right files of the lane may swap what differs by no more than the error
        that each of them may have. In the example they may swap what is equal, where random inputs have no
        such values: else nothing would be verified.
        """
        first, *others = self._usual
        if draw not in self._usual:
            runs = self.runs(draw, lane.limits.always)
        elif draw is first and others and not any(self.is_open(each) for each in others):
            runs = self.runs(draw, 0.0)
        else:
            runs = []
        norms = _norms(outputs)
        for run in runs:
            if all(run.explains(at, error, limit, norms[at]) for at, error, limit in found):
                return [(at, error, limit if error <= limit else run.most(at)) for at, error, limit in found]
        return found

    def is_open(self, draw: Draw) -> bool:
        """Whether another order of equal values moves an output of a draw."""
        return any(jump > 0 for run in self.runs(draw, 0.0) for jump in run.jumps)

    def first_without(self) -> Draw:
        """The first usual draw, if possible the example, whose first call has no order of equal values."""
        for draw in self._usual:
            if not self.is_open(Draw(f"{draw.name}, the first call", draw.calls[:1])):
                return draw
        return self._usual[0]

    def _reordered(self, draw: Draw, near: float) -> Iterator[Reordered]:
        least = [self._least_norm * norm for norm in _norms(self._original.reference(self._usual[0])[:1])]
        if (usual := self._steps(fx.Interpreter(self._program.graph), draw)) is None:
            return
        for seed in (None, *range(ORDERS)):
            moved = self._steps(_Reordered(self._program.graph, near, seed), draw)
            if moved is None:
                yield Reordered((math.inf,) * len(least), (math.inf,) * len(least))
                continue
            worst = [0.0] * len(least)
            for calls_ in zip(moved, usual, strict=True):
                pairs = zip(*calls_, least, strict=True)
                errors = [relative_error(mine, own, least_norm=norm) for mine, own, norm in pairs]
                worst = [max(pair) for pair in zip(worst, errors, strict=True)]
            yield Reordered(tuple(worst), tuple(_norms(moved)))

    def _steps(self, interpreter: fx.Interpreter, draw: Draw) -> list[list[Tensor]] | None:
        """What an interpreter of the graph gives for each call; None where it raises an error.

        One of a singular matrix, perhaps, which other places have made.
        """

        def run(*tensors: Tensor) -> list[Tensor]:
            with self._program.scope(), torch.no_grad():
                pairs = zip(self._program.entry, tensors, strict=True)
                found = interpreter.run(*[border.convert(tensor) for border, tensor in pairs])
                return [border.convert(x) for border, x in zip(self._program.exit, found, strict=True)]

        try:
            return self._original.steps(run, draw)
        except Exception as error:
            check_interrupted(error)
            return None


def _norms(steps: Sequence[Sequence[Tensor]]) -> list[float]:
    """The norm of each output's finite elements in all calls; 0 for integers."""
    calls_of = zip(*steps, strict=True)
    return [math.hypot(*map(_norm, outputs)) for outputs in calls_of]


def _norm(output: Tensor) -> float:
    if not is_rounded(output):
        return 0.0
    return float(torch.linalg.vector_norm(widened(output.detach()[torch.isfinite(output)])))


class _Reordered(fx.Interpreter):
    """Runs a graph in which what is as good as equal is ordered at random; without a seed, by its place."""

    def __init__(self, module: fx.GraphModule, near: float, seed: int | None) -> None:
        super().__init__(module)
        self._near = 0.0 if seed is None else near
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def run_node(self, n: fx.Node) -> Any:
        """Run the node; what tells places tells those of another order."""
        result = super().run_node(n)
        if n.target not in _ORDERING or not _is_open(n):
            return result
        given: dict[str, Any] = {k: self.map_nodes_to_values(v, n) for k, v in arguments(n).items()}
        values: Tensor = given["self"]
        if not values.numel() or not values.dim():
            return result
        rows = values.movedim(given["dim"], -1)
        if n.target in _CHOOSING:
            number = {aten.kthvalue.default: given.get("k"), aten.median.dim: (rows.shape[-1] + 1) // 2}
            return self._chosen_anew(
                rows, result[0], given["dim"], number.get(n.target), keepdim=given["keepdim"]
            )
        places = self._order(rows, descending=given.get("largest", given.get("descending", False)))
        places = places[..., : given.get("k")]
        found = [rows.gather(-1, places).movedim(-1, given["dim"]), places.movedim(-1, given["dim"])]
        return found[1] if n.target is aten.argsort.default else tuple(found)

    def _order(self, rows: Tensor, *, descending: bool) -> Tensor:
        """The places of each row's values in order."""
        if self._near and rows.is_floating_point():
            rows = rows.double() + self._far(rows) * (self._random(rows.shape, rows) - 0.5)
        shuffled = self._random(rows.shape[-1:], rows).argsort()
        order = rows[..., shuffled].argsort(dim=-1, descending=descending, stable=True)
        return shuffled[order]

    def _chosen_anew(
        self, rows: Tensor, chosen: Tensor, dim: int, number: int | None, *, keepdim: bool
    ) -> tuple[Tensor, Tensor]:
        """A value as good as equal to the one that was chosen of each row, and its place.

        Without a generator that of this number in order, or the first where none is given, or NaN chosen.
        """
        own = (chosen if keepdim else chosen.unsqueeze(dim)).movedim(dim, -1)
        is_alike = (rows == own) | (rows.isnan() & own.isnan())
        if rows.is_floating_point():
            is_alike = is_alike | ((rows.double() - own.double()).abs() <= self._far(rows))
        place = (is_alike * (2.0 - self._random(rows.shape, rows))).argmax(-1, keepdim=True)
        if self._generator is None and number is not None:
            at_number = rows.argsort(dim=-1, stable=True)[..., number - 1 : number]
            place = torch.where(own.isnan(), place, at_number)
        found = (each.movedim(-1, dim) for each in (rows.gather(-1, place), place))
        return tuple(each if keepdim else each.squeeze(dim) for each in found)  # type: ignore[return-value]

    def _far(self, rows: Tensor) -> Tensor:
        return self._near * rows.double().nan_to_num(0.0, 0.0, 0.0).abs()

    def _random(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Numbers from 0 to 1 at random; without a generator they rise with their place."""
        if self._generator is None:
            return torch.linspace(0.0, 1.0, shape[-1], dtype=torch.float64, device=like.device).expand(
                tuple(shape)
            )
        return torch.rand(tuple(shape), generator=self._generator, dtype=torch.float64).to(like.device)
