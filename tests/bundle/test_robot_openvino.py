"""Bundles whose fastest program ran in OpenVINO: without PyTorch, and where OpenVINO is not installed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ampopt import robot
from ampopt.bundle import robot_openvino
from ampopt.bundle.files import open_bundle
from ampopt.errors import BundleError, InputError
from ampopt.ort.openvino_options import OpenVinoOptions
from ampopt.ort.openvino_session import openvino_version
from ampopt.ort.options import CPU, OPENVINO, SessionOptions
from tests.support.onnx_models import expected, image, one_output, save_bundle, sum_and_product

pytest.importorskip("openvino")
HERE = Path(__file__).resolve().parents[2]
VERSION = openvino_version()


def bundle(path: Path, version: str | None = VERSION, **options: Any) -> Path:
    """A bundle with options for OpenVINO."""
    own = {"version": version, "options": {**OpenVinoOptions().to_dict(), **options}}
    latency = {"p50_ms": 500.0, "p99_ms": None}
    session = {"onnxruntime": "0.1"}
    timed = {"precision": "fp32", "opset": 18, "session": session, "latency": {**latency, "p50_ms": 900.0}}
    return one_output(path, onnx={**timed, "openvino": {**own, "latency": latency}})


def test_it_runs_in_openvino_with_the_bundles_options(tmp_path: Path) -> None:
    model = robot.load(bundle(tmp_path / "b", threads=1, latency=False))
    assert model.engine == "openvino"
    assert model.options == OpenVinoOptions(threads=1, latency=False)
    assert model.notes == ()
    assert model.expected == {"p50_ms": 500.0, "p99_ms": None}
    found = model(image(seed=5))
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, expected(image(seed=5)), rtol=1e-5, atol=1e-6)


def test_where_it_is_not_installed_onnx_runtime_runs_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(robot_openvino, "openvino_version", lambda: None)
    path = bundle(tmp_path / "b")
    with caplog.at_level(logging.WARNING, "ampopt.robot"):
        model = robot.load(path)
    assert model.engine == "onnxruntime"
    assert model.options.provider == CPU
    assert model.notes[0] == (
        "ONNX Runtime runs what was faster in OpenVINO: OpenVINO is not installed: run  pip install openvino"
    )
    assert model.expected["p50_ms"] == 900.0
    assert len(caplog.records) == len(model.notes)
    with pytest.raises(BundleError, match="pip install openvino"):
        robot.load(path, engine="openvino")


def test_a_precision_that_the_processor_does_not_have_gives_way_to_onnx_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.ort.openvino_session.why_not_precision", lambda precision: f"no {precision}")
    model = robot.load(bundle(tmp_path / "b", precision="bf16"))
    assert model.engine == "onnxruntime"
    assert model.notes[0].endswith("no bf16")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"version": "2020.1"}, "hold for openvino 2020.1"), ({"threads": 1024}, "take 1024 threads")],
)
def test_options_that_do_not_fit_give_way_to_the_defaults(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    path = bundle(tmp_path / "b", **changes, pinning=True)
    model = robot.load(path)
    assert model.options == OpenVinoOptions()
    assert reason in model.notes[0]
    anew = robot.load(path, retune_seconds=0.1)
    assert anew.notes[-1] == f"measured anew: {anew.options}"
    assert anew.engine == "openvino"


def test_an_engine_may_be_asked_for(tmp_path: Path) -> None:
    path = bundle(tmp_path / "b")
    assert robot.load(path, engine="onnxruntime").engine == "onnxruntime"
    assert robot.load(path, provider=CPU).engine == "onnxruntime"
    plain = robot.load(one_output(tmp_path / "c"), engine="openvino")
    assert plain.notes == ("OpenVINO runs with default options: the bundle was saved without options for it",)
    assert plain.expected == plain.manifest["onnx"]["latency"]
    with pytest.raises(InputError, match="choose 'onnxruntime'"):
        robot.load(path, engine="tensorrt")
    with pytest.raises(InputError, match="is ONNX Runtime's"):
        robot.load(path, engine="openvino", provider=CPU)


@pytest.mark.parametrize("options", [{"precision": "dynamic"}, {"CACHE_DIR": "/"}, {"threads": -1}])
def test_dangerous_options_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(BundleError, match="OpenVINO's options"):
        robot.load(bundle(tmp_path / "b", **options))


@pytest.mark.parametrize("change", [{"version": ""}, {"options": None}, {"latency": {}}, {"more": 1}])
def test_the_manifest_says_what_openvino_has(tmp_path: Path, change: dict[str, Any]) -> None:
    from ampopt.bundle.manifest import RefusedError, decode, encode
    from tests.support.bundles import fields

    latency = {"p50_ms": 1.0, "p99_ms": 2.0}
    own = {"version": "2026.4", "options": {}, "latency": latency}
    manifest = {**fields(), "files": {"a": {"sha256": "0" * 64, "bytes": 1}}}
    manifest["onnx"] = {**manifest["onnx"], "openvino": own}
    assert decode(encode(manifest)) == manifest
    manifest["onnx"]["openvino"] = {**own, **change}
    with pytest.raises(RefusedError, match=r"onnx\.openvino"):
        decode(encode(manifest))
    manifest["onnx"] |= {"openvino": own, "why_not_openvino": None}
    assert decode(encode(manifest)) == manifest
    manifest["onnx"]["why_not_openvino"] = "a reason"
    with pytest.raises(RefusedError, match=r"onnx\.openvino has options, and onnx\.why_not_openvino says no"):
        decode(encode(manifest))
    del manifest["onnx"]["why_not_openvino"]
    manifest["onnx"]["openvino"] = {**own, "latency": {"p50_ms": 3.0, "p99_ms": 2.0}}
    with pytest.raises(RefusedError, match=r"onnx\.openvino\.latency"):
        decode(encode(manifest))


WHY = "OpenVINO computes int64 in int32, at input 'stamp'"


def integers(path: Path, **fields: Any) -> Path:
    """A bundle of sums and products of int64, which OpenVINO computes in 32 bits."""
    a, b = np.full((2, 3), 2), np.full((2, 3), 3)
    inputs, outputs = {"a": a, "b": b}, {"sum": a + b, "product": a * b}
    return save_bundle(path, sum_and_product("int64"), inputs, outputs, **fields)


def with_reason(path: Path, reason: str | None, **section: Any) -> Path:
    latency = {"p50_ms": 500.0, "p99_ms": None}
    session = {**SessionOptions().to_dict(), "onnxruntime": onnxruntime.__version__}
    timed = {"precision": "fp32", "opset": 18, "session": session, "latency": latency}
    return integers(path, onnx={**timed, "why_not_openvino": reason, **section})


@pytest.mark.parametrize("options", [{"engine": "openvino"}, {"provider": OPENVINO}])
def test_what_the_manifest_says_is_not_run_in_it_by_name(tmp_path: Path, options: dict[str, Any]) -> None:
    path = with_reason(tmp_path / "b", WHY)
    with pytest.raises(BundleError, match=rf"{path}: it may not run in OpenVINO: {WHY}; choose another"):
        robot.load(path, **options, retune_seconds=0.1)
    big = np.full((2, 3), 2**40 + 1)
    found = robot.load(path)(big, big)
    assert isinstance(found, dict)
    assert (found["sum"] == 2**41 + 2).all()


def test_the_reason_comes_before_advice_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robot_openvino, "openvino_version", lambda: None)
    with pytest.raises(BundleError, match=WHY):
        robot.load(with_reason(tmp_path / "b", WHY), engine="openvino")


def test_the_command_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert robot.main([str(with_reason(tmp_path / "b", WHY)), "--engine", "openvino"]) == 2
    assert WHY in capsys.readouterr().err


def test_an_older_bundle_runs_in_it_if_its_operators_are_known(tmp_path: Path) -> None:
    assert robot.load(one_output(tmp_path / "known"), engine="openvino").engine == "openvino"
    with pytest.raises(
        BundleError, match=r"did not ask whether .* its . \(Parameter of i64\) .*save it again"
    ):
        robot.load(integers(tmp_path / "b"), engine="openvino")


def test_an_older_bundle_that_was_fastest_in_it_runs_in_onnx_runtime_and_says_why(tmp_path: Path) -> None:
    own = {
        "version": VERSION,
        "options": OpenVinoOptions().to_dict(),
        "latency": {"p50_ms": 1.0, "p99_ms": 2.0},
    }
    manifest = open_bundle(integers(tmp_path / "a")).manifest
    model = robot.load(integers(tmp_path / "b", onnx={**manifest["onnx"], "openvino": own}))
    assert model.engine == "onnxruntime"
    assert "Parameter of i64" in model.notes[0]


def test_its_provider_in_onnx_runtime_takes_the_same_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [OPENVINO, CPU])
    tuned_in_it = {"provider": OPENVINO, "onnxruntime": onnxruntime.__version__}
    for tuned in ({}, tuned_in_it, {"provider": OPENVINO, "onnxruntime": "0.1"}):
        own = {"precision": "fp32", "session": tuned}
        refused = robot._choices(b"", {**own, "why_not_openvino": WHY}, None)
        assert [options.provider for options, _ in refused] == [CPU]
        free = robot._choices(b"", {**own, "why_not_openvino": None}, None)
        assert free[0][0].provider == OPENVINO
        assert tuned != tuned_in_it or WHY in str(refused[0][1])


@pytest.mark.parametrize("reason", ["", 3, ["a"], "a" * 5000])
def test_the_reason_is_a_text_or_null(tmp_path: Path, reason: object) -> None:
    with pytest.raises(BundleError, match=r"onnx\.why_not_openvino is .*, not a text"):
        with_reason(tmp_path / "b", reason)  # type: ignore[arg-type]


def test_neither_torch_nor_onnx_nor_onnx_runtime_is_needed(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys

        class Forbidden:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("torch", "torchvision", "onnx", "onnxscript", "onnxruntime"):
                    raise ImportError(f"a robot has no {name}")

        sys.meta_path.insert(0, Forbidden())
        import ampopt.robot
        assert "openvino" not in sys.modules
        code = ampopt.robot.main([sys.argv[1], "--hz", "4", "--seconds", "0.5", "--retune-seconds", "0.1"])
        assert not {"torch", "onnx", "onnxruntime"} & set(sys.modules)
        sys.exit(code)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(bundle(tmp_path / "b", "2020.1"))],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["engine"] == "openvino"
    assert told["self_test_error"] < 1e-5
