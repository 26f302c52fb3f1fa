"""The detector in float16 as a GPU rounds it, on a CPU: the program that the FP16 bundle's ONNX is made from.

ONNX Runtime's CPU provider has no float16 convolutions: it casts to float32 around them, and so leaves out
roundings that a GPU makes. What those do to the peaks is seen here instead.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ampopt import OptimizedModule
from ampopt.deploy.onnx_verify import emulated
from ampopt.deploy.portable import HALF, portable_program
from ampopt.ir.capture import capture
from ampopt.ir.model_copy import private_copy
from examples.ball_detector.comparison import Array


def heat_maps_in_half(model: nn.Module, fast: OptimizedModule, images: Array) -> Array:
    """Heat maps [N, 1, H/4, W/4] for images [N, 3, H, W]; every float16 operator's result is rounded.

    Products are summed in float32 and rounded once, as a GPU's matrix units do.
    """
    example = torch.from_numpy(images[:1])
    captured = capture(private_copy(model), (example,), {}, example.device)
    run = emulated(portable_program(captured, fast.program.recipe, HALF).run)
    calls = [run(image[None])[0].numpy() for image in torch.from_numpy(images)]
    return np.concatenate(calls)
