"""Which outputs hang on the order of equal values, which PyTorch leaves open, on some inputs.

`topk`, an unstable `sort`, `kthvalue`, `median` and `mode` tell the places of values. Where two are equal it
is not defined which place comes first, and engines have orders of their own. An image of one colour makes all
scores of a detector equal.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ampopt.ir.graph import arguments, aten
from ampopt.ir.lanes import Lane
from ampopt.measure.draws import Draw
from ampopt.measure.original import Original
from ampopt.system.interrupts import check_interrupted

_CHOOSING = {aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim, aten.mode.default}
_ORDERING = {aten.topk.default, aten.sort.default, aten.argsort.default} | _CHOOSING

_PLACES = 1
"""Their result that tells places; the one before has the values, which are the same in any order."""


class TiedDraws:
    """Looks at the captured program of `original` for ties."""

    def __init__(self, original: Original, usual: Sequence[Draw]) -> None:
        """`usual`: the draws inside of the examples' range."""
        self._original, self._program, self._usual = original, original.captured.program, usual
        self._found: dict[tuple[str, float], frozenset[int]] = {}
        nodes = self._program.graph.graph.nodes
        self._orders = any(node.target in _ORDERING for node in nodes)

    def leave_open(self, lane: Lane, draw: Draw, output: int) -> bool:
        """Whether an output of the draw hangs on the order of values that a program of the lane may swap.

        Outside of the examples' range they differ by no more than the error that every program of the lane
        may have, as a share of the largest value beside them. On the usual draws they are equal, and another
        one of these leaves nothing open.
        """
        if draw not in self._usual:
            return self._is_open(draw, output, lane.limits.always)
        is_open = [self._is_open(each, output, 0.0) for each in (draw, *self._usual)]
        return is_open[0] and not all(is_open)

    def first_without(self) -> Draw:
        """The first usual draw, the example if possible, without equal values that an output hangs on."""
        count = len(self._program.exit)
        plain = (d for d in self._usual if not any(self._is_open(d, output, 0.0) for output in range(count)))
        return next(plain, self._usual[0])

    def _is_open(self, draw: Draw, output: int, near: float) -> bool:
        if not self._orders:
            return False
        if (draw.name, near) not in self._found:
            self._found[draw.name, near] = self._outputs_of(draw, near)
        return output in self._found[draw.name, near]

    def _outputs_of(self, draw: Draw, near: float) -> frozenset[int]:
        noting = _Noting(self._program.graph, near)

        def run(*tensors: Tensor) -> list[Tensor]:
            with self._program.scope(), torch.no_grad():
                pairs = zip(self._program.entry, tensors, strict=True)
                results: list[Tensor] = list(noting.run(*[border.convert(t) for border, t in pairs]))
                return results

        try:
            self._original.steps(run, draw)
        except Exception as error:  # the draw is not for this graph: nothing is known of it
            check_interrupted(error)
            return frozenset()
        outputs = self._program.graph.graph.output_node().args[0]
        assert isinstance(outputs, (tuple, list))
        found = {place for place, node in enumerate(outputs) if node in _behind(noting.tied)}
        results = len(outputs) - len(self._original.captured.state)
        if len(draw.calls) > 1 and max(found, default=-1) >= results:  # the calls that follow hang on it
            found = {*range(len(outputs))}
        return frozenset(found)


class _Noting(fx.Interpreter):
    """Runs a graph and notes where values that it orders are as good as equal."""

    def __init__(self, module: fx.GraphModule, near: float) -> None:
        super().__init__(module)
        self._near = near
        self.tied = set[fx.Node]()

    def run_node(self, n: fx.Node) -> Any:
        """Run the node; note it if its values are tied."""
        result = super().run_node(n)
        if n.target in _ORDERING and n not in self.tied and self._is_tied(n, result):
            self.tied.add(n)
        return result

    def _is_tied(self, node: fx.Node, result: Any) -> bool:
        given: dict[str, Any] = {k: self.map_nodes_to_values(v, node) for k, v in arguments(node).items()}
        values: Tensor = given["self"].detach().double()
        if not values.numel() or not values.dim():
            return False
        values = values.movedim(given["dim"], -1)
        far = self._near * values.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1, keepdim=True)
        if node.target in _CHOOSING:
            chosen = result[0].detach().double()
            chosen = chosen if given["keepdim"] else chosen.unsqueeze(given["dim"])
            return bool(_alike(values, chosen.movedim(given["dim"], -1), far).sum(-1).max() > 1)
        ordered = values.sort(descending=given.get("largest", True)).values
        count = given.get("k", ordered.shape[-1])  # the first that is left out may be equal to the last
        return bool(_alike(ordered[..., :-1], ordered[..., 1:], far)[..., :count].any())


def _alike(one: Tensor, other: Tensor, far: Tensor) -> Tensor:
    return (one == other) | ((one - other).abs() <= far) | (one.isnan() & other.isnan())


def _behind(tied: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that read the places that these tell."""
    found, waiting = set[fx.Node](), [*tied]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            is_of_values = user.target is operator.getitem and user.args[1] != _PLACES
            if user in found or (node.target in _ORDERING and is_of_values):
                continue
            found.add(user)
            waiting.append(user)
        if node.target is aten.argsort.default:
            found.add(node)
    return found
