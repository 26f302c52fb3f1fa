"""The optimized program in a diagnosis: its latency, and its kernels in the layers' rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ampopt.deploy.runtime import OptimizedModule
from ampopt.diagnosis.case import LEAST, MOST, SECONDS, Case
from ampopt.diagnosis.ceilings import Ceilings
from ampopt.diagnosis.layers import OPTIMIZED, Layer, bounded
from ampopt.diagnosis.operators import Kernel, Spent
from ampopt.diagnosis.own_program import OwnKernel, own_kernels
from ampopt.errors import InputError, first_line
from ampopt.ir.signature import describe
from ampopt.measure.clocks import settled_latency
from ampopt.measure.sampling import interleave
from ampopt.system.interrupts import check_interrupted
from ampopt.system.wording import argument


def check_optimized(module: object, case: Case) -> OptimizedModule:
    """The module, if it is one program for this call. Raises InputError."""
    if not isinstance(module, OptimizedModule):
        raise InputError(
            f"{argument('optimized=')} takes what ampopt.optimize returns for a model that is one graph, not "
            f"{type(module).__name__}"
        )
    if case.program is None:
        raise InputError(f"{argument('optimized=')} is of another model: this one is not one graph")
    wanted, given = ([describe(t) for t in each.examples] for each in (module.program, case.program))
    if wanted != given or module.program.device != case.device:
        raise InputError(
            f"{argument('optimized=')} is a program for {', '.join(wanted)} on {module.program.device}, "
            f"and the example call is {', '.join(given)} on {case.device}: give the same call"
        )
    return module


def add_optimized(case: Case, module: OptimizedModule) -> tuple[OwnKernel, ...]:
    """Time the module, attribute its kernels, and give the layers their column; what fails is a note."""
    sampler = settled_latency(lambda: module(*case.args, **case.kwargs), case.device)
    timed = interleave({OPTIMIZED: sampler}, seconds=SECONDS, least=LEAST, most=MOST)
    case.latency = {**case.latency, **timed}
    case.read_usage(OPTIMIZED, lambda: module(*case.args, **case.kwargs), timed[OPTIMIZED].median)
    if module.health.chose_original:
        case.notes.append("nothing was faster than the original, which answers the optimized module's calls")
        return ()
    try:
        found = own_kernels(module.program)
    except Exception as error:  # compiled code that nothing can look into
        check_interrupted(error)
        case.notes.append(f"the optimized program's kernels belong to no layer: {first_line(error)}")
        return ()
    dtype = module.program.lane.dtype
    case.layers = with_column(case.layers, found, case.ceilings, dtype)
    return found


def with_column(
    layers: Sequence[Layer], kernels: Sequence[OwnKernel], ceilings: Ceilings, dtype: torch.dtype
) -> tuple[Layer, ...]:
    """The layers, each with the kernels that compute it.

    A kernel that computes several layers is in the row of the one that takes longest in FP32; the others have
    none.
    """
    rows: dict[str, list[OwnKernel]] = {}
    for kernel in kernels:
        places = {(origin.module, origin.source) for origin in kernel.origins}
        among = [layer for layer in layers if (layer.work.module, layer.work.source) in places]
        if among:
            longest = max(among, key=lambda layer: layer.seconds("fp32"))
            rows.setdefault(longest.name, []).append(kernel)
    return tuple(
        _with(layer, _spent(rows[layer.name]), ceilings, dtype) if layer.name in rows else layer
        for layer in layers
    )


def _with(layer: Layer, spent: Spent, ceilings: Ceilings, dtype: torch.dtype) -> Layer:
    """A layer with its kernels, which move at least what the operator would if FP32 were `dtype`."""
    return bounded(layer, OPTIMIZED, spent, layer.work.moved_in(dtype), dtype, ceilings)


def _spent(kernels: Sequence[OwnKernel]) -> Spent:
    own = tuple(Kernel(kernel.name, kernel.seconds) for kernel in kernels)
    return Spent(sum(kernel.seconds for kernel in kernels), own)
