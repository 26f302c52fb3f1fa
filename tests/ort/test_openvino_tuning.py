"""The sweep of OpenVINO's options: the fastest outside the noise is kept, and what fails is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ampopt.measure.sampling import Measurement
from ampopt.ort import openvino_tuning
from ampopt.ort.openvino_options import OpenVinoOptions
from ampopt.ort.openvino_session import OpenVinoRunner
from ampopt.ort.openvino_tuning import tune_openvino
from ampopt.ort.options import SessionError
from tests.support.onnx_models import convolution, image

Seconds = Callable[[OpenVinoOptions], float]


class Planted:
    """A model that fails to load with pinned threads."""

    def __init__(self, model: bytes, options: OpenVinoOptions) -> None:
        if options.pinning:
            raise SessionError("planted")
        self.options = options


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[OpenVinoOptions, list[int]]]:
    """Tunes a model whose calls take as long as a function of its options says; no clock decides."""

    def tune(call_s: Seconds, seconds: float, precision: str) -> tuple[OpenVinoOptions, list[int]]:
        rounds: list[int] = []

        def measured(runners: Sequence[Planted], inputs: object, *, seconds: float) -> list[Measurement]:
            rounds.append(len(runners))
            return [Measurement((call_s(runner.options),) * 20) for runner in runners]

        monkeypatch.setattr(openvino_tuning, "OpenVinoRunner", Planted)
        monkeypatch.setattr(openvino_tuning, "thread_counts", lambda: [1, 2, 4])
        monkeypatch.setattr(openvino_tuning, "_measured", measured)
        found = tune_openvino(Planted(b"", OpenVinoOptions(precision)), b"", [], seconds=seconds)  # type: ignore[arg-type]
        assert found.timed.median == call_s(found.options)
        return found.options, rounds

    return tune


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_the_fastest_setting_is_found(
    tuned: Callable[..., tuple[OpenVinoOptions, list[int]]], precision: str
) -> None:
    def seconds(options: OpenVinoOptions) -> float:
        return (1.0 if options.threads == 2 else 5.0) / (1 if options.latency else 4)

    options, rounds = tuned(seconds, 60.0, precision)
    assert options == OpenVinoOptions(precision, threads=2, latency=False)
    assert rounds == [1, 4, 2]


def test_equal_settings_change_nothing(tuned: Callable[..., tuple[OpenVinoOptions, list[int]]]) -> None:
    assert tuned(lambda _: 1.0, 60.0, "f32")[0] == OpenVinoOptions()


def test_without_time_the_defaults_are_measured_alone(
    tuned: Callable[..., tuple[OpenVinoOptions, list[int]]],
) -> None:
    assert tuned(lambda options: options.threads or 9.0, 0.0, "f32") == (OpenVinoOptions(), [1])


def test_a_real_model_is_tuned() -> None:
    pytest.importorskip("openvino")
    start = OpenVinoRunner(convolution(), OpenVinoOptions())
    found = tune_openvino(start, convolution(), [image()], seconds=0.1)
    assert found.options.precision == "f32"
    assert found.runner(image())[0].shape == (1, 4, 8, 8)
