"""Divides a program into pieces that can be compiled at once, and chains what was made of them.

A compiler works on one core. Pieces that follow each other keep several of them busy, and cost what it could
have fused across a cut: so cuts are where little crosses, before a convolution or a product.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ampopt.engines.cuts import LEAST_CALLS, border_of, cuts_of, has_strides
from ampopt.ir.graph import calls
from ampopt.ir.program import Program
from ampopt.ir.shapes import described
from ampopt.system.interrupts import check_interrupted

logger = logging.getLogger("ampopt")

Function = Callable[..., Sequence[Tensor]]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a program: a program of its own, and the names of its inputs and outputs in the whole."""

    program: Program
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @functools.cached_property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """Those of its inputs."""
        borders = zip(self.program.entry, self.program.examples, strict=True)
        return tuple(border.convert(example).stride() for border, example in borders)


@dataclasses.dataclass(frozen=True)
class Division:
    """A program in pieces, in order. `inputs` and `outputs` are the names of those of the whole.

    `kinds`: for each piece, the number of the first one whose program answers for it, too; empty: its own.
    """

    pieces: tuple[Piece, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kinds: tuple[int, ...] = ()

    @property
    def programs(self) -> list[Program]:
        """The pieces' programs, equal ones once."""
        firsts = dict.fromkeys(self.kinds or range(len(self.pieces)))
        return [self.pieces[number].program for number in firsts]

    def each(self, made: Sequence[Function]) -> list[Function]:
        """For each piece, what was made of its program: `made` is in the order of `programs`."""
        kinds = self.kinds or tuple(range(len(self.pieces)))
        by_kind = dict(zip(dict.fromkeys(kinds), made, strict=True))
        return [by_kind[kind] for kind in kinds]


class Step(NamedTuple):
    """A function of a chain, and the part of the graph that it computes.

    `strides` are those that its inputs get, and `over` names what nothing reads after it.
    """

    graph: fx.GraphModule
    function: Function
    inputs: tuple[str, ...]
    strides: tuple[tuple[int, ...], ...]
    outputs: tuple[str, ...]
    over: tuple[str, ...]


class Chain:
    """Functions of the programs of a division, in `steps`: flat inputs in, flat outputs out."""

    def __init__(self, division: Division, functions: Sequence[Function]) -> None:
        """It keeps no example: on a GPU what crosses the cuts may be hundreds of MiB."""
        self._inputs, self._outputs = division.inputs, division.outputs
        last = {name: place for place, piece in enumerate(division.pieces) for name in piece.inputs}
        self.steps = [
            Step(
                piece.program.graph,
                function,
                piece.inputs,
                piece.strides,
                piece.outputs,
                tuple(n for n in piece.inputs if last[n] == place and n not in self._outputs),
            )
            for place, (piece, function) in enumerate(
                zip(division.pieces, division.each(functions), strict=True)
            )
        ]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run them. What crosses a cut gets the strides for which the next piece was compiled."""
        return self.run(tensors, lambda _: contextlib.nullcontext())

    def run(
        self, tensors: Sequence[Tensor], around: Callable[[Step], contextlib.AbstractContextManager[object]]
    ) -> tuple[Tensor, ...]:
        """The same, each step in a context of its own."""
        values = dict(zip(self._inputs, tensors, strict=True))
        for step in self.steps:
            wanted = zip(step.inputs, step.strides, strict=True)
            given = [_with_strides(values[name], strides) for name, strides in wanted]
            for name in step.over:
                del values[name]
            with around(step):
                values.update(zip(step.outputs, step.function(*given), strict=True))
        return tuple([values[name] for name in self._outputs])


def _with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """The tensor, or a copy that has these strides where they matter."""
    if has_strides(tensor, strides):
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


Known = weakref.WeakKeyDictionary[fx.GraphModule, dict[int, Division | None]]

_known: Known = weakref.WeakKeyDictionary()


def forget_pieces(program: Program) -> None:
    """Let go of the pieces of a program, whose examples take memory."""
    _known.pop(program.graph, None)


def divided(program: Program, count: int) -> Division | None:
    """A program in up to `count` pieces of about as many calls; None where there is no good cut.

    Nothing runs but where a piece may refuse zeros: shapes and strides are propagated. A first run of a cold
    process takes seconds on a GPU, for which compilers would wait. The same count gives the same pieces.
    """
    count = min(count, sum(1 for _ in calls(program.graph)) // LEAST_CALLS)
    known = _known.setdefault(program.graph, {})
    if count >= 2 and count not in known and program.engine is None:
        try:
            known[count] = _in_pieces(program, count)
        except Exception as error:  # an operator whose shapes depend on values
            check_interrupted(error)
            logger.debug("ampopt: a program is not divided", exc_info=True)
            known[count] = None
    return known.get(count)


def _in_pieces(program: Program, count: int) -> Division | None:
    whole = described(program)
    if not has_plain_outputs(whole):
        return None
    while count >= 2:
        cuts = cuts_of(whole, count)
        if len(cuts) + 1 == count:
            return divide(program, whole, cuts)
        count = len(cuts) + 1
    return None


def has_plain_outputs(whole: fx.GraphModule) -> bool:
    """Whether everything that the graph returns is an input or the result of a call."""
    [output] = whole.graph.find_nodes(op="output")
    returned: Any = output.args[0]
    return all(isinstance(node, fx.Node) and node.op != "get_attr" for node in returned)


def divide(program: Program, whole: fx.GraphModule, cuts: Sequence[int]) -> Division:
    """The pieces between places in the list of nodes; `whole` is the graph as `described`."""
    nodes, its_nodes = list(program.graph.graph.nodes), list(whole.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    [output] = [node for node in nodes if node.op == "output"]
    results: Any = output.args[0]
    values = {node: its.meta.get("val") for node, its in zip(nodes, its_nodes, strict=True)}
    given = dict(zip(inputs, zip(program.entry, program.examples, strict=True), strict=True))
    crossing = _crossing(program, cuts) if any(map(_may_refuse, calls(program.graph))) else {}
    pieces = []
    for start, end in itertools.pairwise((0, *cuts, len(nodes))):
        mine = [node for node in nodes[start:end] if node.op == "call_function"]
        inside = set(mine)
        needed = dict.fromkeys(
            source
            for node in mine
            for source in node.all_input_nodes
            if source not in inside and source.op != "get_attr"
        )
        later = {user for node in mine for user in node.users} - inside
        kept = [node for node in mine if later.intersection(node.users)]
        for node in needed:
            if node not in given:
                given[node] = border_of(values[node]), _stand_in(values[node], crossing.get(node))
        pieces.append(
            Piece(
                program.replace(
                    graph=_extracted(program.graph, mine, list(needed), kept),
                    entry=tuple(given[node][0] for node in needed),
                    examples=tuple(given[node][1] for node in needed),
                    exit=tuple(border_of(values[node]) for node in kept),
                ),
                tuple(node.name for node in needed),
                tuple(node.name for node in kept),
            )
        )
    return Division(tuple(pieces), tuple(node.name for node in inputs), tuple(node.name for node in results))


_REFUSING = (
    *("linalg", "cholesky", "inverse", "lu_solve", "lu_unpack", "det", "triangular_solve", "_assert"),
    *("multinomial", "bernoulli"),
)
"""Parts of the names of operators that may fail on zeros: a matrix of zeros has no inverse."""

_NEVER_REFUSING = ("detach", "linalg_vector_norm", "linalg_cross", "linalg_vecdot", "linalg_matmul")
"""Parts of the names of those that do not, of which `functional.normalize` makes one."""


def _may_refuse(node: fx.Node) -> bool:
    name = str(node.target)
    return any(p in name for p in _REFUSING) and not any(p in name for p in _NEVER_REFUSING)


def _crossing(program: Program, cuts: Sequence[int]) -> dict[fx.Node, Tensor]:
    """What crosses the cuts in a call with the program's examples."""
    places = {node: place for place, node in enumerate(program.graph.graph.nodes)}
    wanted = {
        node
        for node in calls(program.graph)
        if any(
            places[node] < cut <= places[user] for user in node.users if user.op != "output" for cut in cuts
        )
    }
    found: dict[fx.Node, Tensor] = {}

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            made = super().run_node(n)
            if n in wanted:
                found[n] = made
            return made

    with program.scope(), torch.no_grad():
        entered = [border.convert(t) for border, t in zip(program.entry, program.examples, strict=True)]
        Noting(program.graph).run(*entered)
    return found


def _stand_in(like: Tensor, made: Tensor | None) -> Tensor:
    """A tensor that looks like a result of a piece, with its values or, where they do not matter, zeros."""
    stand_in = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return stand_in.zero_() if made is None else stand_in.copy_(made)


def _extracted(
    whole: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """A graph of some calls of another one, with the weights that they read."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in inputs}

    def own(node: fx.Node) -> fx.Node:
        if node not in made:
            made[node] = graph.node_copy(node)  # a weight
        return made[node]

    for node in nodes:
        for source in node.all_input_nodes:
            own(source)
        made[node] = graph.node_copy(node, own)
    graph.output(tuple(made[node] for node in outputs))
    piece = fx.GraphModule(whole, graph)
    piece.eval()
    return piece
