"""Sessions: options as data, arrays checked, nodes located, providers that do not load found out."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from ampopt.errors import InputError
from ampopt.ort import session
from ampopt.ort.options import CPU, CUDA, LEVELS
from ampopt.ort.session import Node, OnnxRunner, SessionError, SessionOptions, native_options, relative_error
from ampopt.system.cores import usable_cpus
from tests.support.onnx_models import convolution, image, model, sum_and_product

HAS_CUDA = CUDA in onnxruntime.get_available_providers()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="this onnxruntime has no CUDAExecutionProvider")
BOUND = SessionOptions(io_binding=True)


@pytest.mark.parametrize(
    "options",
    [
        *(SessionOptions(optimization=level) for level in LEVELS),
        SessionOptions(threads=2, spinning=False),
        SessionOptions(parallel=True),
        BOUND,
    ],
)
def test_every_option_gives_the_same_outputs(options: SessionOptions) -> None:
    (expected,) = OnnxRunner(convolution(), SessionOptions())(image())
    (found,) = OnnxRunner(convolution(), options)(image())
    assert relative_error(found, expected) < 1e-5


def test_a_session_is_set_up_as_the_options_say() -> None:
    options = SessionOptions(threads=1, spinning=False, parallel=True, optimization="basic")
    native = OnnxRunner(convolution(), options)._session.get_session_options()
    assert native.intra_op_num_threads == 1
    assert native.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert native.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert native.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC


def test_inputs_and_outputs_have_names_shapes_and_dtypes() -> None:
    runner = OnnxRunner(convolution(batch="n"), SessionOptions())
    assert runner.inputs == (("x", ("n", 3, 8, 8), np.dtype("float32")),)
    assert runner.outputs == (("y", ("n", 4, 8, 8), np.dtype("float32")),)
    assert runner(np.zeros((5, 3, 8, 8), np.float32))[0].shape == (5, 4, 8, 8)


def test_nodes_are_listed_by_the_provider_that_runs_them() -> None:
    runner = OnnxRunner(convolution(), SessionOptions())
    assert runner.nodes == {CPU: (Node("conv", "Conv"), Node("relu", "Relu"))}


@pytest.mark.parametrize("options", [SessionOptions(), BOUND])
@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ((), "takes 1 inputs"),
        ((image(), image()), "not 2"),
        ((image()[0],), r"shape \(1, 3, 8, 8\), not \(3, 8, 8\)"),
        ((image(9),), "not .1, 3, 9, 9."),
        ((image().astype(np.float64),), "takes float32, not float64"),
        ((image().astype(">f4"),), "takes float32, not >f4"),
        (([1.0],), "not list"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    options: SessionOptions, arrays: tuple[Any, ...], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        OnnxRunner(convolution(), options)(*arrays)


@pytest.mark.parametrize("options", [SessionOptions(), BOUND])
def test_arrays_with_any_strides_are_read_by_their_values(options: SessionOptions) -> None:
    runner = OnnxRunner(convolution(), options)
    strided = np.ascontiguousarray(image().transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    strided.flags.writeable = False
    assert np.array_equal(runner(strided)[0], runner(image())[0])


@pytest.mark.parametrize("options", [SessionOptions(), BOUND])
def test_outputs_are_the_callers_own(options: SessionOptions) -> None:
    runner = OnnxRunner(convolution(), options)
    (first,) = runner(image())
    kept = first.copy()
    (second,) = runner(image(seed=2))
    assert np.array_equal(first, kept)
    assert not np.array_equal(first, second)


def test_threads_that_share_fixed_buffers_get_their_own_outputs() -> None:
    runner = OnnxRunner(convolution(size=32), BOUND)
    images = [image(32, seed) for seed in range(4)]
    expected = [runner(x)[0] for x in images]
    wrong: list[int] = []

    def work(index: int) -> None:
        found = [np.array_equal(runner(images[index])[0], expected[index]) for _ in range(50)]
        wrong.extend(index for right in found if not right)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_fixed_buffers_need_fixed_shapes() -> None:
    with pytest.raises(SessionError, match="'x' has shape"):
        OnnxRunner(convolution(batch="n"), BOUND)


def test_weights_beside_the_model_are_found_by_path(tmp_path: Path) -> None:
    import onnx

    made = onnx.load_from_string(convolution())
    path = tmp_path / "model.onnx"
    onnx.save(made, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    assert (tmp_path / "model.onnx.data").stat().st_size == 4 * 3 * 3 * 3 * 4
    (found,) = OnnxRunner(path, SessionOptions())(image())
    assert np.array_equal(found, OnnxRunner(convolution(), SessionOptions())(image())[0])


def test_a_session_keeps_no_copy_of_the_model_file() -> None:
    data = bytes(bytearray(convolution()))
    before = sys.getrefcount(data)
    runner = OnnxRunner(data, SessionOptions())
    assert sys.getrefcount(data) == before
    assert runner(image())


@pytest.mark.parametrize("broken", [b"", b"no model", convolution()[:-40]])
def test_a_broken_model_does_not_load(broken: bytes) -> None:
    with pytest.raises(SessionError, match="does not load the model"):
        OnnxRunner(broken, SessionOptions())


def test_an_error_is_raised_and_not_written_too(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SessionError, match="does not load"):
        OnnxRunner(model([], {}, {}), SessionOptions())
    nodes = [helper.make_node("Gather", ["x", "place"], ["y"])]
    made = model(nodes, {"x": ["n"]}, {"y": ["m"]}, {"place": np.array([7])})
    with pytest.raises(SessionError, match="out of data bounds"):
        OnnxRunner(made, SessionOptions())(np.zeros(5, np.float32))
    assert capfd.readouterr().err == ""


def test_a_run_that_fails_says_with_which_options() -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    made = model(nodes, {"x": ["n"]}, {"y": ["a", "b"]}, {"shape": np.array([-1, 7])})
    with pytest.raises(SessionError, match=r"failed to run.*CPUExecutionProvider"):
        OnnxRunner(made, SessionOptions())(np.zeros(5, np.float32))


def test_a_dtype_without_a_numpy_type_is_said() -> None:
    import onnx

    made = onnx.load_from_string(sum_and_product())
    for value in (*made.graph.input, *made.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.STRING
    nodes = [helper.make_node("Identity", ["a"], ["sum"]), helper.make_node("Identity", ["b"], ["product"])]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    with pytest.raises(SessionError, match=r"tensor\(string\)"):
        OnnxRunner(made.SerializeToString(), SessionOptions())


def test_a_provider_that_is_not_built_in_is_an_error() -> None:
    with pytest.raises(SessionError, match=r"has no DmlExecutionProvider, only .*CPUExecutionProvider"):
        OnnxRunner(convolution(), SessionOptions("DmlExecutionProvider"))


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_without_a_driver_the_provider_is_not_asked_to_load(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would write to stderr, in red, which libraries are not there."""

    def lacks(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lacks)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    with pytest.raises(SessionError, match=r"needs an NVIDIA GPU.*libcuda\.so\.1: cannot open"):
        OnnxRunner(convolution(), SessionOptions(CUDA))
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(HAS_CUDA, reason="here the provider may load")
def test_a_session_that_fell_back_to_the_cpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(session, "_why_no_driver", lambda: None)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: print("libcublas:  not\nfound"))
    with pytest.raises(SessionError, match=r"did not load.*on CPUExecutionProvider.*libcublas: not found"):
        OnnxRunner(convolution(), SessionOptions(CUDA))


def test_without_onnxruntime_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(SessionError, match="pip install onnxruntime"):
        OnnxRunner(convolution(), SessionOptions())


@pytest.mark.parametrize(
    ("actual", "reference", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([np.nan, 4.0], [np.nan, 4.0], 0.0),
        ([np.inf, 4.0], [np.inf, 4.0], 0.0),
        ([np.nan, 4.0], [3.0, 4.0], np.inf),
        ([3.0, 4.0], [np.nan, 4.0], np.inf),
        ([-np.inf, 4.0], [np.inf, 4.0], np.inf),
        ([3.0], [3.0, 4.0], np.inf),
        ([0.0, 0.5], [0.0, 0.0], 0.5),
    ],
)
def test_the_error_is_relative_and_finds_what_is_not_finite(
    actual: list[float], reference: list[float], error: float
) -> None:
    assert relative_error(np.array(actual, np.float32), np.array(reference)) == pytest.approx(error)


def test_the_error_of_integers_is_the_share_that_differs() -> None:
    assert relative_error(np.array([1, 2, 3, 900]), np.array([1, 2, 3, 4])) == 0.25


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        SessionOptions.default(CUDA, tf32=False),
        SessionOptions(CUDA, {"use_tf32": "0"}, io_binding=True),
        SessionOptions(CUDA, {"use_tf32": "0", "enable_cuda_graph": "1"}, io_binding=True),
        SessionOptions(CUDA, {"use_tf32": "0", "prefer_nhwc": "1", "fuse_conv_bias": "1"}, io_binding=True),
        *(
            SessionOptions(CUDA, {"use_tf32": "0", "cudnn_conv_algo_search": search})
            for search in ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
        ),
    ],
)
def test_cuda_gives_the_cpus_outputs_call_after_call(options: SessionOptions) -> None:
    runner, reference = OnnxRunner(convolution(), options), OnnxRunner(convolution(), SessionOptions())
    assert runner.nodes is not None
    assert set(runner.nodes) == {CUDA}
    for seed in range(5):
        x = image(seed=seed)
        assert relative_error(runner(x)[0], reference(x)[0]) < 1e-4


@pytest.mark.parametrize(
    ("version", "after", "expected"),
    [
        ("1.25.1", False, [("session.force_spinning_stop", "1")]),
        ("1.26.0", False, [("session.intra_op.spin_duration_us", "1000")]),
        ("1.26.0", True, []),
    ],
)
def test_threads_rest_soon_after_a_run(
    version: str, after: bool, expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", version)
    native, names = native_options(SessionOptions(spin_after_run=after)), []
    for name in ("session.force_spinning_stop", "session.intra_op.spin_duration_us"):
        with contextlib.suppress(RuntimeError):  # no such entry
            names.append((name, native.get_session_config_entry(name)))
    assert names == expected


@pytest.mark.skipif(
    len(usable_cpus()) < 2 or not Path("/proc/self/task").is_dir(), reason="one core, or no Linux"
)
@pytest.mark.parametrize("pinned", [True, False])
def test_each_thread_but_the_callers_is_on_a_core_of_its_own_where_that_is_asked_for(pinned: bool) -> None:
    cpus, tasks = usable_cpus(), Path("/proc/self/task")
    before = set(os.listdir(tasks))
    runner = OnnxRunner(convolution(), SessionOptions(threads=len(cpus), pinned=pinned))
    runner(image())
    wanted, found = [0, *[int(pinned)] * (len(cpus) - 1)], list[int]()
    end = time.monotonic() + 60
    while found != wanted and time.monotonic() < end:  # each thread binds itself when it begins to run
        allowed = [os.sched_getaffinity(int(task)) for task in set(os.listdir(tasks)) - before]
        found = [allowed.count({cpu}) for cpu in cpus]
    assert found == wanted
