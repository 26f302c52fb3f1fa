"""memory-layout: convolutions that compute in another layout than their inputs come in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from torch import Tensor

from ampopt.diagnosis.case import Case, eager_call
from ampopt.diagnosis.finding import Finding, counted, saved
from ampopt.ir.lanes import Lane
from ampopt.ir.model_copy import exact_copy
from ampopt.ir.program import CHANNELS_LAST
from ampopt.ir.signature import map_tensors

_PERMUTES = ("nchwtonhwc", "nhwctonchw", "nchw2nhwc", "nhwc2nchw")
"""Parts of the names of cuDNN's kernels that permute, in lower case."""


def find(case: Case) -> Iterator[Finding]:
    """The kernels that permute, where they can be seen; executed: weights and inputs in channels_last."""
    if not any(weight.dim() in CHANNELS_LAST for weight in case.original.parameters()):
        return
    for name, lane in case.lanes.items():
        ran = case.remedied("in channels_last", lane, functools.partial(_in_channels_last, case, lane))
        if ran is None or not ran.helps:
            continue
        kernels = case.kernels(name)
        permutes = [kernel for kernel in kernels if is_permute(kernel.name)]
        spent_ms = 1e3 * sum(kernel.seconds for kernel in permutes)
        seen = (
            f"kernels that only permute between NCHW and NHWC take {spent_ms:.3g} ms ({len(permutes)} of "
            f"{counted(len(kernels), 'kernel', 'kernels')})"
            if permutes
            else "the convolutions are faster with the channel innermost in memory"
        )
        yield Finding(
            "memory-layout",
            seen,
            advice="model.to(memory_format=torch.channels_last), and the inputs, too",
            lane=name,
            share=saved(ran),
            counterfactual=ran,
        )


def _in_channels_last(case: Case, lane: Lane) -> Callable[[], object]:
    """A call of the model as the advice makes it."""
    ranks = {weight.dim() for weight in case.original.parameters()}
    memory_format = next(CHANNELS_LAST[rank] for rank in CHANNELS_LAST if rank in ranks)
    model = exact_copy(case.original)
    model.to(memory_format=memory_format)

    def moved(tensor: Tensor) -> Tensor:
        is_image = CHANNELS_LAST.get(tensor.dim()) is memory_format
        return tensor.contiguous(memory_format=memory_format) if is_image else tensor

    args, kwargs = map_tensors(moved, case.args, case.kwargs)
    return eager_call(model, args, kwargs, case.device, lane)


def is_permute(kernel: str) -> bool:
    """Whether a kernel's name is that of a permute around a convolution."""
    return any(part in kernel.lower() for part in _PERMUTES)
