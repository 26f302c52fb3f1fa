"""What a call costs beyond the kernels that it replays."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ampopt import OptimizedModule
from ampopt.cuda_graphs import CapturedGraph
from ampopt.ledger import ORIGINAL
from ampopt.measure import latency
from ampopt.sampling import interleave


def beyond_replay(fast: OptimizedModule, inputs: tuple[Tensor, ...], device: torch.device) -> float | None:
    """Microseconds of a call beyond the bare replay of its kernels in a CUDA graph, borders included.

    The difference of two median latencies, sampled in turn; None where no CUDA graph answers. The replay is
    that of the same graph: another capture of the same kernels takes up to 10 us more or less.
    """
    if not fast.program.cuda_graph or fast.report.chosen == ORIGINAL:
        return None
    fast(*inputs)
    captured = next(reversed(fast._served.values())).run
    assert isinstance(captured, CapturedGraph)
    calls: dict[str, Callable[[], object]] = {
        "call": functools.partial(fast, *inputs),
        "replay": captured.replay,
    }
    timed = interleave({key: latency(call, device) for key, call in calls.items()}, seconds=1.0)
    return round(1e6 * (timed["call"].median - timed["replay"].median), 2)
