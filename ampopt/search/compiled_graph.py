"""Optimizes one graph that TorchDynamo has captured, and computes it from then on.

A model's weights are inputs of such a graph. They become constants of the optimized one. Each call compares
them with those it was made for, see `ampopt.search.graph_weights`. With other values the graph runs as it
was.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import CaptureError
from ampopt.ir.aliases import Layout, layout_of
from ampopt.ir.capture import capture
from ampopt.ir.model_copy import private_copy, same_tensor, untouched_rng, working_copy
from ampopt.ir.signature import exactly_copied
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.ledger import Ledger
from ampopt.search.graph_weights import GraphWeights
from ampopt.search.options import Options
from ampopt.search.region import optimize_captured
from ampopt.search.rehearsal import Sandbox
from ampopt.search.trials import Progress
from ampopt.system.interrupts import interruptible

logger = logging.getLogger("ampopt")

_NUMBERS, _SYMBOLS = (int, float, complex), (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Graph(nn.Module):
    """A graph that is called with its inputs alone; its weights, by their places, are buffers.

    `names` has the buffer's name for each place, None for an input.
    """

    def __init__(self, graph: fx.GraphModule, weights: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.graph = graph
        self.names = [f"weight_{place}" if place in weights else None for place in range(_count(graph))]
        for place, weight in weights.items():
            self.register_buffer(f"weight_{place}", weight.detach())

    def weight(self, place: int) -> Tensor:
        """The weight that belongs to a place."""
        return self.get_buffer(f"weight_{place}")

    def forward(self, *inputs: Tensor) -> Any:
        """The graph's results. A call of the graph would write errors, and raise them; so does lazy code."""
        if (make_code := getattr(self.graph, "real_recompile", None)) is not None:
            make_code()
        return self.graph.forward(*self.all_inputs(inputs))

    def all_inputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The graph's inputs, with the weights among them."""
        given = iter(inputs)
        return [next(given) if name is None else getattr(self, name) for name in self.names]

    def only(self, places: Sequence[int]) -> _Graph:
        """A graph with the same buffers that gives the results at these places; itself if they are all."""
        if len(places) == len(cast(Sequence[fx.Node], self.graph.graph.output_node().args[0])):
            return self
        graph = copy.deepcopy(self.graph)
        output = graph.graph.output_node()
        results = cast(Sequence[fx.Node], output.args[0])
        output.args = (tuple(results[place] for place in places),)
        graph.recompile()
        weights = {place: getattr(self, name) for place, name in enumerate(self.names) if name is not None}
        return _Graph(graph, weights)


class CompiledGraph:
    """Computes a graph with its optimized module while the weights are those that it was made for.

    `report` is the optimization's. `is_current`: no call has come with other weights so far; after one the
    graph runs as it was.
    """

    def __init__(
        self, original: _Graph, module: OptimizedModule, weights: Mapping[int, Tensor], layout: Layout
    ) -> None:
        """`weights` are the tensors whose values the original's have, by their places among the inputs."""
        self._original, self._module, self._layout, self.is_current = original, module, layout, True
        self._places, self._weights = tuple(weights), GraphWeights(weights)
        self._own = [place for place, name in enumerate(original.names) if name is None]

    @property
    def report(self) -> Ledger:
        """What was tried, and with which outcome."""
        return self._module.report

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The graph's results, which are the caller's."""
        if self._places:
            is_same = self.is_current and self._weights.are_now(inputs)
            if not is_same and not self._takes(inputs):
                return self._original.graph.forward(*inputs)  # type: ignore[no-any-return]
        elif self._layout.is_plain:
            return self._module(*inputs)  # type: ignore[no-any-return]
        return self._layout.laid_out(self._module(*[inputs[place] for place in self._own]), inputs)

    def _takes(self, inputs: tuple[Tensor, ...]) -> bool:
        """Whether other tensors have the weights' values, as those of a copy of the model do."""
        if self.is_current:
            self.is_current = all(same_tensor(inputs[i], self._original.weight(i)) for i in self._places)
            if self.is_current:
                self._weights = GraphWeights({place: inputs[place] for place in self._places})
            else:
                logger.warning(
                    "ampopt: a graph of %d operators runs as it was, because its weights have changed: "
                    "torch.compiler.reset() lets the next call optimize it again",
                    size_of(self._original.graph),
                )
        return self.is_current


def compile_graph(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    places: Collection[int],
    options: Options,
    progress: Progress,
    sandbox: Sandbox,
    *,
    is_part: bool,
) -> CompiledGraph:
    """The optimized graph; `places` are those of the weights among its inputs, which become constants.

    `is_part`: see `Optimizer`.

    Raises CaptureError with the reason where the graph has to run as it was: it may need gradients, has
    sizes, strides or numbers that may change from call to call, writes to its inputs, computes nothing but
    views, or is no faster. Raises KeyboardInterrupt where Ctrl-C has ended the work on it.
    """
    if not all(isinstance(each, Tensor) for each in inputs):
        raise CaptureError(_why_no_constant(graph, inputs))
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        raise CaptureError("it may need gradients: call the model under torch.no_grad()")
    if _derives(graph, inputs):
        raise CaptureError("it turns gradients on itself")
    weights = {place: inputs[place] for place in sorted(places)}
    given = tuple(exactly_copied(each) for place, each in enumerate(inputs) if place not in weights)
    if any(each.device != sandbox.device for each in inputs):
        raise CaptureError("its inputs are on several devices")
    if not given:
        raise CaptureError("it has no inputs but weights")
    with interruptible():
        original = private_copy(_Graph(graph, weights), sandbox.device)
        assert isinstance(original, _Graph)
        layout = _layout_of(original, given, sandbox.device)
        computed = original.only(layout.own)
        captured = capture(computed, given, {}, sandbox.device, lift_state=False)
    name = f"graph of {size_of(graph)} operators"
    given_to = computed, captured, options, name, progress, sandbox
    module, was_cut_off = optimize_captured(*given_to, is_part=is_part)
    if was_cut_off:
        raise KeyboardInterrupt
    if module.report.chosen == ORIGINAL:
        raise CaptureError("nothing that was tried is faster")
    return CompiledGraph(original, module, weights, layout)


def _why_no_constant(graph: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """What, beside values of tensors, may change from call to call: what TorchDynamo has made a symbol."""
    from torch.fx.experimental.symbolic_shapes import free_symbols  # with symbols it has been loaded

    others = [each for each in inputs if not isinstance(each, Tensor)]
    if strange := [each for each in others if not isinstance(each, (*_NUMBERS, *_SYMBOLS))]:
        return f"it is given what is no tensor and no number: {type(strange[0]).__name__}"
    symbols = set[object]().union(*(free_symbols(each) for each in others if isinstance(each, _SYMBOLS)))
    fake = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
    given = [each for each in fake if isinstance(each, Tensor) and each.layout is torch.strided]
    sizes = symbols & free_symbols([tuple(each.shape) for each in given])
    strides = symbols & free_symbols([each.stride() for each in given]) - sizes
    is_number = symbols > sizes | strides or not symbols
    named = [("its sizes", sizes), ("the strides of its inputs", strides), ("numbers in Python", is_number)]
    what = " and ".join(name for name, is_one in named if is_one)
    return f"{what} may change from call to call: torch.compile(..., dynamic=False) makes a graph for each"


def _derives(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> bool:
    """Whether a graph turns gradients on for tensors that have them, or asks for those of a tensor."""
    nodes = [n for m in graph.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes]
    if any(node.target in ("requires_grad_", torch.autograd.grad) for node in nodes):
        return True
    turns_on = any(node.target is torch._C._set_grad_enabled and node.args == (True,) for node in nodes)
    return turns_on and any(each.requires_grad for each in inputs)


def is_weight(tensor: object) -> bool:
    """Whether a graph's input is a parameter or a buffer of a module, with a counter of the writes to it."""
    if not isinstance(tensor, Tensor):
        return False
    is_static = isinstance(tensor, nn.Parameter) or hasattr(tensor, "_dynamo_static_input_type")
    return is_static and not tensor.is_inference()


def size_of(graph: fx.GraphModule) -> int:
    """The number of a graph's operators."""
    return sum(node.op.startswith("call_") for node in graph.graph.nodes)


def _count(graph: fx.GraphModule) -> int:
    return sum(node.op == "placeholder" for node in graph.graph.nodes)


def _layout_of(original: _Graph, inputs: tuple[Tensor, ...], device: torch.device) -> Layout:
    """How the results lie in memory. Raises CaptureError where they cannot be given as the graph does."""
    model, given = working_copy(original), tuple(map(exactly_copied, inputs))
    with torch.no_grad(), untouched_rng(device):
        outputs = model(*given)
    if not isinstance(outputs, tuple) or not all(isinstance(each, Tensor) for each in outputs):
        raise CaptureError("its results are not a tuple of tensors")
    assert isinstance(model, _Graph)
    layout = layout_of(model.all_inputs(given), outputs)
    if not layout.own:
        raise CaptureError("it computes nothing: its results are views of its inputs")
    return layout
