"""Removes layout changes (reorderings) from ONNX Runtime's CPU graphs.

On a CPU, ONNX Runtime computes convolutions and pooling on tensors in blocks of channels (its NCHWc layout, 8
or 16 numbers to a block). If another operator is between them, it reorders the numbers before and after it.
But an elementwise operator works in any order, channels behind channels are blocks behind blocks, and a
squeeze-and-excite product is a depthwise 1x1 convolution whose weights are computed. `keep_blocked` lets ONNX
Runtime optimize a model, and then moves these operators into the blocked layout, too. The results do not
change: every operator computes the same values in another order.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from ampopt.ort.options import SessionOptions
from ampopt.ort.profile import optimized

DOMAIN = "com.microsoft.nchwc"

ELEMENTWISE = {
    *("Add", "Sub", "Mul", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Clip"),
    *("Elu", "Abs", "Neg", "Exp", "Sqrt", "Erf", "Max", "Min"),
}

FUSED = {"Relu", "Sigmoid", "Tanh"}
"""Activations without parameters that a blocked convolution can fuse."""


def keep_blocked(model: bytes, options: SessionOptions, library: Path | None = None) -> bytes | None:
    """The model as ONNX Runtime optimizes it, with fewer reorderings; None if none can be removed.

    It is valid for this version of ONNX Runtime on this type of processor, and must be loaded without further
    optimization. `library`: of the custom operators in it. Raises SessionError if ONNX Runtime does not load
    the model.
    """
    import onnx

    blocked = _Blocked(onnx.load_from_string(optimized(model, options, library)), block_size())
    return blocked.rewritten()


@functools.cache
def block_size() -> int:
    """The number of channels in a block on this machine, read from optimized weights of 8 channels."""
    from onnx import TensorProto, helper, load_from_string, numpy_helper

    weight = numpy_helper.from_array(np.ones((8, 8, 1, 1), np.float32), "w")
    info = functools.partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=[1, 8, 4, 4])
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "probe", [info(name="x")], [info(name="y")], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    found = load_from_string(optimized(model.SerializeToString(), SessionOptions()))
    return int(max(each.dims[0] for each in found.graph.initializer))


class _Blocked:
    """An optimized model while it is rewritten. `twin`: the name of a tensor in blocks, by its plain name."""

    def __init__(self, model: Any, block: int) -> None:
        self.model, self.graph, self.block = model, model.graph, block
        self.nodes = list(model.graph.node)
        self.shapes = {
            value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*model.graph.value_info, *model.graph.input, *model.graph.output)
        }
        self.constants = {each.name: list(each.dims) for each in model.graph.initializer}
        for node in self.nodes:  # ONNX Runtime leaves out what its own rewrites have made
            if node.op_type in ELEMENTWISE and node.input[0] in self.shapes and len(node.input) == 1:
                self.shapes.setdefault(node.output[0], self.shapes[node.input[0]])
        self.twin: dict[str, str] = {}
        self.names = {name for node in self.nodes for name in (*node.input, *node.output)}

    def rewritten(self) -> bytes | None:
        """See `keep_blocked`."""
        before = self._reorderings()
        if not before or any(a.type in (5, 10) for node in self.nodes for a in node.attribute):  # subgraphs
            return None
        for node in self.nodes:
            if node.domain == DOMAIN and node.op_type in ("ReorderInput", "ReorderOutput"):
                plain, blocked = node.input[0], node.output[0]
                if node.op_type == "ReorderOutput":
                    plain, blocked = blocked, plain
                if self._in_whole_blocks(plain) and not _flag(node, "channels_last"):
                    self.twin[plain] = blocked
        for node in list(self.nodes):
            ways = self._as_elementwise, self._as_depthwise, self._as_pool, self._as_concat
            made = next(filter(None, (way(node) for way in ways)), None)
            if made:
                self.nodes.remove(node)
                self.nodes += made
        self._use_twins()
        self.nodes = self._fused_and_sorted()
        if self._reorderings() >= before:
            return None
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)
        data: bytes = self.model.SerializeToString()
        return data

    def _reorderings(self) -> int:
        return sum(node.op_type in ("ReorderInput", "ReorderOutput") for node in self.nodes)

    def _in_whole_blocks(self, name: str) -> bool:
        shape = self.shapes.get(name, [])
        return len(shape) == 4 and all(shape) and shape[1] % self.block == 0

    def _new(self, name: str) -> str:
        """A name that no tensor has."""
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def _as_elementwise(self, node: Any) -> list[Any] | None:
        """The operator on blocked operands, where all of them are there in blocks."""
        from onnx import NodeProto

        if node.domain or node.op_type not in ELEMENTWISE or not self._in_whole_blocks(node.output[0]):
            return None
        operands = [name for name in node.input if name and not self._is_number(name)]
        if any(self.shapes.get(n) != self.shapes[node.output[0]] or n not in self.twin for n in operands):
            return None
        copy = NodeProto()
        copy.CopyFrom(node)
        for index, name in enumerate(node.input):
            copy.input[index] = self.twin.get(name, name)
        copy.name = copy.output[0] = self.twin[node.output[0]] = self._new(f"{node.output[0]}_blocked")
        return [copy]

    def _is_number(self, name: str) -> bool:
        return int(np.prod(self.constants.get(name, [2]))) == 1

    def _as_depthwise(self, node: Any) -> list[Any] | None:
        """Pixels times one factor for each channel of the one image: a convolution with computed weights.

        A tensor of one pixel is the same in both layouts.
        """
        from onnx import helper, numpy_helper

        if node.domain or node.op_type != "Mul" or not self._in_whole_blocks(node.output[0]):
            return None
        shape, result = self.shapes[node.output[0]], node.output[0]
        for factors, pixels in (node.input, reversed(node.input)):
            if (
                self.shapes.get(factors) == [1, shape[1], 1, 1]
                and self.shapes.get(pixels) == shape
                and pixels in self.twin
                and shape[0] == 1
            ):
                weight, size = self._new(f"{result}_weight"), self._new(f"{result}_weight_shape")
                four = np.array([shape[1], 1, 1, 1], np.int64)
                self.graph.initializer.append(numpy_helper.from_array(four, size))
                self.constants[size] = [4]
                operands = [self.twin[pixels], weight]
                source = self.twin.get(factors, factors)
                self.twin[result] = self._new(f"{result}_blocked")
                return [
                    helper.make_node("Reshape", [source, size], [weight], name=weight),
                    helper.make_node(
                        "Conv",
                        operands,
                        [self.twin[result]],
                        name=self.twin[result],
                        domain=DOMAIN,
                        group=shape[1],
                        kernel_shape=[1, 1],
                    ),
                ]
        return None

    def _as_pool(self, node: Any) -> list[Any] | None:
        """The mean over all pixels, or over those of each row, is a pooling, which there is for blocks."""
        from onnx import helper

        if node.domain or node.op_type != "ReduceMean" or not self._in_whole_blocks(node.output[0]):
            return None
        source, result = node.input[0], node.output[0]
        if source not in self.twin or len(self.shapes[source]) != 4:
            return None
        *outer, height, width = self.shapes[source]
        pools: dict[tuple[int, ...], tuple[str, dict[str, Any]]] = {
            (*outer, height, 1): ("AveragePool", {"kernel_shape": [1, width]}),
            (*outer, 1, 1): ("GlobalAveragePool", {}),
        }
        if (pool := pools.get(tuple(self.shapes[result]))) is None:
            return None
        self.twin[result] = self._new(f"{result}_blocked")
        ends, (operator, attributes) = ([self.twin[source]], [self.twin[result]]), pool
        return [helper.make_node(operator, *ends, name=self.twin[result], domain=DOMAIN, **attributes)]

    def _as_concat(self, node: Any) -> list[Any] | None:
        """Channels behind channels, which are blocks behind blocks. One of them may have to be reordered.

        That is a reordering of this part; else there is one of the whole, and one of each other part.
        """
        from onnx import helper

        plain = [name for name in node.input if name not in self.twin]
        if node.domain or node.op_type != "Concat" or len(plain) == len(node.input):
            return None
        axis = next(each.i for each in node.attribute if each.name == "axis")
        if axis not in (1, -3) or not all(map(self._in_whole_blocks, (*node.input, *node.output))):
            return None
        made = []
        for name in dict.fromkeys(plain):
            self.twin[name] = self._new(f"{name}_blocked")
            ends = [name], [self.twin[name]]
            made.append(helper.make_node("ReorderInput", *ends, name=self.twin[name], domain=DOMAIN))
        self.twin[node.output[0]] = result = self._new(f"{node.output[0]}_blocked")
        operands = [self.twin[name] for name in node.input]
        return [*made, helper.make_node("Concat", operands, [result], name=result, axis=1)]

    def _use_twins(self) -> None:
        """Read what is there in blocks where that is wanted; put into plain layout what is wanted so."""
        from onnx import helper

        made = {name for node in self.nodes for name in node.output if node.op_type != "ReorderInput"}
        same = {
            node.output[0]: twin
            for node in self.nodes
            if node.op_type == "ReorderInput" and (twin := self.twin.get(node.input[0], "")) in made
        }
        for node in self.nodes:
            for index, name in enumerate(node.input):
                node.input[index] = same.get(name, name)
        there = {*made, *self.constants, *(value.name for value in self.graph.input)}
        wanted = [name for node in self.nodes for name in node.input] + [v.name for v in self.graph.output]
        for name in [name for name in dict.fromkeys(wanted) if name in self.twin and name not in there]:
            ends, channels = ([self.twin[name]], [name]), self.shapes[name][1]
            self.nodes.append(
                helper.make_node("ReorderOutput", *ends, name=name, domain=DOMAIN, channels=channels)
            )

    def _fused_and_sorted(self) -> list[Any]:
        """The nodes that are needed, with sums and activations in convolutions, each behind what it reads.

        The weights stay where they are: here they are inputs.
        """
        import onnx_ir
        from onnx import TensorProto, helper
        from onnx_ir.passes.common import RemoveUnusedNodesPass

        given = [*self.constants, *(value.name for value in self.graph.input)]
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in dict.fromkeys(given)
        ]
        graph = helper.make_graph(self.nodes, self.graph.name, inputs, self.graph.output)
        opsets = list(self.model.opset_import)
        model = onnx_ir.from_proto(
            helper.make_model(graph, opset_imports=opsets, ir_version=self.model.ir_version)
        )
        model.graph.sort()  # unused nodes are looked for from the last one on
        RemoveUnusedNodesPass()(model)
        self._fuse_into_convolutions(model.graph)
        model.graph.sort()
        return list(onnx_ir.to_proto(model.graph).node)

    def _fuse_into_convolutions(self, graph: Any) -> None:
        """A blocked convolution adds another tensor, and computes an activation, as it writes its result."""
        import onnx_ir

        blocked = set(self.twin.values())
        for node in [node for node in graph if node.op_type in {"Add", *FUSED} and not node.domain]:
            result = node.outputs[0]
            if result.name not in blocked or any(self._is_number(value.name) for value in node.inputs):
                continue
            conv = next((c for value in node.inputs if (c := _only_use_of(value)) and _takes(c, node)), None)
            if conv is None:
                continue
            if node.op_type == "Add":
                (other,) = [value for value in node.inputs if value is not conv.outputs[0]]
                conv.resize_inputs(4)
                conv.replace_input_with(3, other)
            else:
                conv.attributes.add(onnx_ir.AttrString("activation", node.op_type))
            onnx_ir.convenience.replace_all_uses_with(result, conv.outputs[0], replace_graph_outputs=True)
            graph.remove(node, safe=True)
            conv.outputs[0].name = result.name


def _only_use_of(value: Any) -> Any:
    """The node whose result this is, where that is read once; None elsewhere."""
    return value.producer() if len(value.uses()) == 1 and not value.is_graph_output() else None


def _takes(conv: Any, node: Any) -> bool:
    """Whether a node is a blocked convolution that can compute this one, too."""
    is_free = conv.op_type == "Conv" and conv.domain == DOMAIN and "activation" not in conv.attributes
    return is_free and (node.op_type != "Add" or len(conv.inputs) < 4)


def _flag(node: Any, name: str) -> bool:
    return any(each.i for each in node.attribute if each.name == name)
