"""parallel-branches: run independent branches of the graph on several CUDA streams at the same time."""

from __future__ import annotations

import dataclasses
import functools
import operator

import torch
from torch import fx

from ampopt.engines.branches import branched, plan
from ampopt.engines.streams import Branched, cuda_streams
from ampopt.ir.graph import calls, where
from ampopt.ir.operator_list import why_not_call
from ampopt.ir.pass_options import option
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Numerics, Result


@dataclasses.dataclass(frozen=True)
class ParallelBranches(Engine):
    """Run independent branches side by side: `a(x) + b(x)` -> `a` and `b` on two streams, which then join.

    Rewrites: the engine that runs the graph; `branches.plan` gives every operator a stream and the events
    that it waits for. Under `cuda-graph` the fork, the waits and the join become edges of the captured graph.
    Requires: CUDA; a functional graph, as every capture is.
    Declines: programs that still run under autocast, whose casts are not nodes that a plan could place;
    programs with another engine; programs with operators that may write to their arguments or draw random
    numbers; programs without independent branches.
    Correct because: the same kernels get the same arguments, and only what does not depend on each other
    loses its order. An operator starts after all that was launched before it on its stream, and after the
    events that it waits for: the plan has one for each input from another stream, unless an earlier wait
    comes after that input already. The fork starts every stream after the caller's inputs are there, and
    the join lets the caller's stream go on after all of them. PyTorch gives each stream a cuBLAS workspace
    of its own and each convolution a cuDNN workspace of its own, so kernels that run together share no
    scratch memory, and cuBLAS chooses what it would choose for one stream. Memory: a freed block goes back
    to the stream that it was allocated on, whose later operators come after every use of it there; a value
    that any operator reads on another stream lives until the join (`streams.CudaStreams`). An operator that
    may return its argument itself is such a reader where its stream is another, so this holds for what
    shares memory, too. Where cuDNN's algorithms are searched, those found may round differently.
    Cost: the held values' memory, and a cuBLAS workspace for each stream. Without a CUDA graph, some
    microseconds on the host for each event; small kernels then end before the next stream's are launched.
    """

    numerics = Numerics.BITWISE

    streams: int = option(4, 1, 64)
    """How many streams there may be, the caller's included."""

    def numerics_on(self, program: Program) -> Numerics:
        """Bitwise, unless cuDNN algorithms are searched while other branches run."""
        return Numerics.REASSOCIATED if program.settings.search_algorithms else self.numerics

    def why_not(self, program: Program) -> str | None:
        """See the class."""
        if program.device.type != "cuda":
            return "there is no CUDA device"
        if (reason := super().why_not(program)) is not None:
            return reason
        if program.engine is not None:
            return "another engine runs it"
        for node in calls(program.graph):
            if reason := _why_not(node):
                return f"{where(node)}: {reason}"
        if plan(program.graph.graph, self.streams).streams == 1:
            return "no two of its operators can run side by side"
        return None

    def apply(self, program: Program) -> Result:
        """Plan the schedule, and write it into a copy of the graph; see the class."""
        if program.engine is not None:
            return Result(program, 0)
        graph = branched(program.graph, plan(program.graph.graph, self.streams))
        engine = Branched(graph, functools.partial(cuda_streams, program.device))
        return Result(program.replace(engine=engine), 1)


def _why_not(node: fx.Node) -> str | None:
    """Why a call's place among the others is not told by its arguments alone."""
    if node.target is operator.getitem:
        return None
    if not isinstance(node.target, torch._ops.OpOverload):
        return "it may write to its arguments"
    return "it changes its argument" if node.target._schema.is_mutable else why_not_call(node)
