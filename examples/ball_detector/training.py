"""Train EncDecMil18 on rendered balls, and measure how well it finds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.networks import EncDecMil18
from examples.ball_detector.peaks import CELL, FOUND, distances, peaks
from examples.ball_detector.rendering import HEIGHT, WIDTH, Renderer

STEPS, BATCH = 650, 8
LEARNING_RATE = 1e-2
SPREAD = 1.25
"""Standard deviation, in cells, of the Gaussian that a heat map should be."""
BALL_WEIGHT = 8.0
"""By how much more a cell at a ball's centre counts than one far from it, of which there are many."""
PLACE_WEIGHT = 10.0
"""How much the cross-entropy of the ball's place counts beside that of the single cells."""
PRIOR = -4.0
"""The head's bias at the start: nearly every cell has no ball."""


def target(centres: Tensor) -> Tensor:
    """The heat maps to learn for centres [N, 2] in pixels: a Gaussian of height 1, [N, 1, H/4, W/4]."""
    cells = (centres - (CELL - 1) / 2) / CELL
    x = torch.arange(WIDTH // CELL) - cells[:, 0, None, None]
    y = torch.arange(HEIGHT // CELL)[:, None] - cells[:, 1, None, None]
    return torch.exp(-(x * x + y * y) / (2 * SPREAD**2))[:, None]


def loss(logits: Tensor, centres: Tensor) -> Tensor:
    """What heat maps [N, 1, H/4, W/4] are from the target, as a mean over images; a scalar.

    The cross-entropy of each cell (is a ball there?) makes sigmoid(logits) the target, and its weights
    leave that optimum where it is, because they depend on the target alone. The cross-entropy of the
    softmax over all cells (where is the ball?), which has the same optimum up to what is added to all
    logits, teaches places much faster.
    """
    wanted = target(centres)
    weight = 1 + BALL_WEIGHT * wanted
    each = F.binary_cross_entropy_with_logits(logits, wanted, weight, reduction="sum") / len(wanted)
    share = wanted.flatten(1) / wanted.sum((1, 2, 3))[:, None]
    return each + PLACE_WEIGHT * F.cross_entropy(logits.flatten(1), share)


def train_detector(
    steps: int = STEPS, seed: int = 0, *, progress: Callable[[int, float], None] | None = None
) -> nn.Module:
    """An EncDecMil18 trained for `steps` batches, in evaluation mode: the same for the same arguments.

    `progress` is told the number of each step and its loss.
    """
    render, generator = Renderer.for_training(), torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = EncDecMil18()
    nn.init.constant_(model.get_parameter("head.bias"), PRIOR)
    model.to(memory_format=torch.channels_last)  # a fifth faster on CPUs
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for step in range(steps):
        images, centres = render(BATCH, generator)
        optimizer.zero_grad()
        value = loss(model(images.contiguous(memory_format=torch.channels_last)), centres)
        value.backward()
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step, value.item())
    return model.to(memory_format=torch.contiguous_format).eval()


def save_detector(model: nn.Module, path: Path) -> None:
    """Write the weights of a detector as safetensors."""
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)


def load_detector(path: Path) -> nn.Module:
    """The detector whose weights `save_detector` wrote, in evaluation mode."""
    model = EncDecMil18()
    model.load_state_dict(load_file(path))
    return model.eval()


def peak_distance(outputs: Tensor, reference: Tensor) -> float:
    """The largest distance in pixels between a batch's peaks and the reference's: `ampopt.optimize`'s metric.

    See `peaks.distances` for images without a ball, and for balls lost or invented (infinite).
    """
    moved = distances(outputs.double().cpu().numpy(), reference.double().cpu().numpy())
    return float(moved.max(initial=0.0))


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """How well a detector finds balls: the median distance in pixels, and shares of all images."""

    median: float
    within_3_px: float
    found: float


def accuracy(model: Callable[[Tensor], Tensor], images: Tensor, centres: Tensor) -> Accuracy:
    """Detect the ball in each image, in batches of BATCH, and compare with the true centres."""
    with torch.no_grad():
        heat_maps = torch.cat([model(batch).float().cpu() for batch in images.split(BATCH)])
    positions, probabilities = peaks(heat_maps.numpy())
    away = np.hypot(*(positions - centres.double().numpy()).T)
    found = probabilities >= FOUND
    return Accuracy(float(np.median(away)), float((found & (away <= 3)).mean()), float(found.mean()))
