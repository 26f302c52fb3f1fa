"""Makes what goes to the robot: a trained detector, a faster one, bundles."""

from __future__ import annotations

import time
from pathlib import Path

from torch import Generator, nn

import ampopt
from examples.ball_detector.comparison import NEAR
from examples.ball_detector.rendering import Renderer
from examples.ball_detector.training import load_detector, peak_distance, save_detector, train_detector

EXAMPLE_SEED = 2


def trained(weights: Path | None, steps: int, folder: Path) -> nn.Module:
    """The detector with the weights of a file, or trained for `steps` and its weights saved in the folder."""
    if weights is not None:
        print(f"1. The detector: EncDecMil18 with the weights of {weights}")
        return load_detector(weights)
    print(f"1. Training the detector, EncDecMil18, on {steps} batches of rendered balls")
    started = time.perf_counter()

    def progress(step: int, loss: float) -> None:
        if step % 100 == 0:
            print(f"   step {step:4d}: loss {loss:.1f}", flush=True)

    model = train_detector(steps, progress=progress)
    path = folder / "detector.safetensors"
    save_detector(model, path)
    print(f"   trained in {time.perf_counter() - started:.0f} s; weights: {path}", flush=True)
    return model


def optimized(model: nn.Module, budget_s: float) -> ampopt.OptimizedModule:
    """The model made faster. A program is right if its peaks are within NEAR pixels of the original's."""
    print(
        f"2. ampopt.optimize(model, image, metric=peak_distance, tolerance={NEAR}, budget_s={budget_s:g})",
        flush=True,
    )
    image, _ = Renderer.for_training()(1, Generator().manual_seed(EXAMPLE_SEED))
    fast = ampopt.optimize(
        model, image, metric=peak_distance, tolerance=NEAR, budget_s=budget_s, progress=False
    )
    assert isinstance(fast, ampopt.OptimizedModule), "EncDecMil18 is captured as one graph"
    print(fast.report)
    return fast


def save_bundles(fast: ampopt.OptimizedModule, folder: Path, tune_s: float) -> list[Path]:
    """A bundle with an FP32 and one with an FP16 ONNX model, in the folder.

    ONNX Runtime's options are tuned for `tune_s` seconds each.
    """
    print("3. Saving bundles: exported, verified, the session's options tuned", flush=True)
    paths = []
    for precision in ("fp32", "fp16"):
        started = time.perf_counter()
        path = folder / f"ball_{precision}.ampopt"
        fast.save(path, onnx=precision, tune_s=tune_s)
        size, seconds = path.stat().st_size, time.perf_counter() - started
        print(f"   {path}: {size / 1e3:.0f} kB, in {seconds:.0f} s", flush=True)
        paths.append(path)
    return paths
