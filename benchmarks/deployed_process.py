"""One way to run a saved network, in a process of its own, see `benchmarks.deployed`.

    python -m benchmarks.deployed_process WAY FOLDER THREADS

With WAY "save" it makes the network's bundle instead, by the default call.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import time
from pathlib import Path

from benchmarks.deployed_ways import BUNDLE, WAYS
from benchmarks.engine_process import Loaded
from benchmarks.race_protocol import Facts, memory_bytes, resident_bytes, serve_pipe

SAVE = "save"


class Deployed(Loaded):
    """A way that has loaded its network."""

    def make(self) -> Facts:
        """Load the network and run it once; what both took, with all that had to be imported."""
        inputs, resident, start = self.inputs(), resident_bytes(), time.perf_counter()
        self.call = functools.partial(WAYS[self.name](self.folder, inputs, self.threads), *inputs)
        self.call()
        return {"first_answer_s": time.perf_counter() - start, "bare_bytes": resident}

    def choose(self) -> Facts:
        """Write the outputs for whoever knows what they should be; a bundle knows its threads itself."""
        super().choose()
        return {}

    def settle(self) -> Facts:
        """Warm up; the memory of the process then, and the most that it has had."""
        super().settle()
        return memory_bytes()


def save(folder: Path) -> Facts:
    """`ampopt.optimize(model, *inputs).save(path)`, with nothing else."""
    torch = importlib.import_module("torch")
    model = torch.load(folder / "model.pt", weights_only=False)  # of our own making
    inputs = torch.load(folder / "inputs.pt")
    start = time.perf_counter()
    fast = importlib.import_module("ampopt").optimize(model, inputs)
    prepared = time.perf_counter()
    fast.save(folder / BUNDLE)
    took = {"prepare_s": prepared - start, "save_s": time.perf_counter() - prepared}
    return {**took, "chosen": fast.report.chosen, "passes": [step.name for step in fast.program.recipe]}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("way", choices=[SAVE, *WAYS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("threads", type=int)
    options = parser.parse_args()
    if options.way == SAVE:
        (options.folder / "saved.json").write_text(json.dumps(save(options.folder)), encoding="utf-8")
    else:
        serve_pipe(lambda: Deployed(options.way, options.folder, options.threads))


if __name__ == "__main__":
    main()
