"""Models in OpenVINO: NumPy in and out, results that are the caller's, and errors that say what to do."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from ampopt.errors import InputError
from ampopt.ort import openvino_session
from ampopt.ort.openvino_options import OpenVinoOptions
from ampopt.ort.openvino_session import OpenVinoRunner, openvino_version, why_not_precision
from ampopt.ort.options import SessionError
from tests.support.onnx_models import convolution, expected, image, model, sum_and_product

pytest.importorskip("openvino")


@pytest.fixture(scope="module")
def runner() -> OpenVinoRunner:
    return OpenVinoRunner(convolution(), OpenVinoOptions())


def test_it_gives_the_models_outputs_in_order(runner: OpenVinoRunner) -> None:
    np.testing.assert_allclose(runner(image())[0], expected(image()), rtol=1e-5, atol=1e-6)
    two = OpenVinoRunner(sum_and_product(), OpenVinoOptions(threads=1))
    a, b = np.full((2, 3), 2, np.float32), np.full((2, 3), 5, np.float32)
    assert [info.name for info in two.outputs] == ["sum", "product"]
    assert [each.tolist() for each in two(a, b)] == [(a + b).tolist(), (a * b).tolist()]


def test_a_model_with_weights_beside_it_is_read_by_path(tmp_path: Path) -> None:
    made = onnx.load_from_string(convolution())
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    found = OpenVinoRunner(tmp_path / "m.onnx", OpenVinoOptions())(image())[0]
    np.testing.assert_allclose(found, expected(image()), rtol=1e-5, atol=1e-6)


def test_results_are_the_callers_own(runner: OpenVinoRunner) -> None:
    (first,) = runner(image(seed=1))
    kept = first.copy()
    (second,) = runner(image(seed=2))
    second[:] = 0
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(runner(image(seed=1))[0], kept)


def test_inputs_are_only_read_wherever_they_are(runner: OpenVinoRunner) -> None:
    frozen = image()
    frozen.flags.writeable = False
    wide = np.concatenate([image(), image()], 3)[..., :8]
    for x in (frozen, wide, np.asfortranarray(image())):
        np.testing.assert_allclose(runner(x)[0], expected(image()), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(x, image())


def test_threads_do_not_disturb_each_other(runner: OpenVinoRunner) -> None:
    images = [image(seed=seed) for seed in range(100)]
    wanted = [runner(x)[0] for x in images]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(runner, images))
    for (mine,), other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert len(runner._idle) <= 4


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ((), "takes 1 inputs"),
        ((image().astype(np.float64),), "takes float32"),
        ((image(size=9),), "takes shape"),
        (([1.0],), "takes a NumPy array"),
    ],
)
def test_what_does_not_fit_is_refused(runner: OpenVinoRunner, arrays: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        runner(*arrays)


def test_a_model_that_does_not_load_says_so() -> None:
    with pytest.raises(SessionError, match="OpenVINO does not load the model with"):
        OpenVinoRunner(b"rubbish", OpenVinoOptions())
    top = [helper.make_node("TopK", ["x", "k"], ["y", "i"], name="top", axis=1)]
    losing = model(top, {"x": [2, 3]}, {"y": [2, 1]}, {"k": np.array([1], np.int64)})
    with pytest.raises(SessionError, match="TopK loses NaN"):
        OpenVinoRunner(losing, OpenVinoOptions())
    with pytest.raises(SessionError, match="fixed sizes"):
        OpenVinoRunner(convolution(batch="n"), OpenVinoOptions())


def test_another_precision_than_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenVinoOptions, "native", lambda self: {"INFERENCE_PRECISION_HINT": "f32"})
    monkeypatch.setattr(openvino_session, "why_not_precision", lambda precision: None)
    with pytest.raises(SessionError, match="would compute in f32, not bf16"):
        OpenVinoRunner(convolution(), OpenVinoOptions(precision="bf16"))


def test_a_processor_without_a_precision_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def get_property(self, *_: str) -> list[str]:
            return ["FP32", "INT8"]

    monkeypatch.setattr(openvino_session, "_core", Old)
    assert why_not_precision("f32") is None
    assert why_not_precision("bf16") == "the processor does not compute in bf16 by itself"
    with pytest.raises(SessionError, match="bf16"):
        OpenVinoRunner(convolution(), OpenVinoOptions(precision="bf16"))


def test_where_it_is_not_installed_the_advice_is_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(openvino_version()).startswith("20")
    monkeypatch.setitem(sys.modules, "openvino", None)
    openvino_session._core.cache_clear()
    with pytest.raises(SessionError, match="pip install openvino"):
        OpenVinoRunner(convolution(), OpenVinoOptions())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert openvino_version() is None
