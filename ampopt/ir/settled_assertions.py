"""Takes assertions out of an exported graph that no input decides.

A model may compute what it asserts from sizes alone: that the maps of an image have as many pixels as there
are queries. An export cannot tell the numbers of such tensors, so that it leaves the assertion in the graph,
which would then seem to hold for some inputs only.

Correct because: what is computed from constants of the graph, by operators that are no random ones, and in
memory that nothing else writes to, is the same in every call. It is computed here, and only what holds is
taken out. What memory holds that nothing has written to may be anything: all is computed again with the
largest numbers there, or NaN, and with the least. Weights count as inputs: their values may be exchanged.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ampopt.errors import first_line
from ampopt.ir.aliasing import families, written_by
from ampopt.ir.graph import aten, calls, draws_random_numbers
from ampopt.system.interrupts import check_interrupted

logger = logging.getLogger("ampopt")

_ON_NUMBERS: set[Callable[..., Any]] = {
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    *(operator.and_, operator.or_, operator.not_, operator.getitem, operator.truediv, operator.pow),
    *(torch.sym_not, torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_ite),
}

_OF_A_TRUTH = "cast_symbool_to_symint_guardless"
"""The name of PyTorch 2.11's function that makes 0 or 1 of a truth; its module takes a second to load."""

_UNWRITTEN = {
    *(
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.empty_permuted.default,
    ),
    *(aten.new_empty.default, aten.new_empty_strided.default),
}
"""Operators that give memory as it is."""

_BOUNDS = {aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default}


def settle_assertions(exported: ExportedProgram) -> None:
    """Take the assertions out that hold whatever the inputs are, with what was computed for them alone."""
    module = exported.graph_module
    asserted = list(calls(module, [aten._assert_scalar.default]))
    if not asserted:
        return
    constants = _Constants(exported)
    settled = [node for node in asserted if constants.holds(node.args[0])]
    for node in settled:
        condition = node.args[0]
        module.graph.erase_node(node)
        if isinstance(condition, fx.Node):
            _erase_unread(condition)
    if settled:
        module.recompile()


class _Constants:
    """What a graph computes from its constants, and the values of these."""

    def __init__(self, exported: ExportedProgram) -> None:
        self._exported, self._graph = exported, exported.graph_module.graph
        self._targets = {
            spec.arg.name: spec.target
            for spec in exported.graph_signature.input_specs
            if spec.kind is InputKind.CONSTANT_TENSOR
        }
        self._nodes = set(self._constant())
        self._values: list[dict[fx.Node, Any]] | None = None

    def holds(self, condition: Any) -> bool:
        """Whether a condition is true in every call; False where it is not known."""
        if not isinstance(condition, fx.Node):
            return bool(condition)
        if condition not in self._nodes:
            return False
        if self._values is None:
            self._values = [dict(self._computed(is_largest)) for is_largest in (True, False)]
        return all(bool(values.get(condition, False)) for values in self._values)

    def _constant(self) -> Iterator[fx.Node]:
        """The nodes that no input decides, under any alias of their memory."""
        family = families(self._graph)
        decided = {id(family[node]) for node in self._graph.nodes if self._is_decided(node)}
        while True:
            more = {
                id(family[reached])
                for node in self._graph.nodes
                if any(id(family[source]) in decided for source in (node, *node.all_input_nodes))
                for reached in (node, *written_by(node))
            }
            if more <= decided:
                break
            decided |= more
        return (node for node in self._graph.nodes if id(family[node]) not in decided)

    def _is_decided(self, node: fx.Node) -> bool:
        """Whether a node may be another value in another call by itself."""
        if node.op == "placeholder":
            target = self._targets.get(node.name)
            return not isinstance(self._exported.constants.get(str(target)), Tensor)
        if node.op != "call_function":
            return node.op != "output"
        if isinstance(node.target, OpOverload):
            is_known = node.target.namespace in ("aten", "prims")
            return not is_known or draws_random_numbers(node)
        return node.target not in _ON_NUMBERS and getattr(node.target, "__name__", None) != _OF_A_TRUTH

    def _computed(self, is_largest: bool) -> Iterator[tuple[fx.Node, Any]]:
        """The values of constant nodes, computed in their order; of none that is after an error.

        `is_largest` tells what memory holds that nothing has written to.
        """
        values: dict[fx.Node, Any] = {}
        for node in (each for each in self._graph.nodes if each in self._nodes and each.op != "output"):
            try:
                values[node] = self._value(node, values)
                if node.target in _UNWRITTEN:
                    _fill(values[node], is_largest)
            except Exception as error:  # an assertion that does not hold, perhaps
                check_interrupted(error)
                logger.debug("ampopt: an assertion stays in the graph: %s", first_line(error))
                return
            yield node, values[node]

    def _value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "placeholder":
            constant: Any = self._exported.constants[str(self._targets[node.name])]
            return constant.detach().clone()
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        assert callable(node.target)
        with torch.no_grad():
            return node.target(*args, **kwargs)


def _fill(tensor: Tensor, is_largest: bool) -> None:
    if tensor.dtype is torch.bool:
        tensor.fill_(is_largest)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan if is_largest else -torch.inf)
    else:
        bounds = torch.iinfo(tensor.dtype)
        tensor.fill_(bounds.max if is_largest else bounds.min)


def _erase_unread(node: fx.Node) -> None:
    """Erase a node that nothing reads but bounds of it, and then what it has read; no call that writes."""
    bounds = [user for user in node.users if user.target in _BOUNDS]
    is_unread = len(bounds) == len(node.users)
    if not is_unread or node.op != "call_function" or written_by(node):
        return
    sources = node.all_input_nodes
    for each in (*bounds, node):
        node.graph.erase_node(each)
    for source in sources:
        _erase_unread(source)
