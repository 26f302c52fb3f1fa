"""What a graph chooses in ONNX Runtime, told by a session beside the engine's that gives the places, too.

Correct because nothing depends on it but what verification follows: choices that are not those of the engine
explain nothing of its outputs, see `measure.followed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
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
    what is served need not hold the weights again.
    """

    def __init__(self, program: Program, model: Callable[[], bytes], options: SessionOptions) -> None:
        """`model` gives the serialized ONNX model of the graph."""
        self._program, self._model, self._options = program, model, options

    @classmethod
    def of_graph(cls, program: Program, entered: tuple[Tensor, ...], options: SessionOptions) -> OnnxChoices:
        """Those of the graph as it is exported; an engine with rewritten convolutions may round otherwise.

        `entered`: the example inputs as the graph takes them.
        """

        def model() -> bytes:
            return for_onnx_runtime(plain_model(program.graph, entered))

        return cls(program, model, options)

    @classmethod
    def of_file(cls, program: Program, path: Path, options: SessionOptions) -> OnnxChoices:
        """Those of a file that was made of the program."""

        def model() -> bytes:
            import onnx

            return bytes(onnx.load(path).SerializeToString())

        return cls(program, model, options)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Choice]:
        """The choices for inputs of the example's shapes; none where one of them has no name in the model."""
        import onnx

        proto = onnx.ModelProto.FromString(self._model())
        choosers = [each for each in Chooser.all_in(record_shapes(self._program)) if each.is_read]
        results: Any = self._program.graph.graph.output_node().args[0]
        outputs = [output.name for output in proto.graph.output]
        as_output = dict(zip([node.name for node in results], outputs, strict=True))
        names = [as_output.get(chooser.places, chooser.places) for chooser in choosers]
        if not {*names} <= {name for node in proto.graph.node for name in node.output}:
            return []
        for name in {*names} - {*outputs}:
            proto.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None))
        runner = OnnxRunner(proto.SerializeToString(), self._options)
        arrays = [array_of(tensor.cpu().contiguous()) for tensor in tensors]
        given = [
            array.astype(info.dtype, copy=False) for array, info in zip(arrays, runner.inputs, strict=True)
        ]
        found = {info.name: array for info, array in zip(runner.outputs, runner(*given), strict=True)}
        return [
            chooser.choice(torch.from_numpy(found[name]))
            for chooser, name in zip(choosers, names, strict=True)
        ]
