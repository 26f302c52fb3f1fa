"""`torch.compile` as an expert has it: freezing or not, its own CUDA graphs or a plain one around it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping

import torch

from benchmarks.by_hand import Call, Inputs
from benchmarks.ways import Border, Runner, graphed

Options = Mapping[str, bool]

FREEZING: Options = {"freezing": True}

AUTOTUNE: Options = {"max_autotune": True, "coordinate_descent_tuning": True}


def compiled(model: Call, _: Inputs, *, options: Options) -> Call:
    """Inductor with these options; nothing is copied out of its CUDA graphs."""
    be_silent()
    function: Call = torch.compile(model, dynamic=False, options=dict(options))
    return function


def be_silent() -> None:
    """Without this inductor prints a table for every convolution and product that it tunes."""
    import torch._inductor.config as inductor

    inductor.autotune_num_choices_displayed = 0
    with contextlib.suppress(ImportError):
        from torch._inductor import select_algorithm

        select_algorithm.PRINT_AUTOTUNE = False


def on_cuda(border: Border, kinds: Mapping[str, Options]) -> dict[str, Runner]:
    """Each kind of options with inductor's own CUDA graphs, and in a plain one."""
    found: dict[str, Runner] = {}
    for kind, options in kinds.items():
        own, none = ({**options, "triton.cudagraphs": graphs} for graphs in (True, False))
        found[f"{kind}, its own graphs".lstrip(", ")] = functools.partial(compiled, options=own)
        plain = functools.partial(compiled, options=none)
        found[f"{kind}, a plain graph".lstrip(", ")] = graphed(plain, border)
    return found
