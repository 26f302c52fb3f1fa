"""script: run the graph through TorchScript's optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ampopt.errors import PassError
from ampopt.ir.capturing import capturing
from ampopt.ir.graph import aten, calls, constant_outputs, gives_a_number
from ampopt.ir.pass_options import option
from ampopt.ir.program import Program
from ampopt.ir.traced_forms import graph_to_trace
from ampopt.ir.transform import Engine, Result

_SWALLOWED_BY_ONEDNN = (
    aten.relu.default,
    aten.sigmoid.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
)
"""Operators whose NaN is lost where TorchScript lets oneDNN compute them."""


@dataclasses.dataclass(frozen=True)
class Script(Engine):
    """Trace the graph into TorchScript, freeze it, optimize it for inference, and let its fuser settle.

    Rewrites: the engine that runs the graph. The graph itself does not change, so it can still be exported.
    Requires: precision baked into the graph (autocast's casts are not seen by a trace).
    Declines: programs that still run under autocast, whose weights are packed for oneDNN, or with a size or
    another number that depends on the inputs' values; fails where freezing folds a normalization into weights
    that their dtype cannot hold.
    Correct because: the graph has no control flow and its numbers are constants, so a trace on the example
    inputs is the whole program; freezing inlines the weights; the fuser emits the same operators' arithmetic.
    On a CPU a GRU's cell is traced as steps with memory of their own: freezing spoils those that write in
    place (`traced_forms`). There `optimize_for_inference` lays convolutions and what follows them out for
    oneDNN, whose ReLU and max pooling turn NaN into numbers, and whose sigmoid does so where channels are
    few: a program with one of them is only frozen and fused.
    Cost: seconds to trace; its profiling executor specializes in the first calls, which `warm_ups` covers.
    On a GPU another process does so first, because its fuser's kernels have left one unusable.
    """

    shape_dependent = False
    risky_on_cuda = True

    warm_ups: int = option(4, 1, 1000)

    def why_not(self, program: Program) -> str | None:
        """Declines autocast, packed weights and computed numbers.

        A trace does not record autocast, cannot hold packed weights, and makes numbers constant.
        """
        if (reason := super().why_not(program)) is not None:
            return reason
        if (number := gives_a_number(program.graph)) is not None:
            return f"{number.name} depends on the inputs' values, and a trace keeps the example's"
        packed = any(buffer.is_mkldnn for buffer in program.graph.buffers())
        return "its weights are packed for oneDNN, which a trace cannot hold" if packed else None

    def apply(self, program: Program) -> Result:
        """Trace, freeze, optimize, warm up; see the class."""
        if program.engine is not None:
            return Result(program, 0)
        try:
            engine = self._build(program)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise PassError(f"TorchScript cannot run this program: {reason}") from error
        return Result(program.replace(engine=engine), 1)

    def _build(self, program: Program) -> Callable[..., Sequence[Tensor]]:
        with capturing(), program.scope():
            entered = [b.convert(t) for b, t in zip(program.entry, program.examples, strict=True)]
            traced = torch.jit.trace(graph_to_trace(program), tuple(entered), check_trace=False)
            frozen = torch.jit.freeze(traced)
            swallows = program.device.type == "cpu" and any(calls(program.graph, _SWALLOWED_BY_ONEDNN))
            optimized = frozen if swallows else torch.jit.optimize_for_inference(frozen)
            engine = _as_tuple(optimized, constant_outputs(program.graph))
            for _ in range(self.warm_ups):
                found = engine(*entered)
            for output, expected in zip(found, program.graph(*entered), strict=True):
                if not bool((torch.isfinite(output) | ~torch.isfinite(expected)).all()):
                    raise PassError("frozen, the program overflows where the graph does not")
        return engine


def _as_tuple(
    function: Callable[..., Sequence[Tensor]], constants: frozenset[int]
) -> Callable[..., Sequence[Tensor]]:
    """A function that always returns a tuple, of tensors of the caller's own.

    TorchScript returns a bare tensor for a tuple of one where its passes unpack it, and in every call the
    same tensor for one of the `constants`, whose copy freezing has dropped.
    """

    def call(*tensors: Tensor) -> Sequence[Tensor]:
        result = function(*tensors)
        outputs = (result,) if isinstance(result, Tensor) else result
        if not constants:
            return outputs
        return [output.clone() if place in constants else output for place, output in enumerate(outputs)]

    return call
