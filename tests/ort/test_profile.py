"""What ONNX Runtime makes of a model, and the seconds of each of its nodes, by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from ampopt.ort import profile
from ampopt.ort.options import SessionError, SessionOptions
from ampopt.ort.profile import LEAST_RUNS, MOST_RUNS, named, node_seconds, optimized
from ampopt.ort.session import OnnxRunner
from tests.support.image_graphs import operators
from tests.support.onnx_models import convolution, image, model

OPTIONS = SessionOptions(threads=1)


def test_an_optimized_graph_has_its_operators_fused_and_gives_the_same() -> None:
    before = convolution()
    after = optimized(before, OPTIONS)
    assert operators(before) == {"Conv": 1, "Relu": 1}
    assert "Relu" not in operators(after)  # it is in the convolution
    (expected,), (found,) = (
        OnnxRunner(before, OPTIONS)(image()),
        OnnxRunner(after, OPTIONS.unoptimized())(image()),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_lower_level_is_asked_for_by_the_options() -> None:
    assert operators(optimized(convolution(), SessionOptions(optimization="none"))) == {"Conv": 1, "Relu": 1}


@pytest.mark.parametrize("ask", [optimized, lambda data, options: node_seconds(data, options, [image()])])
def test_a_model_that_is_none_is_refused_as_by_a_session(ask: Any) -> None:
    with pytest.raises(SessionError, match="does not load the model"):
        ask(b"no model", OPTIONS)


def test_nodes_are_named_by_their_first_result() -> None:
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b"], axis=0, num_outputs=2),
        helper.make_node("Add", ["a", "b"], ["y"], name="what an exporter called it"),
    ]
    given = model(nodes, {"x": [2, 3]}, {"y": [1, 3]})
    found = onnx.load_from_string(named(given)).graph.node
    assert [node.name for node in found] == ["a", "y"]
    (y,) = OnnxRunner(named(given), OPTIONS)(np.ones((2, 3), np.float32))
    assert y.tolist() == [[2, 2, 2]]


def test_every_node_has_its_seconds() -> None:
    seconds = node_seconds(named(convolution()), SessionOptions(threads=1, optimization="none"), [image()])
    assert seconds.keys() == {"c", "y"}
    assert min(seconds.values()) >= 0


class _Session:
    """A session whose profile says how long the nodes of each run took, in microseconds."""

    def __init__(self, prefix: str, durations: list[dict[str, int]]) -> None:
        self.prefix, self.durations, self.runs = prefix, durations, 0

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="x")]

    def run(self, outputs: None, feeds: dict[str, Any]) -> None:
        assert list(feeds) == ["x"]
        self.runs += 1

    def end_profiling(self) -> str:
        events: list[dict[str, Any]] = [{"cat": "Session", "name": "model_run", "dur": 1}]
        for run in self.durations[: self.runs]:
            for name, duration in run.items():
                events.append({"cat": "Node", "name": f"{name}_kernel_time", "dur": duration})
                events.append({"cat": "Node", "name": f"{name}_fence_before", "dur": 0})
        path = Path(f"{self.prefix}.json")
        path.write_text(json.dumps(events))
        return str(path)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[_Session]:
    """The sessions that are opened; the second run is the shortest."""
    found: list[_Session] = []

    def open_session(model: bytes, native: Any, options: SessionOptions) -> _Session:
        assert native.enable_profiling
        runs = [{"conv": 500, "add": 30}, {"conv": 100, "add": 20}] + [{"conv": 300, "add": 10}] * MOST_RUNS
        found.append(_Session(native.profile_file_prefix, runs))
        return found[-1]

    monkeypatch.setattr(profile, "open_session", open_session)
    return found


@pytest.mark.parametrize(("allowed", "runs", "add"), [(0.0, LEAST_RUNS, 20e-6), (1e9, MOST_RUNS, 10e-6)])
def test_the_least_of_a_few_runs_counts_and_their_time_is_limited(
    allowed: float, runs: int, add: float, sessions: list[_Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "PROFILING_S", allowed)
    assert node_seconds(b"", OPTIONS, [image()]) == pytest.approx({"conv": 100e-6, "add": add})
    assert [session.runs for session in sessions] == [runs]


@pytest.mark.usefixtures("sessions")
def test_as_many_arrays_as_inputs_are_wanted() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        node_seconds(b"", OPTIONS, [])


def test_nothing_stays_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    optimized(convolution(), OPTIONS)
    node_seconds(convolution(), OPTIONS, [image()])
    assert list(tmp_path.iterdir()) == []
