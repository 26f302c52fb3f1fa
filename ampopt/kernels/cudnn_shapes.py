"""Registers shape functions (fake kernels) of cuDNN's fused operators, so that compilers can handle them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from ampopt.system.once import once


@once
def know_shapes() -> torch.library.Library | None:
    """Register kernels for fake tensors for `cudnn_convolution_relu` and `_add_relu`, once per process."""
    if torch.ops.aten.cudnn_convolution_relu.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
        return None
    library = torch.library.Library("aten", "IMPL")
    library.impl("cudnn_convolution_relu", _relu, "Meta")
    library.impl("cudnn_convolution_add_relu", _add_relu, "Meta")
    return library


def _relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    ranges = (stride, padding, dilation, False, [0] * len(stride), groups)
    shape = torch.ops.aten.convolution.default(x, weight, bias, *ranges).shape
    # As `cudnn_conv_suggest_memory_format` (ATen/native/ConvUtils.h) has it: one operand is enough.
    orders = {suggest_memory_format(x), suggest_memory_format(weight)}
    order = torch.channels_last if torch.channels_last in orders else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=order)


def _add_relu(
    x: Tensor,
    weight: Tensor,
    z: Tensor,  # noqa: ARG001
    alpha: float | None,  # noqa: ARG001
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    return _relu(x, weight, bias, stride, padding, dilation, groups)
