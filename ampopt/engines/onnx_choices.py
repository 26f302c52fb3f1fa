"""What a graph or a file chooses in ONNX Runtime, told by a session beside it that gives the places, too.

Correct because nothing depends on it but what verification follows: choices that are not those of the engine
explain nothing of its outputs, see `measure.followed`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampopt.engines.onnx_program import for_onnx_runtime, telling_model
from ampopt.ir.choices import Choice, made_to_tell
from ampopt.ir.choosers import Chooser, with_places
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.ir.unmarked import array_of
from ampopt.ort.options import SessionOptions
from ampopt.ort.session import OnnxRunner


class OnnxChoices:
    """The choices of a program's graph in ONNX Runtime, of those that are read and any like these.

    A session of its own is made for a verification, with the engine's options: what is verified is seldom
    asked, and what is served need not hold the weights again. It has the graph as it was exported, so that it
    rounds as an engine without rewritten convolutions does, but with the places as outputs: an export gives
    what is inside of a graph other names.
    """

    def __init__(self, program: Program, options: SessionOptions) -> None:
        self._program, self._options = program, options

    def __call__(self, tensors: Sequence[Tensor]) -> list[Choice]:
        """The choices for inputs as the graph takes them, of the example's shapes."""
        runner, choosers = made_to_tell(self, functools.partial(self._session, tuple(tensors)))
        if runner is None:
            return []
        arrays = runner(*[array_of(tensor) for tensor in tensors])
        places = [torch.from_numpy(array) for array in arrays[len(arrays) - len(choosers) :]]
        return [chooser.choice(each) for chooser, each in zip(choosers, places, strict=True)]

    def _session(self, tensors: tuple[Tensor, ...]) -> tuple[OnnxRunner | None, list[Chooser]]:
        """A session whose last outputs are the places of these; None where none is read."""
        recorded = record_shapes(self._program)
        keys = {each.key for each in Chooser.all_in(recorded) if each.is_read}
        if not keys:
            return None, []
        choosers = [each for each in Chooser.all_in(with_places(recorded)[0]) if each.key in keys]
        model = telling_model(self._program.graph, tensors, [chooser.places for chooser in choosers])
        return OnnxRunner(for_onnx_runtime(model), self._options), choosers


class FileChoices:
    """The choices of a file that was made of a program's graph, by the names that an export gives them.

    A session of the file with these as outputs rounds as the file does. None are told where one has no name.
    """

    def __init__(self, program: Program, path: Path, options: SessionOptions) -> None:
        self._program, self._path, self._options = program, path, options

    def __call__(self, tensors: Sequence[Tensor]) -> list[Choice]:
        """The choices for inputs of the example's shapes, which are converted to the file's dtypes."""
        runner, named = made_to_tell(self, self._session)
        if runner is None:
            return []
        pairs = zip(tensors, runner.inputs, strict=True)
        arrays = [array_of(each.cpu().contiguous()).astype(info.dtype, copy=False) for each, info in pairs]
        found = {info.name: array for info, array in zip(runner.outputs, runner(*arrays), strict=True)}
        return [chooser.choice(torch.from_numpy(found[name])) for name, chooser in named]

    def _session(self) -> tuple[OnnxRunner | None, list[tuple[str, Chooser]]]:
        """A session with the places of these as outputs, by name; None where one has none."""
        import onnx

        proto = onnx.load(self._path)
        choosers = [each for each in Chooser.all_in(record_shapes(self._program)) if each.is_read]
        results: Any = self._program.graph.graph.output_node().args[0]
        outputs = [output.name for output in proto.graph.output]
        as_output = dict(zip([node.name for node in results], outputs, strict=True))
        names = [as_output.get(chooser.places, chooser.places) for chooser in choosers]
        if not {*names} <= {name for node in proto.graph.node for name in node.output}:
            return None, []
        for name in {*names} - {*outputs}:
            proto.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None))
        return OnnxRunner(proto.SerializeToString(), self._options), list(zip(names, choosers, strict=True))
