"""onnx-runtime: run the graph in ONNX Runtime."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ampopt.engines.onnx_choices import OnnxChoices
from ampopt.engines.onnx_engine import OnnxEngine
from ampopt.engines.onnx_graph import dims_in
from ampopt.engines.onnx_program import for_onnx_runtime, plain_model
from ampopt.errors import first_line
from ampopt.ir.choosers import makes_choices
from ampopt.ir.graph import calls, is_native, where
from ampopt.ir.matrix_forms import why_not_answered
from ampopt.ir.numerics import relative_error
from ampopt.ir.pass_options import option
from ampopt.ir.program import Border, Program
from ampopt.ir.shapes import decides_by_values
from ampopt.ir.transform import Engine, Result
from ampopt.ir.unmarked import array_of
from ampopt.measure.clocks import latency
from ampopt.measure.sampling import gain, interleave
from ampopt.ort.knobs import start_options
from ampopt.ort.options import CPU, PREFERRED, SessionOptions
from ampopt.ort.profile import PROFILING_S
from ampopt.ort.rewrites import EXACT, STEPS, Rewrites, merged, rewritten
from ampopt.ort.session import OnnxRunner, onnxruntime
from ampopt.ort.tuning import tune

logger = logging.getLogger("ampopt")

TUNING_S = 6.0
"""Time in seconds for measuring session options, including the loading of sessions; half of it with gaps."""

COMPARING_S = 1.5
"""Time in seconds for comparing two sessions."""

SAME = 1e-4
"""Largest relative error between two sessions that are taken to compute the same."""


@dataclasses.dataclass(frozen=True)
class OnnxRuntime(Engine):
    """Run the graph in ONNX Runtime, with the session options that are fastest on this machine.

    Each of these is applied if it is faster: convolution groups narrower than ONNX Runtime's channel blocks
    are merged, and padded with groups of zeros where some are missing for that; channel reorderings are
    removed from its optimized graph; and, if there is a C++ compiler, operators of our own compute 3x3
    convolutions, by Winograd's algorithm in tiles of 2x2 or 4x4 or in narrow groups, and chains of
    convolutions with few channels, row by row.

    Rewrites: the engine that runs the graph. Inputs are converted to contiguous layout, because the runtime
    chooses its own layouts.
    Requires: a CPU, float32, and the packages of the extra `onnx`.
    Declines: programs that still run under autocast, or that call operators ONNX does not know.
    Correct because: ONNX's operators are the graph's own (`onnx_graph` refuses operators without an
    equivalent), and the runtime computes the same expressions, possibly in another order. Options are only
    taken where their outputs agree with those of the default options. `ort.blocked` and `onnx_pooling` are
    exact, and so are `ort.groups` and `ort.padding`, which add zeros, for finite numbers; `ort.chains` and
    `ort.narrow_groups` sum in another order; `ort.winograd` computes the same function with another rounding,
    which is relative to the largest number of a tile.
    NaN stays, and may spread in merged groups and Winograd's tiles. Where an operator decides by values,
    groups are not merged, and what is not finite in a tile is computed anew without transforms.
    Cost: seconds to export, once for a program (`onnx_program`), and to measure options, which stay the
    defaults if there is no time for that (`hurried`); a second copy of the weights, in which those for
    Winograd's algorithm have 16 or 36 numbers for every 9, and the 9 beside them where NaN may not spread;
    some seconds to compile our operators, once on a machine.
    """

    packages = ("onnx", "onnxscript", "onnxruntime")
    extra = "onnx"
    slow_to_apply = True
    shape_dependent = False

    session: tuple[tuple[str, str], ...] | None = None
    """The session's options and `Rewrites`, each field as JSON, or the defaults; None: measure them."""

    seconds: float = option(3600.0, 0.0, 3600.0)
    """The time in which all is done: what does not fit in after the export is not measured."""

    def why_not(self, program: Program) -> str | None:
        """See the class."""
        if program.device.type != "cpu":
            return "on a GPU the graph itself, captured, has always been faster"
        if (reason := super().why_not(program)) is not None:
            return reason
        if program.lane.is_mixed:
            return "ONNX Runtime's CPU provider computes in float32"
        found = next((node for node in calls(program.graph) if is_native(node)), None)
        if found is not None:
            return f"ONNX does not know {found.target}"
        return why_not_answered(program.graph)

    def expected_seconds(self, program: Program) -> float:
        """A few seconds for the export to start, plus a time for each operator."""
        tuning = TUNING_S + 2 * COMPARING_S + 5 * PROFILING_S if self.session is None else 0.0
        return 2.0 + 0.02 * sum(1 for _ in calls(program.graph)) + tuning

    def hurried(self) -> Engine:
        """The engine with default options, which give most of the gain in a few seconds."""
        return dataclasses.replace(self, session=self.session or ())

    def within(self, seconds: float) -> OnnxRuntime:
        """Measure less if little time is left; a replay measures nothing."""
        if self.session is not None:
            return self
        return dataclasses.replace(self, seconds=min(self.seconds, seconds))

    def apply(self, program: Program) -> Result:
        """Export, select options, run once; see the class."""
        if program.engine is not None:
            return Result(program, 0)
        end = time.perf_counter() + self.seconds
        entry = tuple(Border(border.dtype) for border in program.entry)
        entered = tuple(b.convert(t) for b, t in zip(entry, program.examples, strict=True))
        model = for_onnx_runtime(plain_model(program.graph, entered, dims_in(program.sizes)))
        hints = list[str]()
        if self.session is None and time.perf_counter() + TUNING_S < end:
            found = [name for name in PREFERRED if name in onnxruntime().get_available_providers()]
            arrays = [array_of(tensor) for tensor in entered]
            options = tune(model, arrays, seconds=TUNING_S, providers=found).best
            exact = _is_exact(program, hints)
            engine, rewrites = _fastest(model, options, entered, hints, exact=exact, end=end)
        else:
            if not self.session:
                hints.append("ONNX Runtime runs with default options: there was no time to measure others")
            stored = {name: json.loads(value) for name, value in self.session or ()}
            rewrites = Rewrites.taken_from(stored)
            options = SessionOptions.from_dict(stored) if stored else start_options(CPU)
            if program.sizes:  # buffers have one size
                options = dataclasses.replace(options, io_binding=False)
            engine = OnnxEngine(OnnxRunner(model, options))
            if rewrites != Rewrites(exact=rewrites.exact):
                tried = _tried(model, options, lambda: rewrites, entered, engine(*entered), hints)
                engine = tried[0] if tried is not None else engine
        chosen = {**options.to_dict(), **dataclasses.asdict(rewrites)}
        session = tuple((name, json.dumps(value)) for name, value in chosen.items())
        if makes_choices(program.graph) and not program.sizes:
            engine = engine.telling(OnnxChoices(program, options))
        changed = program.replace(engine=engine, entry=entry)
        return Result(changed, 1, hints=tuple(hints), replay=OnnxRuntime(session))


def _is_exact(program: Program, hints: list[str]) -> bool:
    """Whether no rewrite may spread NaN: an operator may take that for another value."""
    if (node := decides_by_values(program)) is None:
        return False
    hints.append(f"ONNX Runtime's graph has no rewrites that spread NaN: {where(node)} decides by values")
    return True


def _fastest(
    model: bytes,
    options: SessionOptions,
    entered: Sequence[Tensor],
    hints: list[str],
    *,
    exact: bool,
    end: float,
) -> tuple[OnnxEngine, Rewrites]:
    """The engine as the options have it, or with its graph rewritten where that is faster; and how.

    A rewrite is begun if it can be compared until `end`.
    """
    engine, chosen = OnnxEngine(OnnxRunner(model, options)), Rewrites(exact=exact)
    expected, arrays = engine(*entered), [array_of(tensor) for tensor in entered]
    for step in EXACT if exact else STEPS:
        if time.perf_counter() + PROFILING_S + COMPARING_S > end:
            hints.append("ONNX Runtime's graph has not all rewrites: there was no time to compare others")
            break
        rewrites = functools.partial(step, model, options, arrays, chosen)
        tried = _tried(model, options, rewrites, entered, expected, hints)
        if tried is not None and _is_faster(tried[0], engine, entered, step is merged):
            engine, chosen = tried
    return engine, chosen


def _tried(
    model: bytes,
    options: SessionOptions,
    rewrites: Callable[[], Rewrites | None],
    entered: Sequence[Tensor],
    expected: Sequence[Tensor],
    hints: list[str],
) -> tuple[OnnxEngine, Rewrites] | None:
    """An engine with its graph rewritten; None where there is nothing to gain, or it fails, see `hints`."""
    try:
        if (chosen := rewrites()) is None:
            return None
        engine = OnnxEngine(rewritten(model, options, chosen))
        error = max(relative_error(a, b) for a, b in zip(engine(*entered), expected, strict=True))
    except Exception as failure:  # whatever it is: the graph as it was runs
        hints.append(f"ONNX Runtime's graph stays as it was: {first_line(failure)}")
        logger.info("ampopt: %s", hints[-1])
        return None
    if error > SAME:
        hints.append(f"ONNX Runtime's graph stays as it was: rewritten, its error is {error:.2g}")
        logger.info("ampopt: %s", hints[-1])
        return None
    return engine, chosen


def _is_faster(other: OnnxEngine, engine: OnnxEngine, entered: Sequence[Tensor], by_node: bool) -> bool:
    """Whether the other is; `by_node`: its changed nodes are, so that a small gain may hide in the noise."""
    calls = {"as it was": engine, "rewritten": other}
    cpu = torch.device("cpu")
    samplers = {name: latency(functools.partial(call, *entered), cpu) for name, call in calls.items()}
    timed = interleave(samplers, seconds=COMPARING_S)
    found = gain(timed["as it was"], timed["rewritten"])
    return found.is_real or (by_node and not found.is_loss)
