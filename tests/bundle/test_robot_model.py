"""A bundle's model without PyTorch: calls as the manifest says, and a self-test before the first of them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ampopt.bundle.files import open_bundle
from ampopt.bundle.robot_model import SELF_TEST, RobotModel, self_test_tensors
from ampopt.errors import BundleError, InputError
from ampopt.ort.options import SessionOptions
from ampopt.ort.session import Array, OnnxRunner, SessionError, TensorInfo
from tests.support.onnx_models import convolution, expected, image, one_output, save_bundle, sum_and_product


def load(path: Path, **manifest: Any) -> RobotModel:
    """The model of a bundle in a session with the default options, with changes to the manifest."""
    files = open_bundle(path)
    files = dataclasses.replace(files, manifest=files.manifest | manifest)
    return RobotModel(files, OnnxRunner(files.read("model.onnx"), SessionOptions()), ("a note",))


def pair(path: Path, dtype: str = "float32", **fields: Any) -> Path:
    a, b = np.arange(6, dtype=dtype).reshape(2, 3), np.full((2, 3), 2, dtype)
    # The manifest's order of names is not the model's.
    return save_bundle(
        path, sum_and_product(dtype), {"b": b, "a": a}, {"product": a * b, "sum": a + b}, **fields
    )


def test_several_outputs_are_a_dict_in_the_manifests_order(tmp_path: Path) -> None:
    model = load(pair(tmp_path / "b"))
    a, b = np.full((2, 3), 3, np.float32), np.full((2, 3), 5, np.float32)
    for found in (model(b, a), model(a=a, b=b), model(b, a=a)):
        assert isinstance(found, dict)
        assert list(found) == ["product", "sum"]
        assert np.all(found["product"] == 15)
        assert np.all(found["sum"] == 8)
    assert [info.name for info in model.inputs] == ["b", "a"]


FLAT = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("arrays", "named", "reason"),
    [
        ((), {}, "'b' is missing"),
        ((FLAT,), {}, "'a' is missing"),
        ((FLAT, FLAT, FLAT), {}, "takes 2 inputs"),
        ((FLAT,), {"b": FLAT}, "'b' is given twice"),
        ((), {"a": FLAT, "c": FLAT}, "'c' is none of b, a"),
        ((FLAT, FLAT[0]), {}, r"'a' takes shape \(2, 3\), not \(3,\)"),
        ((FLAT, FLAT.astype(np.float64)), {}, "'a' takes float32, not float64"),
        (([[1.0]], FLAT), {}, "'b' takes a NumPy array, not list"),
        ((np.ma.masked_greater(FLAT, 0), FLAT), {}, r"'b' takes no mask, .* give \.filled\(number\)"),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    tmp_path: Path, arrays: tuple[Any, ...], named: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        load(pair(tmp_path / "b"))(*arrays, **named)


def test_the_models_precision_is_converted_at_the_manifests_border(tmp_path: Path) -> None:
    a, b = np.full((2, 3), 1.5, np.float32), np.full((2, 3), 2, np.float32)
    outputs = {"sum": a + b, "product": a * b}
    model = load(save_bundle(tmp_path / "b", sum_and_product("float16"), {"a": a, "b": b}, outputs))
    found = model(a, b)
    assert isinstance(found, dict)
    assert found["sum"].dtype == np.float32
    assert np.all(found["sum"] == 3.5)
    with pytest.raises(InputError, match="takes float32, not float16"):
        model(a.astype(np.float16), b)


def test_another_batch_size_runs_where_the_model_takes_any(tmp_path: Path) -> None:
    path = save_bundle(tmp_path / "b", convolution(batch="n"), {"x": image()}, {"y": expected(image())})
    found = load(path)(np.concatenate([image(seed=1), image(seed=2)]))
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found[1:], expected(image(seed=2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ({"y": expected(image()) * 1.01}, "relative error of 0.0099, and the manifest allows 0.001"),
        ({"y": np.full((1, 4, 8, 8), np.nan, np.float32)}, "relative error of inf"),
        ({"y": expected(image())[:, :2]}, r"shape \(1, 4, 8, 8\) in the ONNX model.*\(1, 2, 8, 8\)"),
        ({"y": expected(image()).astype(np.int64)}, "the manifest says int64"),
        ({"z": expected(image())}, "has outputs y, and the manifest says z"),
    ],
)
def test_other_outputs_than_promised_are_refused(
    tmp_path: Path, outputs: Mapping[str, Array], reason: str
) -> None:
    with pytest.raises(BundleError, match=reason):
        load(save_bundle(tmp_path / "b", convolution(), {"x": image()}, outputs))


def test_an_error_within_the_tolerance_passes_and_is_told(tmp_path: Path) -> None:
    outputs = {"y": expected(image()) * np.float32(1.01)}
    model = load(save_bundle(tmp_path / "b", convolution(), {"x": image()}, outputs, tolerance=0.02))
    assert model.error == pytest.approx(0.01 / 1.01, rel=1e-3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"no tensors", "cannot be read"), (b"\x02\0\0\0\0\0\0\0{}", "no input.x")],
)
def test_a_self_test_without_its_tensors_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(BundleError, match=reason):
        load(one_output(tmp_path / "b", files={"self_test.safetensors": content}))


def test_what_a_model_was_made_of_is_told(tmp_path: Path) -> None:
    model = load(one_output(tmp_path / "b"))
    assert model.options == SessionOptions()
    assert model.notes == ("a note",)
    assert model.manifest["model"]["name"] == "Small"
    assert model.error < 1e-6
    assert model.inputs == (TensorInfo("x", (1, 3, 8, 8), np.dtype("float32")),)
    np.testing.assert_array_equal(model.example["x"], image())


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_stays_in_its_process(tmp_path: Path, take: Callable[[object], object]) -> None:
    with pytest.raises(InputError, match="load the bundle again, in each process that runs it"):
        take(load(one_output(tmp_path / "b")))


def test_one_output_is_an_array(tmp_path: Path) -> None:
    model, x = load(one_output(tmp_path / "b")), image(seed=5)
    np.testing.assert_allclose(np.asarray(model(x)), expected(x), rtol=1e-5, atol=1e-6)


def _entry(name: str, shape: list[int], dtype: str = "float32") -> dict[str, Any]:
    return {"name": name, "shape": shape, "dtype": dtype, "layout": "contiguous"}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([_entry("z", [1, 3, 8, 8])], "the ONNX model has inputs x, and the manifest says z"),
        (
            [_entry("x", [1, 3, 8, 8]), _entry("more", [1])],
            "the ONNX model has inputs x, and the manifest says x, more",
        ),
        (
            [_entry("x", [1, 3, 8])],
            r"'x' has float32 and shape \(1, 3, 8, 8\) in the ONNX model, and",
        ),
        ([_entry("x", [2, 3, 8, 8])], r"the manifest says float32 and \(2, 3, 8, 8\)"),
        ([_entry("x", [1, 3, 8, 8], "int64")], "the manifest says int64"),
    ],
)
def test_other_inputs_than_the_models_are_refused(
    tmp_path: Path, inputs: list[dict[str, Any]], message: str
) -> None:
    path = one_output(tmp_path / "b")
    with pytest.raises(BundleError, match=message):
        load(path, inputs=inputs)


def test_a_dtype_that_numpy_has_not_is_the_onnx_models(tmp_path: Path) -> None:
    model = load(one_output(tmp_path / "b"), inputs=[_entry("x", [1, 3, 8, 8], "bfloat16")])
    assert model.inputs[0].dtype == np.dtype("float32")


class _Runner:
    """A session that gives the right output a few times and then does something else."""

    def __init__(self, right: int, then: Exception | float) -> None:
        self.options, self.right, self.then = SessionOptions(), right, then
        self.inputs = (TensorInfo("x", (1, 3, 8, 8), np.dtype("float32")),)
        self.outputs = (TensorInfo("y", (1, 4, 8, 8), np.dtype("float32")),)

    def __call__(self, x: Array) -> tuple[Array, ...]:
        self.right -= 1
        if self.right >= 0:
            return (expected(x),)
        if isinstance(self.then, Exception):
            raise self.then
        return (expected(x) * np.float32(self.then),)


def test_the_second_run_is_tested_too_because_it_may_replay_what_the_first_captured(tmp_path: Path) -> None:
    files = open_bundle(one_output(tmp_path / "b"))
    RobotModel(files, _Runner(2, 9.0), ())  # type: ignore[arg-type]
    with pytest.raises(BundleError, match=r"self-test fails with .*output 'y' has a relative error of 8"):
        RobotModel(files, _Runner(1, 9.0), ())  # type: ignore[arg-type]


def test_a_self_test_that_cannot_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    files = open_bundle(one_output(tmp_path / "b"))
    with pytest.raises(BundleError, match="the bundle's self-test does not run: no memory") as caught:
        RobotModel(files, _Runner(0, SessionError("no memory")), ())  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, SessionError)
    tensors = {"input.x": image(9), "output.y": expected(image())}
    path = one_output(tmp_path / "c", files={SELF_TEST: safetensors.numpy.save(tensors)})
    with pytest.raises(BundleError, match=r"the bundle's self-test does not run: .*takes shape"):
        load(path)


def test_the_tensors_of_the_self_test_are_copies_by_name(tmp_path: Path) -> None:
    files = open_bundle(one_output(tmp_path / "b"))
    border = [TensorInfo("y", (1, 4, 8, 8), np.dtype("float32"))]
    found = self_test_tensors(files, "output", border)
    assert list(found) == ["y"]
    found["y"][:] = 0
    np.testing.assert_allclose(self_test_tensors(files, "output", border)["y"], expected(image()))
    with pytest.raises(BundleError, match=r"^self_test\.safetensors of the bundle has no input\.y$"):
        self_test_tensors(files, "input", border)
