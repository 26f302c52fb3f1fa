"""memory-layout: convolutions that compute in another layout than their inputs come in."""

from __future__ import annotations

from collections.abc import Iterator

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding, saved
from ampopt.passes import ChannelsLast

_PERMUTES = ("nchwtonhwc", "nhwctonchw", "nchw2nhwc", "nhwc2nchw")
"""Parts of the names of cuDNN's kernels that permute, in lower case."""


def find(case: Case) -> Iterator[Finding]:
    """The kernels that permute, where they can be seen; executed: weights and inputs in channels_last."""
    for name, lane in case.lanes.items():
        ran = case.with_passes("in channels_last", lane, ChannelsLast())
        if ran is None or not ran[0].helps:
            continue
        permutes = [kernel for kernel in case.kernels(name) if is_permute(kernel.name)]
        spent_ms = 1e3 * sum(kernel.seconds for kernel in permutes)
        seen = (
            f"{len(permutes)} kernels only permute between NCHW and NHWC and take {spent_ms:.3g} ms"
            if permutes
            else "the convolutions are faster with the channel innermost in memory"
        )
        yield Finding(
            "memory-layout",
            seen,
            advice="model.to(memory_format=torch.channels_last), and the inputs, too",
            lane=name,
            share=saved(ran[0]),
            counterfactual=ran[0],
        )


def is_permute(kernel: str) -> bool:
    """Whether a kernel's name is that of a permute around a convolution."""
    return any(part in kernel.lower() for part in _PERMUTES)
