"""`torch.compile(model, backend="ampopt")`: optimizes the graphs that TorchDynamo captures.

Dynamo runs what it cannot capture as Python, and hands over the graphs between with guards: what they depend
on besides their inputs. Each graph is optimized and verified as a model of its own, see `ampopt.optimize` and
`ampopt.search.compiled_graph`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ampopt.errors import AmpoptError, InputError, first_line
from ampopt.ir.arguments import progress_flag
from ampopt.search.compiled_graph import CompiledGraph, compile_graph, is_weight, size_of
from ampopt.search.options import Options
from ampopt.search.progress import progress_line
from ampopt.search.rehearsal import Sandbox
from ampopt.system.garbage import old_left_aside
from ampopt.system.interrupts import check_interrupted, watched
from ampopt.system.memory import release
from ampopt.system.process_state import process_kept
from ampopt.system.turns import optimizing

logger = logging.getLogger("ampopt")

_NOT_OF_GRAPHS = {"outputs", "io", "dynamic", "is_budget_given"}
_OPTIONS = {field.name for field in dataclasses.fields(Options)} - _NOT_OF_GRAPHS
"""Names of the user's options: a graph's results stay the caller's, and have the dtypes and sizes that they
had."""

_graphs: weakref.WeakSet[CompiledGraph] = weakref.WeakSet()


def backend(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Optimize a graph that `torch.compile` has captured, and return the function that computes it.

    Args:
        graph: the graph; its result is a tuple of tensors.
        inputs: its example inputs, the model's weights among them.
        mode: not supported: InputError if it is given.
        options: options of `ampopt.optimize`, each for every graph: `precision` ("fp32" if it is not given),
            `tolerance`, `metric`, `budget_s`, `policy`, `amp_dtype`, `exclude`, `cache`, `nan`, `passes`; and
            `progress`.

    Returns:
        A `CompiledGraph`; or the graph's own code, with the reason in a warning, if the graph may need
        gradients, has sizes, strides or numbers that may change from call to call, writes to its inputs,
        returns views of them, cannot be verified, or is no faster.

    Raises:
        InputError: an option is unknown or invalid.
    """
    shown, chosen = _checked(mode, dict(options or {}))
    try:
        compiled = _compiled(graph, inputs, chosen, shown)
    except Exception as error:
        check_interrupted(error)
        reason = str(error) if isinstance(error, AmpoptError) else f"it fails: {first_line(error)}"
        logger.warning("ampopt: a graph of %d operators runs as it was: %s", size_of(graph), reason)
        return graph.forward
    _graphs.add(compiled)
    return compiled


def compiled_graphs() -> list[CompiledGraph]:
    """The optimized graphs that are in use, each with its report."""
    return list(_graphs)


def _checked(mode: str | None, options: dict[str, Any]) -> tuple[bool | None, Options]:
    """Whether progress is shown, and the options; raises InputError."""
    if mode is not None:
        raise InputError(f"mode={mode!r}: the backend has no modes, give options={{...}}")
    shown = progress_flag(options.pop("progress", None))
    if unknown := sorted(set(options) - _OPTIONS):
        raise InputError(f"unknown option {unknown[0]!r}: choose of {', '.join(sorted(_OPTIONS))}, progress")
    seconds = options.pop("budget_s", None)
    return shown, Options(**{"precision": "fp32", **options}).within(seconds)


@optimizing.taken(waits=False)  # Dynamo's own lock is held here: the other thread may wait for that
@old_left_aside()
@watched()
@process_kept()
def _compiled(
    graph: fx.GraphModule, inputs: Sequence[Any], options: Options, shown: bool | None
) -> CompiledGraph:
    device = next((each.device for each in inputs if isinstance(each, Tensor)), torch.device("cpu"))
    weights = [place for place, each in enumerate(inputs) if is_weight(each)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._guards.tracing(None))  # Dynamo's fake tensors are none of the exporter's
        limit_s = options.budget_s if options.is_budget_given else None
        tell = stack.enter_context(progress_line(shown, time.perf_counter(), limit_s))
        sandbox = stack.enter_context(Sandbox(device))
        compiled = compile_graph(graph, inputs, weights, options, tell, sandbox, is_part=False)
    release(device)
    return compiled
