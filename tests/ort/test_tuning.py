"""The sweep: what is faster and right is kept; what is slower, wrong or does not load has its reason."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from ampopt.errors import InputError
from ampopt.ort import knobs as onnx_knobs
from ampopt.ort import tuning as onnx_tuning
from ampopt.ort.knobs import knobs_for
from ampopt.ort.options import CPU, CUDA
from ampopt.ort.session import Array, SessionError, SessionOptions
from ampopt.ort.tuning import Tuning, tune
from tests.support.onnx_models import convolution, image

Seconds = Callable[[SessionOptions], float]


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is nothing to pin."""
    monkeypatch.setattr(onnx_knobs, "usable_cpus", lambda: [0])


class FakeRunners:
    """Stands in for ONNX Runtime: each run takes the time, and gives the output, that its options say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Seconds) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.loaded: list[SessionOptions] = []
        self.output: Callable[[SessionOptions], float] = lambda options: 1.0
        self.refused: Callable[[SessionOptions], bool] = lambda options: False
        monkeypatch.setattr(onnx_tuning, "OnnxRunner", self.load)
        monkeypatch.setattr("ampopt.ort.tuning.time.perf_counter", lambda: self.now)
        monkeypatch.setattr("ampopt.ort.tuning.time.sleep", self.spend)

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def load(self, model: bytes | Path, options: SessionOptions) -> Callable[..., tuple[Array, ...]]:
        self.loaded.append(options)
        if self.refused(options):
            raise SessionError("no such thing here")

        def run(*arrays: Array) -> tuple[Array, ...]:
            self.spend(self.seconds(options))
            return (np.array([self.output(options), 1.0]),)

        return run


def outcomes(tuning: Tuning) -> dict[str, str]:
    return {row.setting: row.outcome for row in tuning.rows}


def test_a_real_sweep_on_the_cpu_gives_options_that_load_and_json() -> None:
    tuning = tune(convolution(size=32), [image(32)], seconds=2.0, providers=[CPU])
    assert SessionOptions.from_dict(tuning.best.to_dict()) == tuning.best
    assert tuning.session() == {**tuning.best.to_dict(), "onnxruntime": onnxruntime.__version__}
    assert tuning.ratio >= 0.8
    told = json.loads(json.dumps(tuning.to_dict(), allow_nan=False))
    assert {row["setting"] for row in told["rows"]} >= {CPU, "threads=1", "no spinning", "parallel"}
    assert [row["verdict"] for row in told["rows"]] == [row.outcome for row in tuning.rows]
    assert "outcome" not in told["rows"][0]
    for row in tuning.rows:
        if row.outcome in ("kept", "not faster"):
            assert row.median_ms is not None
            assert row.median_ms > 0
            assert row.p99_ms is None or row.median_ms <= row.p99_ms
            assert row.error == pytest.approx(0, abs=1e-5)


def test_options_that_are_faster_are_added_one_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_knobs, "thread_counts", lambda: [1, 2, 4])
    FakeRunners(
        monkeypatch,
        lambda o: 0.01 * {None: 1.0, 1: 1.2, 2: 0.7, 4: 0.5}[o.threads] * (1.0 if o.spinning else 0.8),
    )
    tuning = tune(b"", [], seconds=1e3, providers=[CPU])
    assert tuning.best == SessionOptions(threads=4, spinning=False)
    assert tuning.ratio == pytest.approx(1 / 0.5 / 0.8)
    assert outcomes(tuning) == {
        CPU: "kept",
        "threads=1": "not faster",
        "threads=2": "not faster",
        "threads=4": "kept",
        "no spinning": "kept",
        "optimization=extended": "not faster",
        "optimization=basic": "not faster",
        "parallel": "not faster",
    }
    reasons = {row.setting: row.reason for row in tuning.rows}
    assert reasons["threads=2"] == "another setting is faster still"
    assert reasons["threads=1"] == "the gain is not outside the noise"


@pytest.mark.parametrize(
    ("close", "with_gaps", "pinned"),
    [(1.0, 1.0, True), (1.0, 0.5, False), (0.5, 1.0, True), (2.0, 0.5, True)],
    ids=["no difference", "slower with gaps", "slower back to back only", "faster back to back"],
)
def test_threads_are_pinned_unless_a_call_after_a_gap_is_faster_otherwise_and_none_is_slower(
    close: float, with_gaps: float, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` and `with_gaps`: the time without pinning, of that with it."""
    monkeypatch.setattr(onnx_knobs, "usable_cpus", lambda: [0, 1])
    monkeypatch.setattr(onnx_knobs, "thread_counts", lambda: [1, 2])
    rested = [-1.0]  # when the last pause ended

    def seconds(options: SessionOptions) -> float:
        after_gap = fake.now - rested[0] < 1e-9
        factor = with_gaps if after_gap else close
        return 0.002 * (1.0 if options.pinned else factor) * (2.0 if options.threads == 1 else 1.0)

    fake = FakeRunners(monkeypatch, seconds)

    def sleep(seconds: float) -> None:
        fake.spend(seconds)
        rested[0] = fake.now

    monkeypatch.setattr("ampopt.ort.tuning.time.sleep", sleep)
    tuning = tune(b"", [], seconds=20.0, providers=[CPU])
    assert tuning.best.pinned == pinned
    assert outcomes(tuning)["not pinned"] == ("not faster" if pinned else "kept")
    assert all(options.pinned == (options.threads != 1) for options in fake.loaded[:-1])


@pytest.mark.parametrize(("seconds", "long_s"), [(20.0, 0.05), (1.0, 0.002)], ids=["long calls", "no time"])
def test_gaps_are_not_tried_where_they_hardly_matter_or_there_is_no_time(
    seconds: float, long_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_knobs, "usable_cpus", lambda: [0, 1])
    FakeRunners(monkeypatch, lambda options: long_s)
    tuning = tune(b"", [], seconds=seconds, providers=[CPU])
    assert "not pinned" not in outcomes(tuning)
    assert tuning.best.pinned


def test_noise_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0)
    FakeRunners(monkeypatch, lambda o: 0.01 * float(noise.lognormal(0, 0.3)))
    kept = [tune(b"", [], seconds=4.0, providers=[CPU]).best != SessionOptions() for _ in range(20)]
    assert sum(kept) <= 8  # seven settings, each of them kept by chance in at most one of 40 sweeps


def test_an_option_that_breaks_outputs_is_refused_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRunners(monkeypatch, lambda o: 0.001 if o.parallel else 0.01)
    fake.output = lambda o: 1.1 if o.parallel else 1.0
    tuning = tune(b"", [], seconds=100.0, providers=[CPU], tolerance=1e-2)
    assert tuning.best == SessionOptions()
    (row,) = (row for row in tuning.rows if row.setting == "parallel")
    assert row.outcome == "wrong"
    assert row.error == pytest.approx(0.1 / 2**0.5)
    assert tune(b"", [], seconds=100.0, providers=[CPU], tolerance=0.2).best.parallel
    fake.output = lambda o: np.nan if o.parallel else 1.0
    tuning = tune(b"", [], seconds=100.0, providers=[CPU], tolerance=0.2)
    assert outcomes(tuning)["parallel"] == "wrong"
    json.dumps(tuning.to_dict(), allow_nan=False)


def test_an_option_that_does_not_load_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRunners(monkeypatch, lambda o: 0.01)
    fake.refused = lambda o: not o.spinning
    (row,) = (r for r in tune(b"", [], seconds=9.0, providers=[CPU]).rows if r.setting == "no spinning")
    assert (row.outcome, row.reason, row.median_ms) == ("failed", "no such thing here", None)


def test_on_cuda_graphs_are_tried_with_fixed_buffers_on_top_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factors = {"prefer_nhwc": 0.5, "enable_cuda_graph": 0.5, "cudnn_conv_use_max_workspace": 2.0}

    def seconds(options: SessionOptions) -> float:
        changed_from = {"use_tf32": "0"}
        turned = [n for n, v in options.provider_options.items() if changed_from.get(n) != v]
        return 0.001 * float(np.prod([factors.get(name, 1.0) for name in turned]))

    fake = FakeRunners(monkeypatch, seconds)
    tuning = tune(b"", [], seconds=100.0, providers=[CUDA])
    native = {"use_tf32": "0", "prefer_nhwc": "1", "enable_cuda_graph": "1"}
    assert tuning.best == SessionOptions(CUDA, native, io_binding=True)
    graphs = [o for o in fake.loaded if o.provider_options.get("enable_cuda_graph") == "1"]
    assert graphs
    assert all(o.io_binding for o in graphs)
    assert all(o.provider_options["use_tf32"] == "0" for o in fake.loaded)


@pytest.mark.parametrize(("tf32", "options"), [(False, {"use_tf32": "0"}), (True, {})])
def test_tf32_is_off_unless_it_is_asked_for(
    tf32: bool, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRunners(monkeypatch, lambda o: 0.001)
    assert tune(b"", [], seconds=9.0, providers=[CUDA], tf32=tf32).best == SessionOptions(CUDA, options)
    assert {o.provider_options.get("use_tf32") for o in fake.loaded} == {options.get("use_tf32")}


@pytest.mark.parametrize(("cpu", "expected"), [(0.001, CPU), (0.1, CUDA)])
def test_the_fastest_provider_is_swept(monkeypatch: pytest.MonkeyPatch, cpu: float, expected: str) -> None:
    FakeRunners(monkeypatch, lambda o: cpu if o.provider == CPU else 0.01)
    tuning = tune(b"", [], seconds=9.0, providers=[CUDA, CPU])
    assert tuning.best.provider == expected
    assert ("threads=1" in outcomes(tuning)) == (expected == CPU)


def test_a_provider_that_does_not_load_leaves_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRunners(monkeypatch, lambda o: 0.01)
    fake.refused = lambda o: o.provider == CUDA
    tuning = tune(b"", [], seconds=9.0, providers=[CUDA, CPU])
    assert tuning.best.provider == CPU
    assert outcomes(tuning)[CUDA] == "failed"
    fake.refused = lambda o: True
    with pytest.raises(SessionError, match=f"{CUDA}: no such thing here; {CPU}: no such"):
        tune(b"", [], seconds=9.0, providers=[CUDA, CPU])


def test_what_is_slower_in_the_end_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRunners(monkeypatch, lambda o: 0.01)
    late = SessionOptions(spinning=False, parallel=True)
    fake.seconds = lambda o: 0.01 if o.spinning else 0.02 if late in fake.loaded else 0.005
    tuning = tune(b"", [], seconds=200.0, providers=[CPU])
    assert outcomes(tuning)["no spinning"] == "kept"
    assert tuning.best == SessionOptions()
    assert tuning.ratio == 1.0


def test_settings_without_time_are_not_tried_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRunners(monkeypatch, lambda o: 1.0)
    tuning = tune(b"", [], seconds=1.0, providers=[CPU])
    assert len(fake.loaded) == 1
    assert {row.reason for row in tuning.rows if row.outcome == "not tried"} == {"out of time"}
    assert len(tuning.rows) == 1 + sum(map(len, knobs_for(SessionOptions())))


def test_a_sweep_keeps_to_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRunners(monkeypatch, lambda o: 0.01)
    tune(b"", [], seconds=20.0, providers=[CPU])
    assert 15 < fake.now < 22


def test_inputs_that_do_not_fit_are_the_callers_mistake() -> None:
    with pytest.raises(InputError, match="takes shape"):
        tune(convolution(), [image(9)], seconds=1.0, providers=[CPU])


@pytest.mark.gpu
@pytest.mark.skipif(
    CUDA not in onnxruntime.get_available_providers(), reason="this onnxruntime has no CUDAExecutionProvider"
)
def test_a_real_sweep_on_cuda_tries_graphs() -> None:
    start = time.perf_counter()
    tuning = tune(convolution(16, 64), [image(64)], seconds=20.0, providers=[CUDA])
    assert time.perf_counter() - start < 60
    assert outcomes(tuning)["enable_cuda_graph=1"] in ("kept", "not faster")
    assert tuning.best.provider == CUDA
