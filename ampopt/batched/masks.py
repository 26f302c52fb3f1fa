"""The batched form of how Mask R-CNN of torchvision pastes its masks into the image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PADDING = 1
"""Pixels around a mask, as `paste_masks_in_image` has them."""


def postprocessed(
    self: Any,
    result: list[dict[str, Tensor]],
    image_shapes: list[tuple[int, int]],
    original_image_sizes: list[tuple[int, int]],
) -> list[dict[str, Tensor]]:
    """`GeneralizedRCNNTransform.postprocess` with all masks of an image at once.

    The loop reads the corners of each box to resize its mask by itself. The library does all but masks here.
    """
    masks = [own.pop("masks", None) for own in result]
    found: list[dict[str, Tensor]] = super(type(self), self).postprocess(
        result, image_shapes, original_image_sizes
    )
    for own, mask, size in zip(found, masks, original_image_sizes, strict=True):
        if mask is not None:
            own["masks"] = pasted(mask, own["boxes"], size)
    return found


def pasted(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """`paste_masks_in_image`: masks [masks, 1, side, side] in their boxes [masks, 4], [masks, 1, *size].

    Linear interpolation in two dimensions is a product with the weights of the rows from the left, and with
    those of the columns from the right. Outside of the box, all weights are 0. A mask with NaN becomes NaN.
    """
    from torchvision.models.detection.roi_heads import expand_boxes, expand_masks

    padded, scale = expand_masks(masks, padding=PADDING)
    corners = expand_boxes(boxes, scale).to(torch.int64)
    side = padded.shape[-1]
    rows = _weights(corners[:, 1], corners[:, 3], size[0], side).to(padded.dtype)
    columns = _weights(corners[:, 0], corners[:, 2], size[1], side).to(padded.dtype)
    found: Tensor = rows @ padded[:, 0] @ columns.mT
    return found[:, None]


def _weights(first: Tensor, last: Tensor, size: int, side: int) -> Tensor:
    """What each of `side` values counts at each of `size` pixels, float32 [masks, size, side].

    The values are spread over the pixels from `first` to `last` as `F.interpolate` does it, bilinear, without
    aligned corners: pixel `i` lies at `(i + 0.5) · side / length - 0.5`.
    """
    pixels = torch.arange(size, device=first.device)
    lengths = (last - first + 1).clamp(min=1)[:, None]
    inside = (pixels >= first[:, None]) & (pixels <= last[:, None])
    scale = torch.full_like(lengths, side, dtype=torch.float32) / lengths
    at = (scale * (pixels - first[:, None] + 0.5) - 0.5).clamp(min=0.0, max=side - 1)
    lower = at.floor()
    part = at - lower
    places = torch.arange(side, device=first.device)
    below = (places == lower[..., None]) * (1.0 - part)[..., None]
    above = (places == (lower + 1.0).clamp(max=side - 1)[..., None]) * part[..., None]
    return (below + above) * inside[..., None]
