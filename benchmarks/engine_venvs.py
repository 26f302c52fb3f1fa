"""Environments of their own for CPU engines whose packages do not live with ampopt's.

    python -m benchmarks.engine_venvs [ENGINE ...]

Makes .venv-peers/<engine> with what the engine and its converter need. `mnnconvert` installs packages by
itself that break `onnx`; LiteRT's converter brings JAX and sees the PyTorch of this environment.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent / ".venv-peers"

ENGINES: dict[str, tuple[str, ...]] = {
    "ncnn": ("--no-deps", "numpy", "ncnn", "pnnx"),  # pnnx asks for PyTorch, which its converter has built in
    "mnn": ("numpy", "MNN"),
    "litert": ("numpy", "ai-edge-litert", "litert-torch"),
}
"""What pip installs for each."""

SEES_TORCH = ("litert",)


def python_of(engine: str) -> Path:
    """The interpreter of an engine's environment. Raises RuntimeError where it was not made."""
    found = ROOT / engine / "bin" / "python"
    if not (ROOT / engine / "made").exists():
        raise RuntimeError(f"no environment of {engine}: make peers-cpu")
    return found


def make(engine: str) -> None:
    """Make an engine's environment; one that is there is completed."""
    folder = ROOT / engine
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    if engine in SEES_TORCH:
        command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        own = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        (Path(own) / "main.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    subprocess.run([*pip, *ENGINES[engine]], check=True)
    (folder / "made").touch()


def main() -> None:
    """Make every environment asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"by default {', '.join(ENGINES)}")
    asked = parser.parse_args().engines or list(ENGINES)
    if unknown := set(asked) - set(ENGINES):
        parser.error(f"no engine {', '.join(sorted(unknown))}: {', '.join(ENGINES)}")
    for engine in asked:
        make(engine)
        print(f"{ROOT / engine} is made", flush=True)


if __name__ == "__main__":
    main()
