"""ampopt's own operators, for processes that get programs which may call them."""

from __future__ import annotations

from ampopt.ir.pool_indices import pooling_operators
from ampopt.kernels.fused_conv import fused_conv
from ampopt.kernels.image_conv import image_conv
from ampopt.kernels.row_suppression import suppress_rows


def register() -> None:
    """Register all of them with PyTorch."""
    for operator in (fused_conv, image_conv, pooling_operators, suppress_rows):
        operator()
