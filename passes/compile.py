"""compile: run the graph through inductor, the compiler behind `torch.compile`."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from ampopt.ir.capturing import capturing
from ampopt.ir.graph import arguments, aten, calls, finish, insert_call, is_opaque, replace, where
from ampopt.ir.pool_indices import keep_indices
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Result
from ampopt.system.inductor_cache import remove_cut_off_builds


@dataclasses.dataclass(frozen=True)
class Compile(Engine):
    """Compile the graph with inductor, weights frozen, without inductor's own CUDA graphs.

    Rewrites: the engine that runs the graph. `cuda-graph` captures it, because inductor's own CUDA graphs
    cost tens of microseconds of host time for each call.
    Requires: precision baked into the graph.
    Declines: programs that still run under autocast, or that call opaque operators (native kernels that
    inductor cannot compile).
    Correct because: the graph is functional with constant shapes, which is what inductor compiles; fused
    kernels compute the same expressions, possibly in another order. On a CPU inductor would fuse ReLU, clamp
    and hardsigmoid into oneDNN's convolutions, which lose NaN: they are rewritten so that inductor does not
    recognize them, and become part of the loops that it generates. A max pooling whose indices are read stays
    PyTorch's own, because inductor takes the index of another NaN where a window has several. Dynamo is not
    needed: the graph is captured already, and Dynamo would check its guards in every call. The first calls
    happen here, outside any capture: a first call inside a capture has broken whole processes. The pass
    manager rehearses the engine in another process, so that a compiler crash or hang does no harm here;
    during the rehearsal only tracing, which runs no compiler and no compiled kernel, happens here. A cache
    entry of inductor was compiled from an equal graph, and gets this program's weights; a cached library
    whose compiler was killed is built again.
    Cost: seconds to a minute of compilation; with a warm cache some seconds, in large networks ten and more,
    in addition to the rehearsal.
    """

    risky = True
    slow_to_apply = True

    warm_ups: int = 3

    def why_not(self, program: Program) -> str | None:
        """Declines autocast and opaque operators: inductor needs plain ATen and explicit casts."""
        if (reason := super().why_not(program)) is not None:
            return reason
        found = next((node for node in calls(program.graph) if is_opaque(node)), None)
        return f"inductor cannot see into {found.target} of {where(found)}" if found is not None else None

    def expected_seconds(self, program: Program) -> float:
        """A few seconds for compilation to start, plus a time for each operator."""
        return 4.0 + 0.03 * sum(1 for _ in calls(program.graph))

    def apply(self, program: Program) -> Result:
        """Compile and warm up; see the class."""
        return self.apply_beside(program, lambda: None)

    def apply_beside(self, program: Program, rehearsed: Callable[[], object]) -> Result:
        """Trace the graph while the rehearsal compiles it; compile the trace after the rehearsal."""
        if program.engine is not None:
            return Result(program, 0)
        with capturing():
            return self._compile(program, rehearsed)

    def _compile(self, program: Program, rehearsed: Callable[[], object]) -> Result:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # it takes seconds to load

        remove_cut_off_builds()

        def compile_trace(*args: Any, **kwargs: Any) -> Any:
            rehearsed()
            return compile_fx_inner(*args, **kwargs)

        options = {"triton.cudagraphs": False, "freezing": True}
        module = copy.deepcopy(program.graph).eval()
        keep_indices(module)
        if program.device.type == "cpu":
            keep_nan(module)
        with program.scope():
            entered = [b.convert(t) for b, t in zip(program.entry, program.examples, strict=True)]
            with tracing(TracingContext(mode := _static_shapes())):
                described = [mode.from_tensor(tensor, static_shapes=True) for tensor in entered]
                try:
                    engine: Any = compile_fx(module, described, compile_trace, config_patches=options)
                except Exception:
                    rehearsed()  # where it failed, that is the reason, and not what inductor makes of it
                    raise
            for _ in range(self.warm_ups):
                engine(*entered)
        return Result(program.replace(engine=engine), 1)


def keep_nan(module: fx.GraphModule) -> None:
    """Rewrite activations that inductor would fuse into oneDNN's kernels, which lose NaN.

    Inductor's pattern is a ReLU, or a lower bound followed by an upper one. If the lower bound is not above
    the upper one, their order does not matter, and both orders keep NaN.
    """
    for node in calls(module, _BOUNDED):
        low, high = _bounds(node)
        if low > high:
            continue
        is_gate = node.target is aten.hardsigmoid.default
        value: Any = insert_call(module, node, aten.add.Tensor, node.args[0], 3) if is_gate else node.args[0]
        if high < math.inf:
            value = insert_call(module, node, aten.clamp_max.default, value, high)
        if low > -math.inf:
            value = insert_call(module, node, aten.clamp_min.default, value, low)
        replace(node, insert_call(module, node, aten.div.Tensor, value, 6) if is_gate else value)
    finish(module)


_BOUNDED: dict[Any, tuple[float, float] | None] = {
    aten.relu.default: (0, math.inf),
    aten.relu6.default: (0, 6),
    aten.hardsigmoid.default: (0, 6),
    aten.hardtanh.default: None,
    aten.clamp.default: None,
}
"""Operators that bound their argument, and their bounds where these are not arguments."""


def _bounds(node: fx.Node) -> tuple[float, float]:
    if (fixed := _BOUNDED[node.target]) is not None:
        return fixed
    given = arguments(node)
    names = ("min_val", "max_val") if node.target is aten.hardtanh.default else ("min", "max")
    low, high = (given[name] for name in names)
    return -math.inf if low is None else low, math.inf if high is None else high


def _static_shapes() -> FakeTensorMode:
    """What inductor describes tensors with, so that it keeps compiled graphs on disk.

    A repetition of what was rehearsed, and a later `optimize`, then only trace the graph. Without a
    `ShapeEnv` inductor passes over that cache; where it describes the inputs itself, it reasons about every
    shape as if that could change, which takes four times as long for Swin-T.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # it takes seconds to load

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(assume_static_by_default=True))
