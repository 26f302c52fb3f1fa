"""ONNX Runtime's optimized graph of a model, and the time of each node."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ampopt.ort.options import SessionOptions
from ampopt.ort.session import Array, native_options, open_session

MOST_RUNS, LEAST_RUNS, PROFILING_S = 10, 2, 1.0
"""Limits of the number of profiled runs, and their time in seconds."""

_TIMED = "_kernel_time"


def optimized(model: bytes, options: SessionOptions, library: Path | None = None) -> bytes:
    """The model as ONNX Runtime optimizes it for this machine. Raises the SessionError of a session.

    `library`: of the custom operators in it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, native = Path(folder) / "optimized.onnx", native_options(options, library)
        native.optimized_model_filepath = str(path)
        open_session(model, native, options)
        return path.read_bytes()


def named(model: bytes) -> bytes:
    """The model with every node named after its first result."""
    from onnx import load_from_string

    found = load_from_string(model)
    for node in found.graph.node:
        node.name = node.output[0]
    data: bytes = found.SerializeToString()
    return data


def node_seconds(
    model: bytes, options: SessionOptions, arrays: Sequence[Array], *, library: Path | None = None
) -> dict[str, float]:
    """The time of each node in seconds, by name: the shortest of several runs in ONNX Runtime's profile.

    Raises the SessionError of a session.
    """
    with tempfile.TemporaryDirectory() as folder:
        native = native_options(options, library)
        native.enable_profiling, native.profile_file_prefix = True, str(Path(folder) / "profile")
        session = open_session(model, native, options)
        feeds = {each.name: array for each, array in zip(session.get_inputs(), arrays, strict=True)}
        end = time.perf_counter() + PROFILING_S
        for run in range(MOST_RUNS):
            if run < LEAST_RUNS or time.perf_counter() < end:
                session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    least: dict[str, float] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(_TIMED):
            name = event["name"].removesuffix(_TIMED)
            least[name] = min(least.get(name, math.inf), event["dur"] / 1e6)
    return least
