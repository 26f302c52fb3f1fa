"""What a graph chooses in ONNX Runtime, told by a session beside the engine's that gives the places, too.

Correct because nothing depends on it but what verification follows: choices that are not those of the engine
explain nothing of its outputs, see `measure.followed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt.engines.onnx_program import for_onnx_runtime, plain_model
from ampopt.ir.choices import Choice, Chooser
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.ir.unmarked import array_of
from ampopt.ort.options import SessionOptions
from ampopt.ort.session import OnnxRunner


class OnnxChoices:
    """The choices of a program's graph in ONNX Runtime, of those whose places are read.

    Each call makes a session of its own, with the engine's options: what is verified is seldom asked, and
    what is served need not hold the weights again. It has the graph as it was exported, so that it rounds as
    an engine without rewritten convolutions does.
    """

    def __init__(self, program: Program, entered: tuple[Tensor, ...], options: SessionOptions) -> None:
        """`entered`: the example inputs as the graph takes them."""
        self._program, self._entered, self._options = program, entered, options

    def __call__(self, tensors: Sequence[Tensor]) -> list[Choice]:
        """The choices for inputs of the example's shapes; none where one of them has no name in the model."""
        import onnx

        proto = onnx.ModelProto.FromString(for_onnx_runtime(plain_model(self._program.graph, self._entered)))
        choosers = [each for each in Chooser.all_in(record_shapes(self._program)) if each.is_read]
        results: Any = self._program.graph.graph.output_node().args[0]
        given = dict(
            zip([node.name for node in results], [each.name for each in proto.graph.output], strict=True)
        )
        names = [given.get(chooser.places, chooser.places) for chooser in choosers]
        if not {*names} <= {name for node in proto.graph.node for name in node.output}:
            return []
        for name in {*names} - {*given.values()}:
            proto.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None))
        runner = OnnxRunner(proto.SerializeToString(), self._options)
        arrays = runner(*[array_of(tensor) for tensor in tensors])
        found = {info.name: array for info, array in zip(runner.outputs, arrays, strict=True)}
        pairs = zip(choosers, names, strict=True)
        return [chooser.choice(torch.from_numpy(found[name])) for chooser, name in pairs]
