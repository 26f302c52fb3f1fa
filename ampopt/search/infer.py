"""Infers example inputs from a model's first layer where none are given."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ampopt.errors import InputError, first_line
from ampopt.ir.model_copy import exact_copy, untouched_rng

SIDE = 224
"""Height and width (or length) if the model does not fix them."""


def infer_inputs(model: nn.Module, device: torch.device) -> tuple[tuple[Tensor, ...], str]:
    """A batch of one for the first convolution or linear layer, and a note about it.

    The tensor is float, in the layer's dtype: [1, channels, 224, 224] for a 2d convolution (one or three
    spatial dimensions likewise), [1, features] for a linear layer. It is then tested on the model. Raises
    InputError if the first layer is of another kind, or if the model rejects the tensor.
    """
    first = next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)
    asked = "pass example_inputs=(tensor, ...), a tuple of the model's positional arguments"
    dims = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
    if isinstance(first, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        shape = (
            1,
            first.in_channels,
            *(SIDE,) * next(d for kind, d in dims.items() if isinstance(first, kind)),
        )
    elif isinstance(first, nn.Linear):
        shape = (1, first.in_features)
    else:
        kind = "no layer with weights" if first is None else f"a {type(first).__name__}"
        raise InputError(
            f"the input of {type(model).__name__} cannot be inferred: it begins with {kind}; {asked}"
        )
    assert isinstance(first.weight, Tensor)
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(shape, generator=generator, device="cpu").to(device, first.weight.dtype)
    try:
        with torch.no_grad(), untouched_rng(device):
            exact_copy(model)(example)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"the input of {type(model).__name__} cannot be inferred: it does not take a tensor "
            f"{list(shape)}, which its first {type(first).__name__} suggests ({first_line(error)}); {asked}"
        ) from error
    return (example,), f"example_inputs were inferred from the first {type(first).__name__}: {list(shape)}"
