"""Divides a program at the rounds of an unrolled loop, so that a compiler sees the body of the loop once.

`torch.export` unrolls loops: RAFT refines a flow twelve times with the same weights, and is 1,286 calls. Its
rounds are the same graph with other inputs, and what is compiled for one answers for all of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from ampopt.engines.cuts import LEAST_CALLS, crossings, cuts_of, may_cross, varying_in
from ampopt.engines.divided import Division, Known, Piece, divide, forget_pieces, has_plain_outputs
from ampopt.ir.graph import calls
from ampopt.ir.model_hash import weight_bytes
from ampopt.ir.program import Program
from ampopt.ir.shapes import described
from ampopt.system.interrupts import check_interrupted

logger = logging.getLogger("ampopt")

LEAST_ROUNDS = 3
"""Rounds of a loop: with fewer, what lies before and after them takes most of a compiler's time."""

Run = tuple[int, int, int]
"""The first call, the period and the length of a run of rounds, in calls."""

_runs: weakref.WeakKeyDictionary[fx.GraphModule, Run | None] = weakref.WeakKeyDictionary()
_known: Known = weakref.WeakKeyDictionary()


def forget(program: Program) -> None:
    """Let go of the pieces of a program, in rounds or not, whose examples take memory."""
    _known.pop(program.graph, None)
    forget_pieces(program)


def in_rounds(program: Program, count: int = 1) -> Division | None:
    """A program in what is before a loop, its rounds, and what is after it; None where it has no such loop.

    Rounds are equal where their calls, their weights and what they are given look the same: they share a
    program. Where `count` is 3 or more, what is before the loop is in up to `count` - 1 pieces: with a round
    that many compilers work at once. Pieces are as in `divided`.
    """
    if program.engine is not None:
        return None
    known = _known.setdefault(program.graph, {})
    if count not in known:
        try:
            known[count] = _divided(program, count)
        except Exception as error:  # an operator whose shapes depend on values
            check_interrupted(error)
            logger.debug("ampopt: a program is not divided in rounds", exc_info=True)
            known[count] = None
    return known[count]


def is_unrolled(module: fx.GraphModule) -> bool:
    """Whether a graph looks like the rounds of a loop, which rewrites may have to make equal."""
    return _run_of(module) is not None


def calls_once(module: fx.GraphModule) -> int:
    """The number of a graph's calls, those that look like the rounds of a loop counted for one round."""
    count, found = sum(1 for _ in calls(module)), _run_of(module)
    if found is None:
        return count
    _, period, length = found
    return count - length + period


def _run_of(module: fx.GraphModule) -> Run | None:
    """See `_longest_run`. It is asked for often, and weights on a GPU are copied for it."""
    if module not in _runs:
        _runs[module] = _longest_run([_signature(node) for node in calls(module)])
    return _runs[module]


def _divided(program: Program, count: int) -> Division | None:
    nodes, made = list(program.graph.graph.nodes), list(calls(program.graph))
    found = _run_of(program.graph)
    if found is None:
        return None
    first, period, length = found
    whole = described(program)
    if not has_plain_outputs(whole):
        return None
    whole_nodes = list(whole.graph.nodes)
    varying = varying_in(whole_nodes)
    crossing = {whole_nodes[place]: its for place, its in crossings(whole_nodes) if varying.issuperset(its)}
    twins = dict(zip(made, (n for n in whole_nodes if n.op == "call_function"), strict=True))
    places = {node: place for place, node in enumerate(nodes)}
    best: list[int] = []
    fewest = 0
    for offset in range(period):
        starts = [made[at] for at in range(first + offset, first + length + 1, period) if at < len(made)]
        over = [crossing.get(twins[node], []) for node in starts]
        if not all(its and may_cross(its, whole_nodes) for its in over):
            continue
        crossed = sum(map(len, over))
        if not best or crossed < fewest:
            best, fewest = [places[node] for node in starts], crossed
    if len(best) < LEAST_ROUNDS:
        return None
    room = sum(places[node] < best[0] for node in made) // LEAST_CALLS
    before = cuts_of(whole, most, best[0]) if (most := min(count - 1, room)) > 1 else []
    pieces = (division := divide(program, whole, [*before, *best])).pieces
    kinds = _kinds(pieces)
    if len(set(kinds)) + LEAST_ROUNDS > len(kinds) + 1:
        return None  # they look like rounds, and have other weights
    return dataclasses.replace(division, kinds=kinds)


def _signature(node: fx.Node) -> Hashable:
    """What a call is, but for the results of other calls that it is given; weights by a sample."""
    return str(node.target), *(
        _shown(each, {}, _sampled) for each in (node.args, sorted(node.kwargs.items()))
    )


def _shown(value: object, numbers: Mapping[fx.Node, int], weight: Callable[[Tensor], Hashable]) -> Hashable:
    """An argument of a call, with the results of others by number."""
    if isinstance(value, fx.Node):
        if value.op == "get_attr":
            return weight(operator.attrgetter(str(value.target))(value.graph.owning_module))
        return "result", numbers.get(value)
    if isinstance(value, (list, tuple)):
        return tuple(_shown(each, numbers, weight) for each in value)
    return repr(value)


def _sampled(weight: Tensor) -> Hashable:
    """A weight's shape and a few of its numbers, which tell those of other layers apart."""
    if not _is_plain(weight):
        return id(weight)
    ends = [weight[(place,) * (weight.dim() - 1)] for place in (0, -1)] if weight.numel() else []
    return _look(weight), *(weight_bytes(end) for end in ends)


def _whole(weight: Tensor) -> Hashable:
    """All that a weight is: each call of a loop may have a copy of its own, in another layout."""
    if not _is_plain(weight):
        return id(weight)
    return _look(weight), hashlib.blake2b(weight_bytes(weight)).digest()


def _is_plain(weight: Tensor) -> bool:
    """Whether its numbers can be read; another, sparse or packed, is equal to itself alone."""
    is_own = type(weight) in (Tensor, nn.Parameter) and not weight.is_conj() and not weight.is_neg()
    return (
        is_own
        and not weight.is_quantized
        and weight.layout is torch.strided
        and weight.device.type in ("cpu", "cuda")
    )


def _longest_run(signatures: Sequence[Hashable]) -> Run | None:
    """The longest run of rounds of `LEAST_CALLS` or more.

    A run of length n and period p has every call again p calls later; None: there are too few rounds.
    """
    numbers: dict[Hashable, int] = {}
    row = [numbers.setdefault(signature, len(numbers)) for signature in signatures]
    best: Run | None = None
    for period in range(LEAST_CALLS, len(row) // LEAST_ROUNDS + 1):
        start = 0
        for same, group in itertools.groupby(map(operator.eq, row, row[period:])):
            length = sum(1 for _ in group)
            if same and length >= (LEAST_ROUNDS - 1) * period and (best is None or length + period > best[2]):
                best = start, period, length + period
            start += length
    return best


def _kinds(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """For each piece, the number of the first one that is equal to it."""
    firsts: dict[Hashable, int] = {}
    return tuple(firsts.setdefault(form(piece), number) for number, piece in enumerate(pieces))


def form(piece: Piece) -> Hashable:
    """What two pieces have in common where what is compiled for one answers for the other."""
    numbers: dict[fx.Node, int] = {}
    made = list[Hashable]()
    for node in piece.program.graph.graph.nodes:
        if node.op != "get_attr":
            numbers[node] = len(numbers)
            given = (node.args, sorted(node.kwargs.items()))
            name = str(node.target) if node.op == "call_function" else ""
            made.append((node.op, name, *(_shown(each, numbers, _whole) for each in given)))
    return tuple(made), piece.program.entry, piece.program.exit, tuple(map(_look, piece.program.examples))


def _look(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()
