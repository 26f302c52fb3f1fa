"""The ball detector: pictures by seed, peaks where they were put, a falling loss, bundles without torch."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Generator, Tensor

from examples.ball_detector.comparison import compare, table
from examples.ball_detector.peaks import CELL, distances, peaks
from examples.ball_detector.rendering import HEIGHT, RADII, WIDTH, Renderer, test_images
from examples.ball_detector.robot_side import refuse_torch
from examples.ball_detector.training import (
    accuracy,
    load_detector,
    loss,
    peak_distance,
    save_detector,
    target,
    train_detector,
)

ROOT = Path(__file__).resolve().parents[2]
ROBOT = "examples.ball_detector.robot_side"

test_images.__test__ = False  # type: ignore[attr-defined]  # a function of the example, not a test


def _heat_map(*centres: tuple[float, float], height: float = 0.9) -> NDArray[np.float64]:
    """Logits of Gaussians at `centres` in pixels, one in each image."""
    wanted = target(torch.tensor(centres, dtype=torch.float64)).clamp(min=1e-12) * height
    logits: NDArray[np.float64] = torch.logit(wanted).numpy()
    return logits


def _tensor(*centres: tuple[float, float], height: float = 0.9) -> Tensor:
    return torch.from_numpy(_heat_map(*centres, height=height))


def test_rendering_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    (images, centres), (again, same), (others, _) = (test_images(3, seed) for seed in (5, 5, 6))
    assert torch.equal(images, again)
    assert torch.equal(centres, same)
    assert not torch.equal(images, others)


def test_images_are_pictures_with_a_ball_at_the_centre_that_is_said() -> None:
    images, centres = test_images(16, 0)
    assert (images.shape, centres.shape) == ((16, 3, HEIGHT, WIDTH), (16, 2))
    assert images.min() >= 0
    assert images.max() <= 1
    room = torch.tensor([WIDTH - 1.0, HEIGHT - 1.0])
    assert (centres >= RADII[0]).all()
    assert (centres <= room - RADII[0]).all()


def test_a_ball_covers_its_centre_and_nothing_far_from_it() -> None:
    """Rendered over black, where only the ball (and a little noise) is bright."""
    images, centres = Renderer(torch.zeros(1, 3, 2 * HEIGHT, 2 * WIDTH))(32, Generator().manual_seed(0))
    rows, columns = torch.arange(HEIGHT)[:, None], torch.arange(WIDTH)
    away = torch.hypot(columns - centres[:, 0, None, None], rows - centres[:, 1, None, None])
    brightness = images.mean(1)
    near = torch.stack([b[a < 3].max() for b, a in zip(brightness, away, strict=True)])
    assert (near > 0.05).all()
    assert brightness[away > RADII[1] + 6].max() < 0.1


def test_training_and_testing_show_different_parts_of_the_photographs() -> None:
    train, test = Renderer.for_training().backgrounds, Renderer.for_testing().backgrounds
    assert train.shape[-1] + test.shape[-1] == 640
    assert not torch.equal(train[..., : test.shape[-1]], test)


@given(st.floats(8, WIDTH - 9), st.floats(8, HEIGHT - 9))
def test_a_peak_is_found_between_cells(x: float, y: float) -> None:
    positions, probabilities = peaks(_heat_map((x, y)))
    assert positions[0] == pytest.approx((x, y), abs=1e-3)
    assert 0.7 < probabilities[0] <= 0.9


def test_a_peak_in_the_corner_is_its_cells_middle() -> None:
    logits = np.full((1, 1, HEIGHT // CELL, WIDTH // CELL), -9.0)
    logits[0, 0, 0, -1] = 2.0
    assert peaks(logits)[0][0] == pytest.approx((WIDTH - CELL + 1.5, 1.5))


def test_rounding_between_two_equal_cells_does_not_move_the_peak() -> None:
    even = _heat_map((CELL * 9.5 + 1.5, 30.0))
    left, right = even.copy(), even.copy()
    left[..., 9] += 1e-6
    right[..., 10] += 1e-6
    assert left.argmax() != right.argmax()
    assert distances(left, right)[0] < 1e-3


def test_the_distance_is_the_farthest_peaks_in_pixels() -> None:
    reference = _tensor((40.0, 30.0), (20.0, 20.0))
    assert peak_distance(reference.clone(), reference) == 0
    assert peak_distance(_tensor((43.0, 34.0), (20.0, 21.0)), reference) == pytest.approx(5.0, abs=1e-3)


def test_a_ball_lost_or_invented_or_not_a_number_is_infinitely_far() -> None:
    ball, faint = _tensor((40.0, 30.0)), _tensor((40.0, 30.0), height=0.1)
    assert peak_distance(faint, ball) == math.inf
    assert peak_distance(ball, faint) == math.inf
    assert peak_distance(torch.full_like(ball, math.nan), ball) == math.inf


def test_where_no_ball_is_the_peaks_place_does_not_matter() -> None:
    assert peak_distance(_tensor((60.0, 30.0), height=0.1), _tensor((20.0, 30.0), height=0.1)) == 0


def test_the_target_is_the_best_that_a_heat_map_can_be() -> None:
    centres = torch.tensor([[40.0, 30.0], [20.5, 21.0]])
    best = torch.logit(target(centres).clamp(1e-6, 1 - 1e-6))
    worse = [best + 0.1, best - 0.1, best.roll(1, -1)]
    assert all(loss(best, centres) < loss(other, centres) for other in worse)


def test_accuracy_counts_what_is_found_and_how_near() -> None:
    centres = torch.tensor([[40.0, 30.0], [40.0, 30.0], [40.0, 30.0]])
    heat_maps = torch.cat(
        (_tensor((40.0, 31.0)), _tensor((45.0, 30.0)), _tensor((40.0, 30.0), height=0.3))
    ).float()
    result = accuracy(lambda images: heat_maps, torch.zeros(3, 3, HEIGHT, WIDTH), centres)
    assert result.median == pytest.approx(1.0, abs=1e-3)
    assert result.within_3_px == pytest.approx(1 / 3)
    assert result.found == pytest.approx(2 / 3)


def test_a_few_steps_reduce_the_loss() -> None:
    losses: list[float] = []
    model = train_detector(12, progress=lambda _, value: losses.append(value))
    assert len(losses) == 12
    assert not model.training
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_training_is_the_same_for_the_same_seed_and_leaves_torchs_generator_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    first, again, other = (train_detector(2, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_a_saved_detector_comes_back_the_same(tmp_path: Path) -> None:
    model, (images, _) = train_detector(1), test_images(2, 0)
    save_detector(model, tmp_path / "detector.safetensors")
    assert torch.equal(load_detector(tmp_path / "detector.safetensors")(images), model(images))


def test_a_comparison_counts_balls_that_stayed_moved_are_lost_and_are_invented() -> None:
    here, faint = (40.0, 30.0), 0.1
    reference = np.concatenate([_heat_map(here, here, here), _heat_map(here, here, height=faint)])
    found = np.concatenate(
        [
            _heat_map(here, (40.0, 32.0)),
            _heat_map(here, height=faint),
            _heat_map(here),
            _heat_map((20.0, 20.0), height=faint),
        ]
    )
    row = compare("planted", found, reference, None)
    assert (row.images, row.found, row.lost, row.invented) == (5, 3, 1, 1)
    assert row.near == pytest.approx(1 / 4)  # the faint peak of the last image is no ball
    assert row.farthest == math.inf
    assert not row.passed
    assert compare("same", reference, reference, None).passed


def test_a_comparison_without_a_ball_or_with_nan_proves_nothing() -> None:
    ball, faint = _heat_map((40.0, 30.0)), _heat_map((40.0, 30.0), height=0.1)
    assert not compare("no ball", faint, faint, None).passed
    assert compare("not a number", np.full_like(ball, np.nan), ball, None).lost == 1


def test_a_table_has_a_line_for_each_comparison() -> None:
    ball = _heat_map((40.0, 30.0))
    heading, first, second = table(
        [compare("one", ball, ball, 1.234), compare("other", ball, ball, None)]
    ).split("\n")
    assert heading.split()[0] == "found"
    assert first.split() == ["one", "1", "of", "1", "100.0%", "0.00", "px", "0", "0", "1.23"]
    assert second.split()[-1] == "–"


def _python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python on one thread: beside other tests, two threads of a small network wait for each other."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command, environment = [sys.executable, *map(str, arguments)], {**os.environ, **one}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def test_the_robots_process_refuses_torch() -> None:
    with pytest.raises(RuntimeError, match="torch was imported already"):
        refuse_torch()
    after = _python("-c", f"from {ROBOT} import refuse_torch; refuse_torch(); import torch.nn")
    assert "there is no torch on this robot" in after.stderr


def test_a_bundle_that_is_none_is_refused(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "frames.npz",
        images=np.zeros((1, 3, HEIGHT, WIDTH), np.float32),
        heat_maps=_heat_map((9, 9)),
    )
    (tmp_path / "robot.ampopt").write_bytes(b"nonsense")
    done = _python("-m", ROBOT, tmp_path / "frames.npz", tmp_path / "robot.ampopt")
    assert done.returncode == 2
    assert "refused: " in done.stderr


@pytest.mark.slow
def test_from_training_to_a_robot_without_torch(tmp_path: Path) -> None:
    """So little training leaves peaks that FP16 may move; that they are judged rightly is tested."""
    done = _python("-m", "examples.ball_detector", "--quick", "--output", tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert ("PASSED" in done.stdout) == (done.returncode == 0), done.stdout
    rows = tmp_path / "robot.json"
    assert rows.exists(), done.stderr
    full, half = json.loads(rows.read_text())
    assert (full["name"][:4], half["name"][:4]) == ("FP32", "FP16")
    assert full["images"] == half["images"] == 40
    assert full["found"] > 20
    assert full["near"] == 1
    assert half["near"] > 0.9
    assert "FP16 as a GPU rounds it" in done.stdout

    bundle, frames = tmp_path / "ball_fp32.ampopt", tmp_path / "frames.npz"
    assert _python("-m", ROBOT, frames, bundle).returncode == 0
    with np.load(frames) as saved:
        images, heat_maps = saved["images"], saved["heat_maps"]
    np.savez(frames, images=images, heat_maps=np.roll(heat_maps, 1, axis=-1))
    moved = _python("-m", ROBOT, frames, bundle)
    assert moved.returncode == 1, moved.stderr
