"""Bundles of models that keep a state: each call goes on where the last ended; nothing else advances it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

import ampopt
from ampopt import robot
from ampopt.bundle.files import open_bundle, write_bundle
from ampopt.bundle.manifest import RefusedError, decode, encode
from ampopt.errors import BundleError, ExportError, InputError
from ampopt.ir.lanes import lanes_for
from tests.deploy import test_served_state as buffers
from tests.deploy.test_runtime_io import lane_module
from tests.support import ways_to_keep as ways
from tests.support.bundles import fields
from tests.support.keeping import Keeping, check, check_calls, inputs, served

GRU, NESTED = ways.gru, ways.nested
BACKENDS = ["ampopt", "onnxruntime", "original", "auto"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state in a nested dict, which is not all zeros at first."""
    path = tmp_path_factory.mktemp("bundle") / "robot.ampopt"
    served(started()).save(path, tune_s=0.2)
    return path


def started() -> Keeping:
    model = Keeping(NESTED).eval()
    with torch.no_grad():
        model(inputs(1, seed=9)[0])
    return model


@pytest.mark.parametrize("function", ways.FROM_THE_START)
def test_a_loaded_model_goes_on_from_call_to_call(function: Any, tmp_path: Path) -> None:
    model = Keeping(function).eval()
    with torch.no_grad():
        model(inputs(1, seed=9)[0])
    served(model).save(tmp_path / "b", onnx=None)
    loaded = ampopt.load(tmp_path / "b", backend="ampopt", device="cpu")
    for _ in range(2):
        check_calls(loaded, copy.deepcopy(model), inputs(9))
        loaded.reset_state()


def test_a_state_in_buffers_is_kept_too(tmp_path: Path) -> None:
    model = buffers.keeping(buffers.smooth)
    buffers.served(model).save(tmp_path / "b", tune_s=0.1)
    for backend in ("ampopt", "onnxruntime"):
        loaded, twin = ampopt.load(tmp_path / "b", backend=backend, device="cpu"), copy.deepcopy(model)
        check_calls(loaded, twin, buffers.frames(6), 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_keeps_the_state(backend: str, bundle: Path) -> None:
    loaded = ampopt.load(bundle, backend=backend, device="cpu")
    assert loaded.notes == []
    check_calls(loaded, started(), inputs(9), 1e-4)
    loaded.reset_state()
    check_calls(loaded, started(), inputs(3), 1e-4)
    assert loaded.health.refusals == 0


def test_the_runner_without_torch_keeps_the_state(bundle: Path) -> None:
    runner, twin = robot.load(bundle), started()
    assert [info.name for info in runner.inputs] == ["x"]
    assert [info.name for info in runner.outputs] == ["output"]
    assert runner.example.keys() == {"x"}
    for _ in range(2):
        for x in inputs(9):
            found = runner(x.numpy())
            assert isinstance(found, np.ndarray)
            with torch.no_grad():
                check(torch.from_numpy(found), twin(x), 1e-4)
        runner.reset_state()
        twin = started()


def test_saving_does_not_advance_the_served_state(tmp_path: Path) -> None:
    model = started()
    fast, twin = served(model), copy.deepcopy(model)
    check_calls(fast, twin, inputs(4))
    fast.save(tmp_path / "b", tune_s=0.1)
    check_calls(fast, twin, inputs(4, seed=5))
    loaded = ampopt.load(tmp_path / "b", device="cpu")
    check_calls(loaded, started(), inputs(2), 1e-4)  # from where it was optimized, not from where it stands


def test_a_step_and_a_call_that_fails_leave_the_state(bundle: Path) -> None:
    loaded, runner, twin = ampopt.load(bundle, backend="ampopt", device="cpu"), robot.load(bundle), started()
    check_calls(loaded, twin, inputs(2))
    (x,) = inputs(1, seed=7)
    with pytest.raises(InputError, match="made for other calls"):
        loaded(x[:1])
    with pytest.raises(InputError, match="takes shape"):
        runner(x[:1].numpy())
    state = loaded._state
    first, _ = loaded.step(state, (x,), {})
    again, _ = loaded.step(state, (x,), {})
    assert torch.equal(first, again)
    runner.step(*[runner.example["x"], *runner._state.values()])
    check_calls(loaded, twin, inputs(3))
    for given in inputs(2):
        found, other = runner(given.numpy()), started()
    with torch.no_grad():
        expected = [other(given) for given in inputs(2)][-1]
    assert isinstance(found, np.ndarray)
    check(torch.from_numpy(found), expected, 1e-4)


@pytest.mark.parametrize("function", [ways.returned, ways.returned_in_place, ways.of_the_input])
def test_what_a_caller_writes_to_inputs_and_results_does_not_reach_the_state(
    function: Any, tmp_path: Path
) -> None:
    model = Keeping(function).eval()
    served(model).save(tmp_path / "b", tune_s=0.1)
    for backend in ("ampopt", "onnxruntime", "original"):
        loaded, twin = ampopt.load(tmp_path / "b", backend=backend, device="cpu"), copy.deepcopy(model)
        for x in inputs(5):
            with torch.no_grad():
                expected = torch.utils._pytree.tree_map(torch.clone, twin(x.clone()))
            found = loaded(given := x.clone())
            check(found, expected, 1e-4)
            for tensor in (given, *torch.utils._pytree.tree_leaves(found)):
                tensor.zero_()


def test_calls_in_inference_mode_advance_it_too(bundle: Path) -> None:
    loaded, twin = ampopt.load(bundle, backend="ampopt", device="cpu"), started()
    with torch.inference_mode():
        check_calls(loaded, twin, inputs(2))
    check_calls(loaded, twin, inputs(2))


def test_calls_of_several_threads_take_turns(tmp_path: Path) -> None:
    model = Keeping(ways.in_place).eval()
    served(model).save(tmp_path / "b", onnx=None)
    loaded, twin = ampopt.load(tmp_path / "b", device="cpu"), copy.deepcopy(model)
    (x,) = inputs(1)
    threads = [threading.Thread(target=lambda: [loaded(x) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for _ in range(20):
            twin(x)
    check_calls(loaded, twin, [x])


def test_a_mixed_lane_keeps_it_in_the_models_dtype(tmp_path: Path) -> None:
    (lane,) = lanes_for("bf16", torch.device("cpu"), None)
    fast = served(Keeping(GRU).eval(), lane)
    fast.save(tmp_path / "b", onnx=None)
    loaded = ampopt.load(tmp_path / "b", device="cpu")
    for x in inputs(6):
        check(loaded(x), fast(x), 1e-6)


def test_on_another_machine_it_is_measured_anew(bundle: Path, tmp_path: Path) -> None:
    def elsewhere(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        manifest["fingerprint"]["device"] = "an abacus"

    path = rewritten(bundle, tmp_path / "b", elsewhere)
    loaded = ampopt.load(path, backend="ampopt", device="cpu", budget_s=2.0)
    assert "measured anew: device an abacus" in loaded.notes[0]
    check_calls(loaded, started(), inputs(4), 1e-4)


REFUSED: dict[Any, str] = {
    ways.lazy: "makes a state in its attribute lazy in its first calls",
    ways.one_tensor_three_times_in_place: "makes a state|shares memory",
}


@pytest.mark.parametrize("function", REFUSED)
def test_a_state_that_a_bundle_cannot_hold_is_refused_by_name(function: Any, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=REFUSED[function]):
        served(Keeping(function).eval()).save(tmp_path / "b", onnx=None)
    assert not list(tmp_path.iterdir())


def test_a_state_in_the_models_dtype_behind_a_border_of_another_is_refused(tmp_path: Path) -> None:
    fast = lane_module(Keeping(ways.sliced).eval(), inputs(1)[0])
    with pytest.raises(ExportError, match="optimize it with io='original' for a bundle"):
        fast.save(tmp_path / "b", onnx=None)


Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def rewritten(bundle: Path, target: Path, change: Change) -> Path:
    """The bundle with its manifest and self-test changed, and hashed anew, as an attacker would."""
    opened = open_bundle(bundle)
    manifest, files = dict(opened.manifest), {name: opened.read(name) for name in opened.names}
    del manifest["files"]
    tensors = safetensors.torch.load(files["self_test.safetensors"])
    change(manifest, tensors)
    files["self_test.safetensors"] = safetensors.torch.save(tensors)
    write_bundle(target, manifest, dict(files))
    return target


def _no_state(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del manifest["state"]
    manifest["schema"] = 1


def _one_less(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del manifest["state"][0]


def _another_start(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["input.memory_h"] = tensors["input.memory_h"] + 1


def _no_start(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors["input.memory_h"]


def _another_next(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["output.memory_h_next"] = tensors["output.memory_h_next"] + 1


FALSE: dict[str, tuple[Change, str]] = {
    "no state": (_no_state, "tensors, while the program has"),
    "one less": (_one_less, "tensors, while the program has"),
    "another state at first": (_another_start, "self-test fails"),
    "no state at first": (_no_start, "has no input.memory_h"),
    "another next state": (_another_next, "self-test fails"),
}


@pytest.mark.parametrize("name", FALSE)
def test_a_bundle_with_a_false_state_is_refused(name: str, bundle: Path, tmp_path: Path) -> None:
    change, reason = FALSE[name]
    path = rewritten(bundle, tmp_path / "b", change)
    with pytest.raises(BundleError, match=reason):
        ampopt.load(path, backend="ampopt", device="cpu")
    if "self-test" in reason or "has no" in reason:
        with pytest.raises(BundleError, match=reason):
            robot.load(path)


def _manifest() -> dict[str, Any]:
    """A manifest whose second input and output are a state."""
    found = fields(schema=2, files={"model.onnx": {"sha256": "a" * 64, "bytes": 3}})
    h = {"name": "h", "shape": [2, 6], "dtype": "float32", "layout": "contiguous"}
    found["inputs"].append(dict(h))
    found["outputs"].append({**h, "name": "h_next"})
    return copy.deepcopy(found | {"state": [{"input": "h", "output": "h_next"}]})


ATTACKS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no list": (lambda m: m.update(state={}), "not a list"),
    "nothing": (lambda m: m.update(state=[]), "state is not a list of some of the inputs"),
    "too many": (lambda m: m.update(state=m["state"] * 3), "state is not a list of some of the inputs"),
    "no pair": (lambda m: m["state"][0].pop("output"), r"state\[0\] is not an object"),
    "a name": (lambda m: m.update(state=["h"]), r"state\[0\] is not an object"),
    "more than a pair": (lambda m: m["state"][0].update(code="x"), r"state\[0\] is not an object"),
    "another input": (lambda m: m["state"][0].update(input="x"), r"not the pair of input 'h'"),
    "another output": (lambda m: m["state"][0].update(output="output"), r"not the pair of input 'h'"),
    "a list for a name": (lambda m: m["state"][0].update(input=["h"]), r"not the pair of input 'h'"),
    "another shape": (lambda m: m["outputs"][1].update(shape=[3, 6]), r"changes 'h' from float32 \[2, 6\]"),
    "another dtype": (lambda m: m["outputs"][1].update(dtype="float16"), r"to float16 \[2, 6\]"),
    "sizes, too": (lambda m: m.update(sizes={}), "sizes"),
    "schema 1": (lambda m: m.update(schema=1), "'state' is no field"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_false_state_in_a_manifest_is_refused(attack: str) -> None:
    assert decode(encode(_manifest())) == _manifest()
    change, reason = ATTACKS[attack]
    manifest = _manifest()
    change(manifest)
    with pytest.raises(RefusedError, match=reason):
        decode(encode(manifest))
