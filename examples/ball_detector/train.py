"""`python -m examples.ball_detector.train`: train the detector, test it, save its weights."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from examples.ball_detector.rendering import test_images
from examples.ball_detector.training import STEPS, accuracy, save_detector, train_detector

TEST_IMAGES, TEST_SEED = 500, 1


def main() -> None:
    """Read the command line, train, report."""
    parser = argparse.ArgumentParser(prog="python -m examples.ball_detector.train", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("ball_detector.safetensors"))
    parser.add_argument("--steps", type=int, default=STEPS, help="batches to train on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()

    def progress(step: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"step {step:4d} of {options.steps}: loss {loss:.3f}", flush=True)

    model = train_detector(options.steps, options.seed, progress=progress)
    print(f"trained in {time.perf_counter() - started:.0f} s")
    result = accuracy(model, *test_images(TEST_IMAGES, TEST_SEED))
    print(
        f"{TEST_IMAGES} test images: median distance {result.median:.2f} px, "
        f"{result.within_3_px:.1%} within 3 px, {result.found:.1%} found"
    )
    save_detector(model, options.output)
    print(f"weights: {options.output}")


if __name__ == "__main__":
    main()
