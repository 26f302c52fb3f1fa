"""Names untrained and degenerate networks: outputs that hardly depend on the input, or vanish.

The relative errors of such outputs say nothing: of an output that is the same for every input, lower
precision keeps everything but what the input is about; and outputs that vanish are 0 in float16.
Torchvision's untrained EfficientNet-B0 is both: with the statistics that batch norms begin with, activations
shrink from layer to layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ampopt.ir.beside import exact_outputs, observe
from ampopt.ir.graph import aten, copy_of, finish
from ampopt.ir.program import Program
from ampopt.measure.draws import Tensors, single_valued
from ampopt.measure.verify import Verifier
from ampopt.system.interrupts import check_interrupted

VANISHING = 1e-6
"""Share of an output, or of the activations before it, that counts as nothing: ten roundings of float32.

In torchvision's untrained ShuffleNetV2, an ordinary network, two inputs differ by 5e-5 of the output; in its
EfficientNet-B0 after one batch of training, by 5e-12.
"""

_ADVICE = "load trained weights, or run batch norm statistics, before judging precision"

_SATURATING = {
    aten.softmax.int,
    aten.log_softmax.int,
    aten.sigmoid.default,
    aten.log_sigmoid.default,
    aten.tanh.default,
    aten.hardsigmoid.default,
    aten.hardtanh.default,
    aten.relu6.default,
    aten.clamp.default,
    aten.relu.default,
}
"""Before these, a classifier that is merely sure of itself still differs from input to input."""


def notes_on(verifier: Verifier) -> list[str]:
    """A note for each input of integers that has one value, each output that tells little, and kept inputs.

    An output tells little which hardly depends on the inputs, or vanishes beside the activations before it.
    References that are there anyway give the suspicion; two runs of the graph confirm it, before a saturating
    operator at the output. Outputs of integers, states, and outputs that no input reaches are left out.
    """
    captured, draws = verifier.captured, verifier.draws
    firsts = [verifier.reference(draw)[0] for draw in draws]
    inputs = [draw.calls[0] for draw in draws]
    notes = [
        f"input {place} is {value} everywhere in the example: what depends on other values was not verified"
        for place, value in single_valued(draws)
    ]
    notes += [
        f"the state {place} holds an input of the call before, and a program a copy of it: a later write to "
        "that tensor, as of the next frame into one buffer, does not change it, as it does the original's"
        for place in verifier.kept_inputs or ()
    ]
    suspects: dict[int, tuple[int, ...]] = {}
    for index in range(len(firsts[0]) - len(captured.state)):
        outputs = [first[index] for first in firsts]
        if not outputs[0].is_floating_point() or outputs[0].numel() == 0:
            continue
        read = _inputs_of(captured.program, index)
        pairs = [
            (a, b)
            for a, b in itertools.combinations(range(len(draws)), 2)
            if _differ(inputs[a], inputs[b], read)
        ]
        is_same = bool(pairs) and all(_change(outputs[a], outputs[b]) <= VANISHING for a, b in pairs)
        is_nothing = bool(read) and all(
            _largest([o]) <= VANISHING * max(_largest(inputs[0]), 1.0) for o in outputs
        )
        if is_same or is_nothing:
            suspects[index] = pairs[0] if pairs else (0,)
    return notes + _confirmed(captured.program, suspects, inputs, captured.initial_state)


def _confirmed(
    program: Program, draws: Mapping[int, tuple[int, ...]], inputs: Sequence[Tensors], state: Tensors
) -> list[str]:
    """The notes on outputs that are confirmed, see `_Suspects`: together, or where that fails one by one."""
    if not draws:
        return []
    try:
        return _Suspects(program, draws, inputs, state).notes()
    except Exception as error:  # an operator that knows no float64: of its output nothing is certain
        check_interrupted(error)
    one_by_one = [{index: pair} for index, pair in draws.items()] if len(draws) > 1 else []
    return [note for one in one_by_one for note in _confirmed(program, one, inputs, state)]


class _Suspects:
    """Outputs that may tell little, with the draws that show it, judged by the values before saturation."""

    def __init__(
        self,
        program: Program,
        draws: Mapping[int, tuple[int, ...]],
        inputs: Sequence[Tensors],
        state: Tensors,
    ) -> None:
        """`draws`: the places in `inputs` for each output."""
        module = copy_of(program.graph)
        output = module.graph.output_node()
        results: tuple[fx.Node, ...] = output.args[0]  # type: ignore[assignment]
        nodes = {index: _before_saturation(results[index]) for index in draws}
        output.args = (tuple(nodes.values()),)
        exits = tuple(program.exit[index] for index in draws)
        self._before = program.replace(graph=finish(module), exit=exits)
        self._above = {index: {each.name for each in _reached(node)} for index, node in nodes.items()}
        self._draws, self._inputs, self._state = draws, inputs, state

    def notes(self) -> list[str]:
        """What is confirmed."""
        found = {
            draw: self._exact(draw) for draw in sorted({d for pair in self._draws.values() for d in pair})
        }
        small = dict[int, float]()
        told = dict[int, str]()
        for index, pair in self._draws.items():
            if len(pair) > 1 and (change := _change(*(found[draw][index] for draw in pair))) <= VANISHING:
                much = f"change it by {change:.0e} of its size" if change else "give the very same"
                text = f"output {index} hardly depends on the input: two different inputs {much}"
                told[index] = f"{text}; errors in lower precision are measured against its size: {_ADVICE}"
            else:
                small[index] = _largest([found[pair[0]][index]])
        first = {pair[0] for index, pair in self._draws.items() if index in small}
        for draw in sorted(first):
            seen = observe(self._before, [(*self._inputs[draw], *self._state)])
            for index, size in small.items():
                above = [each.largest for name, each in seen.items() if name in self._above[index]]
                if self._draws[index][0] == draw and size <= VANISHING * max(above, default=0.0):
                    text = f"output {index} vanishes: its largest value is {size:.0e}"
                    told[index] = (
                        f"{text}, after {max(above):.0e} before it, which lower precisions do not hold "
                        f"together: {_ADVICE}"
                    )
        return [told[index] for index in sorted(told)]

    def _exact(self, draw: int) -> dict[int, Tensor]:
        outputs = exact_outputs(self._before, (*self._inputs[draw], *self._state))
        return dict(zip(self._draws, outputs, strict=True))


def _before_saturation(node: fx.Node) -> fx.Node:
    while node.target in _SATURATING or _only_moves(node):
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.op != "call_function":
            break
        node = source
    return node


def _only_moves(node: fx.Node) -> bool:
    """Whether the result has its argument's values, in another shape or dtype: a view, by its schema."""
    if not isinstance(node.target, OpOverload):
        return False
    is_view = any(result.alias_info is not None for result in node.target._schema.returns)
    return is_view or node.target in (aten.clone.default, aten._to_copy.default)


def _inputs_of(program: Program, index: int) -> list[int]:
    """The places of the inputs that an output depends on."""
    results: tuple[fx.Node, ...] = program.graph.graph.output_node().args[0]  # type: ignore[assignment]
    reached = _reached(results[index])
    placeholders = program.graph.graph.find_nodes(op="placeholder")
    return [place for place, node in enumerate(placeholders) if node in reached]


def _reached(node: fx.Node) -> set[fx.Node]:
    """A node and all that it is computed from."""
    reached, todo = set[fx.Node](), [node]
    while todo:
        node = todo.pop()
        if node not in reached:
            reached.add(node)
            todo += node.all_input_nodes
    return reached


def _differ(a: Tensors, b: Tensors, read: list[int]) -> bool:
    return any(not torch.equal(a[place], b[place]) for place in read if place < len(a))


def _change(a: Tensor, b: Tensor) -> float:
    """The relative change from one output to another; infinite where one is not finite."""
    if a.shape != b.shape or not bool(torch.isfinite(a).all() & torch.isfinite(b).all()):
        return float("inf")
    norm = max(float(torch.linalg.vector_norm(each)) for each in (a, b))
    change = float(torch.linalg.vector_norm(a - b))
    return change / norm if norm > 0 else 0.0


def _largest(tensors: Tensors | list[Tensor]) -> float:
    floats = [each for each in tensors if each.is_floating_point() and each.numel()]
    return max((float(each.abs().max()) for each in floats), default=0.0)
