"""The batched form of how Keypoint R-CNN of torchvision finds keypoints in its heat maps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.ir.plain_tensors import keep_from_dynamo


def found_in(maps: Tensor, boxes: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """`keypointrcnn_inference`: each image's keypoints [boxes, keypoints, 3], and scores [boxes, keypoints].

    `maps` are those of all images, [boxes, keypoints, height, width], `boxes` each image's, in pixels.
    """
    each = maps.split([len(own) for own in boxes])
    points = [_of_image(*pair) for pair in zip(each, boxes, strict=True)]
    return [own for own, _ in points], [scores for _, scores in points]


def _of_image(maps: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """`heatmaps_to_keypoints`, which reads two sizes of each box, and computes 16 operators for it.

    The sizes are read at once here. What is left for each box is to resize its maps and to find their largest
    values, see `_largest`; all others are computed for all boxes.
    """
    sizes = (boxes[:, 2:] - boxes[:, :2]).clamp(min=1)  # widths, heights
    pixels = sizes.ceil()
    scores, places = _largest(maps, pixels)
    widths = pixels[:, :1].to(torch.int64)
    at = torch.stack([places % widths, places // widths], 2)
    points = (at.float() + 0.5) * (sizes / pixels)[:, None] + boxes[:, None, :2]
    return F.pad(points.float(), (0, 1), value=1.0), scores.float()


def _largest(maps: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """The largest values of each box's maps in its size, and their places, [boxes, keypoints] each.

    A graph of this would hold for boxes of the example's sizes alone.
    """
    found = [(maps.new_empty(0, maps.shape[1]), pixels.new_empty(0, maps.shape[1], dtype=torch.int64))]
    for row, (width, height) in enumerate(pixels.to(torch.int64).tolist()):
        resized = F.interpolate(maps[row : row + 1], size=(height, width), mode="bicubic")
        found.append(resized.flatten(2).max(2))
    scores, places = (torch.cat(each) for each in zip(*found, strict=True))
    return scores, places


keep_from_dynamo(_largest, "its sizes are those of the boxes that were found")
