"""Pictures to train and test on: a shaded ball rendered over crops of scikit-learn's two photographs.

The left part of each photograph serves training, the right part testing, so that no background is in both.
Positions are in pixels, (x, y), and an integer is the middle of a pixel.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from benchmarks.real_data import photographs

HEIGHT, WIDTH = 64, 96
"""Pixels of a rendered image."""
PHOTOGRAPH = (427, 640)
TRAIN_COLUMNS, TEST_COLUMNS = slice(0, 432), slice(432, 640)
LARGEST_CROP = 2.0
"""The largest crop, as a multiple of the image's size; the narrower part of a photograph has room for it."""
RADII = (4.0, 10.0)
FASTEST = 6.0
"""Pixels that a ball moves at most while the shutter is open."""
EXPOSURES = 5
"""Positions of a moving ball whose mean is its blur; odd, so that the labelled one is among them."""
OCCLUDED = 0.3
"""The share of balls of which a straight edge in front hides a part."""


@dataclasses.dataclass(frozen=True)
class Renderer:
    """Renders balls over crops of `backgrounds`: [P, 3, H, W] in [0, 1]."""

    backgrounds: Tensor

    @classmethod
    def for_training(cls) -> Renderer:
        """Over the left part of the photographs."""
        return cls(photographs(*PHOTOGRAPH)[..., TRAIN_COLUMNS])

    @classmethod
    def for_testing(cls) -> Renderer:
        """Over the right part of the photographs, which training never shows."""
        return cls(photographs(*PHOTOGRAPH)[..., TEST_COLUMNS])

    def __call__(self, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """(images [count, 3, HEIGHT, WIDTH] in [0, 1], centres [count, 2] in pixels), one ball in each."""
        scenes = torch.stack([self._crop(generator) for _ in range(count)])
        centres, opacity, colour = _balls(count, generator)
        images = scenes * (1 - opacity.sum(1)) + (opacity * colour).sum(1)
        brightness = _uniform((count, 1, 1, 1), 0.6, 1.3, generator)
        noise = 0.02 * torch.randn(images.shape, generator=generator)
        return (images * brightness + noise).clamp(0, 1), centres

    def _crop(self, generator: Generator) -> Tensor:
        """A random piece of a random background, mirrored half of the time: [3, HEIGHT, WIDTH]."""
        scale = float(_uniform((), 1.0, LARGEST_CROP, generator))
        height, width = round(HEIGHT * scale), round(WIDTH * scale)
        photographs, _, rows, columns = self.backgrounds.shape
        choices = (photographs, rows - height + 1, columns - width + 1, 2)
        which, top, left, mirrored = (int(torch.randint(n, (), generator=generator)) for n in choices)
        piece = self.backgrounds[which : which + 1, :, top : top + height, left : left + width]
        piece = F.interpolate(piece, (HEIGHT, WIDTH), mode="bilinear", antialias=True)[0]
        return piece.flip(-1) if mirrored else piece


def test_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """(images, centres) over the backgrounds for testing; the same ones for the same arguments."""
    return Renderer.for_testing()(count, Generator().manual_seed(seed))


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)


def _balls(count: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random balls: centres [N, 2]; opacity [N, K, 1, H, W] and colour [N, K, 3, H, W] of K exposures.

    The opacities of an image's exposures add up to at most 1.
    """
    radius = _uniform((count, 1), *RADII, generator)
    room = torch.tensor([WIDTH - 1.0, HEIGHT - 1.0]) - 2 * radius
    centres = radius + room * torch.rand((count, 2), generator=generator)
    motion = _uniform((count, 1, 2), -FASTEST / 2, FASTEST / 2, generator)
    positions = centres[:, None] + motion * torch.linspace(-1, 1, EXPOSURES)[:, None]

    rows, columns = torch.arange(HEIGHT)[:, None], torch.arange(WIDTH)
    x = (columns - positions[..., 0, None, None]) / radius[:, :, None, None]
    y = (rows - positions[..., 1, None, None]) / radius[:, :, None, None]
    distance = torch.sqrt(x * x + y * y)
    inside = (radius[:, :, None, None] * (1 - distance) + 0.5).clamp(0, 1)
    opacity = inside * _in_view(rows, columns, centres, radius, generator)[:, None] / EXPOSURES
    return centres, opacity[:, :, None], _shading(x, y, generator)


def _in_view(rows: Tensor, columns: Tensor, centres: Tensor, radius: Tensor, generator: Generator) -> Tensor:
    """0 behind the edge that hides a part of some balls, but never their centre, else 1: [N, H, W]."""
    count = len(centres)
    angle = _uniform((count, 1, 1), 0, 2 * torch.pi, generator)
    hidden = torch.rand((count, 1, 1), generator=generator) < OCCLUDED
    depth = radius[:, :, None] * _uniform((count, 1, 1), 0.1, 0.9, generator)
    along = (columns - centres[:, 0, None, None]) * angle.cos() + (
        rows - centres[:, 1, None, None]
    ) * angle.sin()
    return torch.where(hidden, (depth - along + 0.5).clamp(0, 1), torch.ones(()))


def _shading(x: Tensor, y: Tensor, generator: Generator) -> Tensor:
    """A sphere's colour under a lamp, with highlight, at x and y [N, K, H, W] in radii from its centre."""
    count = len(x)
    hue = _uniform((count, 1, 3, 1, 1), 0.2, 1.0, generator)
    lamp = torch.randn((count, 3, 1, 1, 1), generator=generator)
    lamp[:, 2] = lamp[:, 2].abs() + 1.0  # on the viewer's side
    lamp = F.normalize(lamp, dim=1)
    depth = (1 - x * x - y * y).clamp(min=0).sqrt()
    facing = (x * lamp[:, 0] + y * lamp[:, 1] + depth * lamp[:, 2]).clamp(min=0)[:, :, None]
    colour: Tensor = (hue * (0.35 + 0.65 * facing) + 0.5 * facing**16).clamp(0, 1)
    return colour
