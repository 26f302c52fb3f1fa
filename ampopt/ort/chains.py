"""Chains of narrow convolutions in ONNX graphs, computed row by row by one operator of our own.

ONNX Runtime's convolutions compute blocks of 16 channels (8 without AVX-512), and one operator after another:
with fewer channels than a block most of their work is wasted, tensors are reordered before and after, and a
large image with few channels goes through memory once for every operator. `cpp/chain.h` computes a row of
each convolution at a time, vector by vector of pixels, whatever the number of channels, and what is between
the convolutions stays in the cache. EncDecMil18's blocks of four convolutions with 8 and 16 channels take
about a third of their time in ONNX Runtime (a measurement by itself, not in the committed results).

Correct because: every convolution computes the same products and sums them in another order; rows and columns
outside the image are zero, as padding says. A result that something outside the chain reads is never inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ampopt.ort.blocked import block_size
from ampopt.ort.options import SessionOptions
from ampopt.ort.own_operators import ACTIVATIONS, OWN_DOMAIN, attributes, import_domain, threads_of
from ampopt.ort.session import Array
from ampopt.ort.weights import add_weights, remove_unread

MOST_CHANNELS = 32
"""Channels of the widest tensor of a chain: wider ones fill ONNX Runtime's blocks."""

MOST_REACH = 32
"""Rows or columns that a chain reads around a pixel; they are computed again at the borders of tiles."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A convolution of a chain with the sum and the activation after it.

    `source` and `addend` are numbers of tensors: 0 is the chain's input, i + 1 the result of step i. `nodes`
    are those that it stands for; `result` is the name of the last one's output.
    """

    source: int
    addend: int
    activation: tuple[int, float, float]
    nodes: tuple[Any, ...]

    @property
    def result(self) -> str:
        """The name of the tensor that it gives."""
        name: str = self.nodes[-1].output[0]
        return name


@dataclasses.dataclass(frozen=True)
class Chain:
    """Convolutions one after another, named by their result."""

    steps: tuple[Step, ...]

    @property
    def name(self) -> str:
        """The name of its result."""
        return self.steps[-1].result

    @property
    def source(self) -> str:
        """The name of its input."""
        name: str = self.steps[0].nodes[0].input[0]
        return name

    @property
    def nodes(self) -> Iterator[Any]:
        """The nodes that it stands for."""
        return (node for step in self.steps for node in step.nodes)


def with_chains(model: bytes, options: SessionOptions, names: Collection[str]) -> bytes:
    """The model with the chains of these names as one operator each. `model`: as it was exported."""
    from onnx import load_from_string

    found = load_from_string(model)
    graph = _Graph(found.graph)
    for chain in [each for each in graph.chains() if each.name in names]:
        _replace(found.graph, chain, graph, options)
    import_domain(found)
    data: bytes = found.SerializeToString()
    return data


def parts(model: bytes) -> dict[str, tuple[bytes, tuple[int, ...]]]:
    """Every chain as a model of its own, by its name, with the shape of its input.

    Chains of images of unknown size are left out.
    """
    from onnx import TensorProto, helper, load_from_string

    found = load_from_string(model)
    graph, shapes = _Graph(found.graph), _shapes(found.graph)
    made = dict[str, tuple[bytes, tuple[int, ...]]]()
    for chain in graph.chains():
        shape = shapes.get(chain.source, ())
        if len(shape) != 4 or not all(shape):
            continue
        nodes = list(chain.nodes)
        read = {name for node in nodes for name in node.input}
        kind = TensorProto.FLOAT
        part = helper.make_graph(
            nodes,
            "chain",
            [helper.make_tensor_value_info(chain.source, kind, shape)],
            [helper.make_tensor_value_info(chain.name, kind, (shape[0], graph.filters(chain), *shape[2:]))],
            [stored for name, stored in graph.stored.items() if name in read],
        )
        alone = helper.make_model(part, opset_imports=found.opset_import, ir_version=found.ir_version)
        made[chain.name] = alone.SerializeToString(), shape
    return made


class _Graph:
    """An ONNX graph that is searched for chains."""

    def __init__(self, graph: Any) -> None:
        self.stored = {each.name: each for each in graph.initializer}
        self._nodes = list(graph.node)
        self._outputs = {value.name for value in graph.output}
        self._readers: dict[str, list[Any]] = {}
        for node in self._nodes:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)

    def chains(self) -> Iterator[Chain]:
        """Every chain of two convolutions or more; each convolution is in one of them at most."""
        taken = set[str]()
        convs = [node for node in self._nodes if self._is_suited(node)]
        for place, conv in enumerate(convs):
            if conv.output[0] in taken:
                continue
            after = [each for each in convs[place:] if each.output[0] not in taken]
            found = max((self._grown(after, aside=aside) for aside in (False, True)), key=len)
            if len(found) > 1:
                taken |= {step.nodes[0].output[0] for step in found}
                yield Chain(tuple(found))

    def array(self, name: str) -> Array:
        """A stored tensor."""
        from onnx import numpy_helper

        return numpy_helper.to_array(self.stored[name])

    def filters(self, chain: Chain) -> int:
        """The channels of a chain's result."""
        return int(self.stored[chain.steps[-1].nodes[0].input[1]].dims[0])

    def _grown(self, convs: Sequence[Any], *, aside: bool) -> list[Step]:
        """The longest chain that begins with the first of these convolutions, of which only the end is read.

        `aside`: other convolutions may read the chain's input, too, as those of a shortcut do.
        """
        tensors = {convs[0].input[0]: (0, self.stored[convs[0].input[1]].dims[1])}
        steps, whole, reach = list[Step](), list[Step](), np.zeros(2)
        for conv in convs:
            number, _ = tensors.get(conv.input[0], (-1, 0))
            if number < 0 or (number == 0 and steps and not aside):
                continue
            _, has = _kernel(conv, self.stored)
            reach = reach + has
            if max(reach) > MOST_REACH:
                break
            steps.append(self._step(conv, number, tensors))
            tensors[steps[-1].result] = len(steps), self.stored[conv.input[1]].dims[0]
            if self._is_whole(steps):
                whole = list(steps)
        return whole

    def _is_whole(self, steps: Sequence[Step]) -> bool:
        """Whether nothing outside reads what is inside."""
        inside = {id(node) for step in steps for node in step.nodes}
        return all(
            step.result not in self._outputs
            and all(id(reader) in inside for reader in self._readers.get(step.result, []))
            for step in steps[:-1]
        )

    def _step(self, conv: Any, source: int, tensors: Mapping[str, tuple[int, int]]) -> Step:
        """A convolution with the sum and the activation that alone read its result."""
        nodes, addend, activation = [conv], -1, (0, 0.0, 0.0)
        add = self._only_reader(conv.output[0])
        if add is not None and add.op_type == "Add":
            other = next((name for name in add.input if name != conv.output[0]), "")
            number, channels = tensors.get(other, (-1, 0))
            if channels == self.stored[conv.input[1]].dims[0]:
                nodes, addend = [conv, add], number
        reader = self._only_reader(nodes[-1].output[0])
        if reader is not None and (found := self._activation(reader)) is not None:
            nodes, activation = [*nodes, reader], found
        return Step(source, addend, activation, tuple(nodes))

    def _only_reader(self, name: str) -> Any | None:
        readers = self._readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self._outputs else None

    def _activation(self, node: Any) -> tuple[int, float, float] | None:
        """The activation's index and numbers, as the operator wants them; None if it cannot fuse it."""
        if node.domain or node.op_type not in ACTIVATIONS:
            return None
        alpha = beta = 0.0
        if node.op_type == "LeakyRelu":
            alpha = attributes(node).get("alpha", 0.01)
        elif node.op_type == "Clip":
            bounds = [name for name in node.input[1:] if name in self.stored]
            if len(bounds) != 2:
                return None
            alpha, beta = (float(self.array(name)) for name in bounds)
        return ACTIVATIONS.index(node.op_type), alpha, beta

    def _is_suited(self, node: Any) -> bool:
        """A narrow convolution with stride 1 that keeps the size of the image and has constant weights."""
        if node.op_type != "Conv" or node.domain or not all(n in self.stored for n in node.input[1:] if n):
            return False
        weight, has = self.stored[node.input[1]], attributes(node)
        if len(weight.dims) != 4 or max(weight.dims[:2]) > MOST_CHANNELS or has.get("group", 1) != 1:
            return False
        if has.get("auto_pad", b"NOTSET") != b"NOTSET" or set(has.get("strides", [1])) != {1}:
            return False
        pads, (_, reach) = has.get("pads", [0] * 4), _kernel(node, self.stored)
        keeps = all(pads[side] + pads[side + 2] == reach[side] for side in range(2))
        return (
            keeps
            and max(reach) <= MOST_REACH
            and all(np.isfinite(self.array(name)).all() for name in node.input[1:] if name)
        )


def _kernel(conv: Any, stored: Mapping[str, Any]) -> tuple[list[int], Array]:
    """A convolution's dilations, and how many rows and columns it reads beyond a pixel's own, in all."""
    dilations = attributes(conv).get("dilations", [1, 1])
    size = np.array(stored[conv.input[1]].dims[2:])
    return dilations, (size - 1) * dilations


def _shapes(graph: Any) -> dict[str, tuple[int, ...]]:
    return {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.input, *graph.output)
    }


def _replace(graph: Any, chain: Chain, found: _Graph, options: SessionOptions) -> None:
    """Put our operator in the place of a chain's last node, and remove the others and their weights."""
    from onnx import helper

    steps = [_packed(step, found) for step in chain.steps]
    program = np.array([row for row, _ in steps], np.float32)
    weights = np.concatenate([packed for _, packed in steps])
    node = helper.make_node(
        "ConvChain",
        [
            chain.source,
            add_weights(graph, f"{chain.name}_program", program),
            add_weights(graph, f"{chain.name}_weights", weights),
        ],
        [chain.name],
        name=f"{chain.name}_chain",
        domain=OWN_DOMAIN,
        threads=threads_of(options),
    )
    replaced = {result for each in chain.nodes for result in each.output}
    kept = list[Any]()
    for each in graph.node:
        if chain.name in each.output:
            kept.append(node)
        elif not replaced & {*each.output}:
            kept.append(each)
    read = [name for each in chain.nodes for name in each.input]
    del graph.node[:]
    graph.node.extend(kept)
    remove_unread(graph, read)


def _packed(step: Step, graph: _Graph) -> tuple[list[float], Array]:
    """A step's row of the program and its weights, as `cpp/chain.h` reads them."""
    conv = step.nodes[0]
    weight = graph.array(conv.input[1])
    filters, channels, height, width = weight.shape
    bias = graph.array(conv.input[2]) if len(conv.input) > 2 and conv.input[2] else np.zeros(filters)
    dilations, _ = _kernel(conv, graph.stored)
    top, left = attributes(conv).get("pads", [0] * 4)[:2]
    row = [step.source, step.addend, channels, filters, height, width, *dilations, top, left]
    return [*row, *step.activation], packed(weight, bias, block_size())


def packed(weight: Array, bias: Array, block: int) -> Array:
    """Weights (K, C, Y, X) and biases (K): for F filters at a time their biases, then (C, Y, X, F)."""
    pieces, start = list[Array](), 0
    while start < len(weight):
        count = next(n for n in (block // 2, 4, 2, 1) if n <= min(len(weight) - start, block // 2))
        end = start + count
        pieces += [bias[start:end], np.moveaxis(weight[start:end], 0, -1).ravel()]
        start = end
    return np.concatenate(pieces).astype(np.float32)
