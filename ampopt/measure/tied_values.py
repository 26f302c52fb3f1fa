"""How far the order of equal values, which PyTorch leaves open, moves a model's outputs.

`topk`, an unstable `sort`, `kthvalue`, `median` and `mode` tell the places of values. Where two are equal it
is not defined which place comes first, and engines have orders of their own. An image of one colour makes all
scores of a detector equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ampopt.ir.graph import arguments, aten, calls
from ampopt.ir.lanes import Lane
from ampopt.ir.numerics import is_rounded, relative_error, widened
from ampopt.ir.program import Program
from ampopt.measure.draws import Draw
from ampopt.measure.original import Original, Run

_CHOOSING = {aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim, aten.mode.default}
_ORDERING = {aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default} | _CHOOSING

ORDERS = 4
"""Number of runs with equal values in orders at random, beside the order of their places, which ONNX has."""

AS_FAR = 2.0
"""Largest ratio, either way, of a program's error to the jump of a run that explains it."""


def tells_places(program: Program) -> bool:
    """Whether outputs can hang on the order of equal values."""
    return any(_is_open(node) for node in calls(program.graph, _ORDERING))


def _is_open(node: fx.Node) -> bool:
    return node.target is not aten.sort.stable or not arguments(node)["stable"]


class TiedValues:
    """Runs the captured program of `original` with values that are as good as equal in other orders."""

    def __init__(self, original: Original, usual: Sequence[Draw], *, least_norm: float) -> None:
        """`usual`: the example, and random inputs like it.

        An output's norm counts as at least the share `least_norm` of that on the example.
        """
        self._original, self._program, self._usual = original, original.captured.program, usual
        self._least_norm, self._least_norms = least_norm, list[float]()
        self._jumps: dict[tuple[str, float], list[list[float]]] = {}
        self._tells_places = tells_places(self._program)

    def jumps(self, draw: Draw, output: int, near: float) -> list[float]:
        """The relative change of an output of a draw in each run; 0 where it is not finite.

        Values may change places in a run that differ by a share of no more than `near`; 0: they are equal.
        """
        if not self._tells_places:
            return []
        if (draw.name, near) not in self._jumps:
            self._jumps[draw.name, near] = self._jumps_of(draw, near)
        return [run[output] for run in self._jumps[draw.name, near]]

    def licence(self, lane: Lane, draw: Draw, output: int, error: float) -> float:
        """The error that is allowed where the order of values explains this one, because a run moves as far.

        Outside of the examples' range right programs of the lane may swap what differs by no more than the
        error that each of them may have. In the example they may swap what is equal, where random inputs have
        no such values: else nothing would be verified. 0 where no run explains the error.
        """
        if draw not in self._usual:
            found = self.jumps(draw, output, lane.limits.always)
        elif draw is not self._usual[0] or len(self._usual) == 1 or self._is_open(self._usual[1:], output):
            return 0.0
        else:
            found = self.jumps(draw, output, 0.0)
        explaining = (jump for jump in found if jump / AS_FAR <= error <= jump * AS_FAR)
        return AS_FAR * max(explaining, default=0.0)

    def _is_open(self, draws: Sequence[Draw], output: int) -> bool:
        return any(any(self.jumps(draw, output, 0.0)) for draw in draws)

    def first_without(self) -> Draw:
        """The first usual draw, if possible the example, whose first call has no order of equal values."""
        for draw in self._usual:
            first = Draw(f"{draw.name}, the first call", draw.calls[:1])
            if not any(self._is_open([first], output) for output in range(len(self._program.exit))):
                return draw
        return self._usual[0]

    def _run_of(self, interpreter: fx.Interpreter) -> Run:
        def run(*tensors: Tensor) -> list[Tensor]:
            with self._program.scope(), torch.no_grad():
                pairs = zip(self._program.entry, tensors, strict=True)
                found = interpreter.run(*[border.convert(tensor) for border, tensor in pairs])
                return [border.convert(x) for border, x in zip(self._program.exit, found, strict=True)]

        return run

    def _jumps_of(self, draw: Draw, near: float) -> list[list[float]]:
        plain = self._run_of(fx.Interpreter(self._program.graph))
        if not self._least_norms:
            first = self._original.steps(plain, self._usual[0])[0]
            self._least_norms = [self._least_norm * _norm(output) for output in first]
        usual = self._original.steps(plain, draw)
        found = list[list[float]]()
        for seed in (None, *range(ORDERS)):
            run, worst = (
                self._run_of(_Reordered(self._program.graph, near, seed)),
                [0.0] * len(self._least_norms),
            )
            for moved, own in zip(self._original.steps(run, draw), usual, strict=True):
                pairs = zip(moved, own, self._least_norms, strict=True)
                errors = [relative_error(a, b, least_norm=least) for a, b, least in pairs]
                finite = [error if error < torch.inf else 0.0 for error in errors]
                worst = [max(pair) for pair in zip(worst, finite, strict=True)]
            found.append(worst)
        return found


def _norm(output: Tensor) -> float:
    if not is_rounded(output):
        return 0.0
    return float(torch.linalg.vector_norm(widened(output[torch.isfinite(output)])))


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
            return self._chosen_anew(rows, result[0], given["dim"], keepdim=given["keepdim"])
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

    def _chosen_anew(self, rows: Tensor, chosen: Tensor, dim: int, *, keepdim: bool) -> tuple[Tensor, Tensor]:
        """A value as good as equal to the one that was chosen of each row, and its place."""
        own = (chosen if keepdim else chosen.unsqueeze(dim)).movedim(dim, -1)
        is_alike = (rows == own) | (rows.isnan() & own.isnan())
        if rows.is_floating_point():
            is_alike = is_alike | ((rows.double() - own.double()).abs() <= self._far(rows))
        place = (is_alike * (self._random(rows.shape, rows) + 1.0)).argmax(-1, keepdim=True)
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
