"""openvino: run the graph in OpenVINO."""

from __future__ import annotations

import dataclasses
import json
import operator
import time
from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.passes.shape_prop import TensorMetadata

from ampopt.engines.onnx_program import place_of_input, plain_model
from ampopt.engines.openvino_engine import OpenVinoEngine
from ampopt.ir.aliasing import aliased_by
from ampopt.ir.graph import aten, calls, dtype_of, is_native
from ampopt.ir.index_ranges import may_miss
from ampopt.ir.matrix_forms import why_not_answered
from ampopt.ir.pass_options import option
from ampopt.ir.program import Border, Program
from ampopt.ir.shapes import record_shapes
from ampopt.ir.transform import Declined, Engine, Result
from ampopt.ir.unmarked import array_of
from ampopt.ir.widening import widened
from ampopt.ort.openvino_division import LostQuotientError
from ampopt.ort.openvino_nan import LostNanError
from ampopt.ort.openvino_options import OpenVinoOptions
from ampopt.ort.openvino_session import OpenVinoRunner, why_not_precision
from ampopt.ort.openvino_tuning import tune_openvino

TUNING_S = 3.0
"""Time in seconds for measuring options, including the loading of models."""

PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""What OpenVINO computes in for each dtype of a lane."""

INDICES: frozenset[object] = frozenset(
    {
        aten.argmax.default,
        aten.argmin.default,
        aten.max.dim,
        aten.min.dim,
        aten.max_pool2d_with_indices.default,
        aten.max_pool3d_with_indices.default,
        aten.topk.default,
        aten.sort.default,
    }
)
"""Operators whose integers are places in a tensor."""


REMAINDERS: frozenset[object] = frozenset(
    {
        aten.fmod.Scalar,
        aten.fmod.Tensor,
        aten.remainder.Scalar,
        aten.remainder.Tensor,
        aten.floor_divide.default,
    }
)
"""Operators whose results jump at multiples of the divisor; divisions that are rounded down do, too."""


TRUTHS = ("_to_copy", "to", "any", "all", "logical_not", "logical_and", "logical_or", "logical_xor")
"""Operators that take integers for true where they are not 0."""

WRONG = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "fft_", "_fft_", "stft", "istft")
"""What names of operators begin with whose ONNX form OpenVINO computes wrongly, also of usual numbers."""


@dataclasses.dataclass(frozen=True)
class Openvino(Engine):
    """Run the graph in OpenVINO, with the options that are fastest on this machine.

    Rewrites: the engine that runs the graph. Inputs are converted to contiguous layout, because the runtime
    chooses its own layouts. In an AMP lane the runtime gets the graph in float32, with unrounded weights and
    without casts, and rounds by itself to the lane's dtype, where the processor computes in it.
    Requires: a CPU, and the packages of the extra `openvino`.
    Declines: programs that still run under autocast, or that call operators ONNX does not know; float64, and
    integers that are not places in a tensor, because OpenVINO computes in 32 bits, and int32 in float32, that
    is inexactly from 2²⁴ on (measured with 2026.4: quotients, maxima, matrix products, shifts); the values of
    a top-k, which lose NaN, and places of maxima that are computed with; empty tensors; remainders, which it
    computes from a rounded quotient; the nearest pixels of a grid, for which it rounds halves otherwise;
    the truth of int32, of which the smallest is false there; quotients by weights whose reciprocals are
    infinite or denormal numbers; places that may be out of range, which it does not check, and reads memory
    beside the tensor; antialiased resizing and Fourier transforms; in FP32 roundings of the
    model's own to 16 bits, which OpenVINO leaves out.
    Correct because: ONNX's operators are the graph's own (`onnx_graph` refuses operators without an
    equivalent), and the runtime computes the same expressions, possibly in another order, in the precision
    that is asked for: the compiled model is asked which one it has. Operators of OpenVINO that lose NaN are
    repaired, exactly for all other numbers (`ort.openvino_nan`), and it divides where it would multiply by a
    reciprocal that may be infinite (`ort.openvino_division`). Sums and products that are denormal numbers
    stay so; an exponential below the least normal number is 0.
    Cost: seconds to export, once for a program (`onnx_program`), and to measure options, which stay the
    defaults if there is no time for that (`hurried`); a second copy of the weights.
    """

    packages = ("onnx", "onnxscript", "openvino")
    extra = "openvino"
    slow_to_apply = True

    options: tuple[tuple[str, str], ...] | None = None
    """The fields of `OpenVinoOptions`, each as JSON, or the defaults; None: measure them."""

    seconds: float = option(3600.0, 0.0, 3600.0)
    """The time in which all is done: what does not fit in after the export is not measured."""

    @property
    def chosen(self) -> OpenVinoOptions:
        """The options, or the defaults where none are chosen. Raises BundleError if they are none."""
        return OpenVinoOptions.from_dict({name: json.loads(value) for name, value in self.options or ()})

    def why_not(self, program: Program) -> str | None:
        """See the class."""
        if program.device.type != "cpu":
            return "on a GPU the graph itself, captured, has always been faster"
        if (reason := super().why_not(program)) is not None:
            return reason
        found = next((node for node in calls(program.graph) if is_native(node)), None)
        if found is not None:
            return f"ONNX does not know {found.target}"
        if (reason := why_not_answered(program.graph)) is not None:
            return reason
        return why_not_precision(PRECISIONS[program.lane.dtype])

    def expected_seconds(self, program: Program) -> float:
        """A few seconds for the export to start, plus a time for each operator."""
        return 2.0 + 0.02 * sum(1 for _ in calls(program.graph)) + (TUNING_S if self.options is None else 0.0)

    def hurried(self) -> Engine:
        """The engine with default options, which give most of the gain in a few seconds."""
        return dataclasses.replace(self, options=self.options or ())

    def within(self, seconds: float) -> Openvino:
        """Measure less if little time is left; a replay measures nothing."""
        if self.options is not None:
            return self
        return dataclasses.replace(self, seconds=min(self.seconds, seconds))

    def apply(self, program: Program) -> Result:
        """Export, select options, run once; see the class."""
        if program.engine is not None:
            return Result(program, 0)
        end = time.perf_counter() + self.seconds
        if (found := computed_otherwise(program)) is not None:
            node, reason = found
            return Result(program, 0, (Declined(node.name, reason),))
        wide = widened(program) if program.lane.is_mixed else program
        entry = tuple(Border(border.dtype) for border in wide.entry)
        entered = tuple(b.convert(t) for b, t in zip(entry, program.examples, strict=True))
        model, hints = plain_model(wide.graph, entered), list[str]()
        try:
            runner = self._runner(model, entered, PRECISIONS[program.lane.dtype], hints, end)
        except (LostNanError, LostQuotientError) as lost:
            return Result(program, 0, (Declined(lost.operator, lost.reason),))
        chosen = tuple((name, json.dumps(value)) for name, value in runner.options.to_dict().items())
        changed = program.replace(engine=OpenVinoEngine(runner), entry=entry)
        return Result(changed, 1, hints=tuple(hints), replay=Openvino(chosen))

    def _runner(
        self, model: bytes, entered: Sequence[Tensor], precision: str, hints: list[str], end: float
    ) -> OpenVinoRunner:
        """The model with the options that are chosen, or that are fastest here, measured before `end`."""
        options = dataclasses.replace(self.chosen, precision=precision)
        runner = OpenVinoRunner(model, options)
        if self.options is None and time.perf_counter() + TUNING_S < end:
            read = [array_of(tensor) for tensor in entered]
            arrays = [read[place_of_input(info.name)] for info in runner.inputs]
            return tune_openvino(runner, model, arrays, seconds=TUNING_S).runner
        if not self.options:
            hints.append("OpenVINO runs with default options: there was no time to measure others")
        return runner


def computed_otherwise(program: Program, *, varies: bool = False) -> tuple[fx.Node, str] | None:
    """The first node of a program that OpenVINO computes otherwise than PyTorch, and how; see `Openvino`.

    `varies`: the sizes of its inputs do.
    """
    module = record_shapes(program)
    for node in module.graph.nodes:
        if (reason := _why_wider(node)) is not None:
            return node, reason
        if not program.lane.is_mixed and node.op == "call_function" and _is_low(node):
            return node, "OpenVINO leaves roundings to 16 bits out"
    for node in may_miss(module, varies=varies):
        return node, "OpenVINO answers where a place is out of range, and PyTorch raises an error"
    return None


def _is_low(node: fx.Node) -> bool:
    return _dtype_or_none(node) in (torch.float16, torch.bfloat16)


def _dtype_or_none(node: fx.Node) -> torch.dtype | None:
    meta = node.meta.get("tensor_meta")
    return meta.dtype if isinstance(meta, TensorMetadata) else None


def _why_wider(node: fx.Node) -> str | None:
    meta = node.meta.get("tensor_meta")
    if not isinstance(meta, TensorMetadata):
        return None  # several results, each of which a node of its own takes
    if 0 in meta.shape:
        return "it is empty, which OpenVINO computes otherwise"
    if node.target is aten.grid_sampler.default and node.args[2] == 1:
        return "OpenVINO takes the other of two nearest pixels"
    name = node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else ""
    if name.startswith(WRONG):
        return f"OpenVINO computes {name} otherwise"
    if (
        name in TRUTHS
        and meta.dtype is torch.bool
        and torch.int32 in map(_dtype_or_none, node.all_input_nodes)
    ):
        return "OpenVINO takes the smallest int32 for false"
    is_rest = node.target in REMAINDERS or node.kwargs.get("rounding_mode") == "floor"
    if is_rest and meta.dtype.is_floating_point:
        return "OpenVINO computes remainders from a rounded quotient"
    if meta.dtype is torch.float64:
        return "OpenVINO computes float64 in float32"
    if meta.dtype in (torch.int8, torch.uint8, torch.int16) and node.op == "call_function":
        return "OpenVINO ends integers of 8 and 16 bits at their bounds, where PyTorch's go around"
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    is_view = aliased_by(source) and dtype_of(aliased_by(source)[0]) is torch.int32
    computed = meta.dtype is torch.int32 and node.op == "call_function" and not is_view
    if computed or (source.target in INDICES and dtype_of(source.all_input_nodes[0]) is torch.int32):
        return "OpenVINO computes int32 in float32"
    if meta.dtype is torch.int64 and node.op != "get_attr" and source.target not in INDICES:
        return "OpenVINO computes int64 in int32"
    return None
