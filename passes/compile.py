"""compile: run the graph through inductor, the compiler behind `torch.compile`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch._guards import TracingContext, tracing

from ampopt.engines.apart import with_results_apart, without_copies
from ampopt.engines.cpp_compiler import prepared_compiler
from ampopt.engines.divided import Chain, Division, divided
from ampopt.engines.inductor_code import InductorCode, LoadedCode, is_whole, options, static_shapes
from ampopt.engines.inductor_labels import name_by_place, name_sources_by_place
from ampopt.engines.merged_kernels import merged_kernels
from ampopt.engines.rounds import calls_once, forget, in_rounds
from ampopt.errors import first_line
from ampopt.ir.capturing import capturing
from ampopt.ir.checked_places import keep_checks
from ampopt.ir.deciding_forms import DIVISIONS
from ampopt.ir.graph import arguments, aten, calls, finish, insert_call, is_opaque, replace, where
from ampopt.ir.pass_options import option
from ampopt.ir.pool_indices import keep_indices, pooling_operators
from ampopt.ir.program import Program
from ampopt.ir.stable_forms import with_forms
from ampopt.ir.transform import Engine, Rehearsed, Result
from ampopt.system.inductor_cache import remove_cut_off_builds

logger = logging.getLogger("ampopt")


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
    PyTorch's own, because inductor takes the index of another NaN where a window has several. So does, on a
    CPU, what reads or writes at places that may be out of range: what inductor's loops for several threads
    raise ends the process. Remainders and quotients rounded down are by the exact `fmod`, as PyTorch's are:
    inductor rounds a quotient. It computes equal expressions once: what it gives as one result for several
    that the graph has apart is copied. Dynamo is not needed: the graph is captured already, and Dynamo would
    check its guards in every call. The first calls happen here, outside any capture: a first call inside a
    capture has broken whole processes. The pass manager rehearses the engine in another process, so that a
    compiler crash or hang does no harm here; what the rehearsal has compiled is loaded here with the weights
    that it folded, so that nothing is traced again. Where several processes rehearse, each gets a piece of
    the graph, and the pieces' code follows each other, with the shapes, strides and dtypes of the graph at
    the cuts. The rounds of an unrolled loop, which are equal but for what they are given, share what is
    compiled for one. On a CPU, where the weights are in oneDNN's own layout, this process traces meanwhile,
    which runs no compiler and no compiled kernel. There the kernels of a graph are compiled together, each in
    a namespace of its own, by inductor's own command. A cache entry of inductor was compiled from an equal
    graph; a cached library whose compiler was killed is built again.
    Cost: seconds to a minute of compilation in another process, and some seconds to load the result; where it
    is compiled here, with a warm cache, some seconds to trace, in large networks ten and more.
    """

    risky = True
    slow_to_apply = True

    warm_ups: int = option(3, 0, 1000)
    pieces: int = option(1, 0, 1000)
    """For how many compilers the graph is divided, at the least; 0: it is not divided."""

    def why_not(self, program: Program) -> str | None:
        """Declines autocast and opaque operators: inductor needs plain ATen and explicit casts."""
        if (reason := super().why_not(program)) is not None:
            return reason
        found = next((node for node in calls(program.graph) if is_opaque(node)), None)
        return f"inductor cannot see into {found.target} of {where(found)}" if found is not None else None

    def expected_seconds(self, program: Program) -> float:
        """A few seconds for compilation to start, plus a time for each operator that is compiled."""
        return 4.0 + 0.03 * calls_once(program.graph)

    def divided(self, program: Program, count: int) -> Sequence[Program]:
        """Pieces that follow each other; the rounds of an unrolled loop, which are equal, as one."""
        division = self._division(program, count)
        return [program] if division is None else division.programs

    def undivided(self) -> Engine:
        """It for a piece, which may have rounds of its own."""
        return dataclasses.replace(self, pieces=0)

    def _division(self, program: Program, count: int) -> Division | None:
        """In the rounds of its loop, or, on a GPU, in up to `count` pieces; None: as a whole.

        On a CPU each compiler takes all cores. What was divided for more compilers once is divided as then:
        inductor's cache has those pieces.
        """
        if self.pieces == 0:
            return None
        if program.device.type == "cpu":
            return in_rounds(program)
        count = max(count, self.pieces)
        return in_rounds(program, count) or divided(program, count)

    def apply(self, program: Program) -> Result:
        """Compile and warm up; see the class."""
        return self.apply_beside(program, Rehearsed)

    def apply_beside(self, program: Program, rehearsed: Callable[[], Rehearsed]) -> Result:
        """Load what the rehearsal has compiled, or else compile here.

        On a CPU the weights are in a layout that cannot be sent: there this process traces the graph while
        the rehearsal compiles it, and compiles the trace after it.
        """
        if program.engine is not None:
            return Result(program, 0)
        with capturing():
            hints = list[str]()
            if program.device.type == "cpu":
                is_beside = rehearsed is not Rehearsed
                with prepared_compiler() if is_beside else contextlib.nullcontext():
                    made = [self._compile(piece, rehearsed) for piece in self.divided(program, 1)]
                return self._made(program, self._division(program, 1), made, hints, 1)
            told = rehearsed()
            division = self._division(program, told.count)
            programs = [program] if division is None else division.programs
            each = zip(programs, told.sent or itertools.repeat(None), strict=bool(told.sent))
            functions = [self._loaded(piece, its, hints) for piece, its in each]
            return self._made(program, division, functions, hints, told.count)

    def _made(
        self,
        program: Program,
        division: Division | None,
        functions: Sequence[Callable[..., Any]],
        hints: list[str],
        count: int,
    ) -> Result:
        """The program with what was compiled of it for so many compilers."""
        engine = with_results_apart(program, functions[0] if division is None else Chain(division, functions))
        forget(program)
        replay = dataclasses.replace(self, pieces=max(count, self.pieces) if self.pieces else 0)
        return Result(program.replace(engine=engine), 1, hints=tuple(hints), replay=replay)

    def _loaded(self, program: Program, sent: dict[str, Any] | None, hints: list[str]) -> Callable[..., Any]:
        """What another process has compiled, or else what is compiled here."""
        return self._load(program, sent, hints) or self._compile(program, Rehearsed)

    def send(self, program: Program) -> dict[str, Any] | None:
        """The key and the constants of inductor's code, if the program's engine is nothing but that code."""
        made = without_copies(program.engine)
        if not isinstance(made, LoadedCode) or made.code is None:
            return None
        return {"key": made.code.key, "constants": made.code.constants}

    def _load(
        self, program: Program, sent: dict[str, Any] | None, hints: list[str]
    ) -> Callable[..., Any] | None:
        """What another process has compiled; None where that is nothing, or cannot be loaded, see `hints`."""
        if sent is None:
            return None
        try:
            pooling_operators()  # the code may call it, and otherwise only tracing registers it
            engine = InductorCode(**sent).load()
            with program.scope():
                entered = _entered(program)
                for _ in range(self.warm_ups):
                    engine.inner([*entered])  # PyTorch's own call ends what it keeps of a compilation
        except Exception as error:  # inductor's cache is not a public interface
            hints.append(f"inductor's code was traced again, it could not be loaded: {first_line(error)}")
            logger.debug("ampopt: %s", hints[-1], exc_info=True)
            return None
        return engine

    def _compile(self, program: Program, rehearsed: Callable[[], Rehearsed]) -> _Compiled | LoadedCode:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # it takes seconds to load

        remove_cut_off_builds()
        made: list[tuple[Any, fx.GraphModule]] = []

        def compile_trace(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            rehearsed()
            name_sources_by_place(graph)
            made.append((compile_fx_inner(graph, *args, **kwargs), graph))
            return made[-1][0]

        module = copy.deepcopy(program.graph).eval()
        if program.device.type == "cpu":
            keep_checks(module, program)
        name_by_place(module)
        keep_indices(module)
        if program.device.type == "cpu":
            keep_nan(module)
        with program.scope(), merged_kernels():
            entered = _entered(program)
            module = with_forms(module, entered, DIVISIONS)
            with tracing(TracingContext(mode := static_shapes())):
                described = [mode.from_tensor(tensor, static_shapes=True) for tensor in entered]
                how = options(program.device.type)
                try:
                    engine: Any = compile_fx(module, described, compile_trace, config_patches=how)
                except Exception:
                    rehearsed()  # where it failed, that is the reason, and not what inductor makes of it
                    raise
            for _ in range(self.warm_ups):
                engine(*entered)
            if len(made) != 1:
                return _Compiled(engine)
            [(inner, graph)] = made
            if not is_whole(engine, inner, entered):
                return _Compiled(engine, inner)
        return LoadedCode(inner, InductorCode.of(inner, graph))


class _Compiled:
    """What inductor made of a graph: `inner` is its code, which `engine` has put something around."""

    def __init__(self, engine: Callable[..., Any], inner: Any = None) -> None:
        self.engine, self.inner = engine, inner

    def __call__(self, *tensors: Tensor) -> Any:
        """Run it: flat inputs in, flat outputs out."""
        return self.engine(*tensors)


def _entered(program: Program) -> list[Tensor]:
    """The examples as the graph gets them."""
    return [border.convert(t) for border, t in zip(program.entry, program.examples, strict=True)]


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
