"""Bundles run without PyTorch: the self-test, the options, the calls, and the command line."""

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
import onnx
import onnxruntime
import pytest

from ampopt import robot
from ampopt.bundle.signing import generate_keys
from ampopt.errors import BundleError
from ampopt.ort.options import CPU, CUDA, OPENVINO, SessionOptions
from ampopt.ort.session import OnnxRunner, SessionError
from tests.support.onnx_models import convolution, expected, image, model, one_output, save_bundle

HERE = Path(__file__).resolve().parents[1]
OTHERS = {CUDA, OPENVINO} & set(onnxruntime.get_available_providers())
VERSION = onnxruntime.__version__


def stored(version: str | None = VERSION, **changes: Any) -> dict[str, Any]:
    return {**SessionOptions(**changes).to_dict(), **({"onnxruntime": version} if version else {})}


@pytest.mark.parametrize("name", ["robot.ampopt", "folder/"])
def test_a_bundle_gives_the_models_output(tmp_path: Path, name: str) -> None:
    path = f"{tmp_path}/{name}"
    one_output(path)  # type: ignore[arg-type]
    model = robot.load(path)
    x = image(seed=7)
    found = model(x)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, expected(x), rtol=1e-5)
    np.testing.assert_array_equal(model(x=x), found)
    assert model.error < 1e-6
    assert model.notes == ()


def test_weights_beside_the_model_are_read(tmp_path: Path) -> None:
    onnx.save(
        onnx.load_from_string(convolution()),
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=0,
    )
    path = save_bundle(
        tmp_path / "b",
        (tmp_path / "model.onnx").read_bytes(),
        {"x": image()},
        {"y": expected(image())},
        files={"model.onnx.data": (tmp_path / "model.onnx.data").read_bytes()},
    )
    found = robot.load(path)(image(seed=3))
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, expected(image(seed=3)), rtol=1e-5)


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is no ONNX model: a field is longer than its message"):
        robot.load(one_output(tmp_path / "b", files={"model.onnx": b"rubbish"}))


def test_a_bundle_without_a_signature_is_refused_where_a_key_is_given(tmp_path: Path) -> None:
    generate_keys(tmp_path / "secret.pem", tmp_path / "public.pem")
    with pytest.raises(BundleError, match="not signed"):
        robot.load(one_output(tmp_path / "b"), verify_key=tmp_path / "public.pem")


def test_the_bundles_own_options_are_used(tmp_path: Path) -> None:
    own: dict[str, Any] = {"threads": 1, "spinning": False, "optimization": "extended"}
    model = robot.load(one_output(tmp_path / "b", session=stored(**own)))
    assert model.options == SessionOptions(**own)
    assert model.notes == ()


@pytest.mark.parametrize(
    ("session", "reason"),
    [
        (stored("0.1", threads=1), f"hold for onnxruntime 0.1, and this is {VERSION}"),
        (stored(threads=1024), "take 1024 threads"),
        (stored(None, threads=1), "saved without options"),
        ({}, "saved without options"),
        (stored(provider=CUDA), "do not load here"),
    ],
)
@pytest.mark.skipif(bool(OTHERS), reason="other options fit here")
def test_options_that_do_not_fit_give_way_to_the_defaults_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, session: dict[str, Any], reason: str
) -> None:
    with caplog.at_level(logging.WARNING, "ampopt.robot"):
        model = robot.load(one_output(tmp_path / "b", session=session))
    assert model.options == SessionOptions()
    assert f"{CPU} runs with default options" in model.notes[0]
    assert reason in model.notes[0]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'b'}: {note}" for note in model.notes
    ]


@pytest.mark.skipif(CUDA in onnxruntime.get_available_providers(), reason="CUDA may load here")
def test_a_provider_that_is_missing_is_named(tmp_path: Path) -> None:
    path = one_output(tmp_path / "b", session=stored(provider=CUDA))
    model = robot.load(path)
    assert model.notes[1].startswith(f"this onnxruntime {VERSION} has no {CUDA}")
    with pytest.raises(BundleError, match=f"has no {CUDA}"):
        robot.load(path, provider=CUDA)
    found = robot.load(path, provider=CPU)
    assert found.notes == (f"{CPU} runs with default options: the bundle's own are for {CUDA}",)


def test_options_that_do_not_load_are_tried_once_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(model: bytes | Path, options: SessionOptions) -> OnnxRunner:
        if options.threads:
            raise SessionError("no threads here")
        return OnnxRunner(model, options)

    monkeypatch.setattr(robot, "OnnxRunner", load)
    model = robot.load(one_output(tmp_path / "b", session=stored(threads=1)))
    assert model.options == SessionOptions()
    assert model.notes[1] == "no threads here"


def test_dangerous_options_in_a_bundle_are_refused(tmp_path: Path) -> None:
    session = stored(provider=CUDA, provider_options={"gpu_external_alloc": "1"})
    with pytest.raises(BundleError, match="gpu_external_alloc") as caught:
        robot.load(one_output(tmp_path / "b", session=session))
    assert str(caught.value).startswith(f"{tmp_path / 'b'}: session options")


def test_options_of_another_version_are_measured_anew_on_request(tmp_path: Path) -> None:
    path = one_output(tmp_path / "b", session=stored("0.1"))
    model = robot.load(path, retune_seconds=0.2)
    assert model.notes[-1] == f"measured anew: {model.options}"
    assert model.options.provider == CPU
    fitting = robot.load(one_output(tmp_path / "c"), retune_seconds=100.0)
    assert fitting.notes == ()


def test_the_command_line_measures_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(one_output(tmp_path / "b"))
    assert robot.main([path, "--hz", "5", "--seconds", "0.6"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] is True
    assert told["paced"]["frames"] == 3
    assert told["options"]["provider"] == CPU
    assert told["self_test_error"] < 1e-6
    slow = one_output(tmp_path / "slow", expected={"p50_ms": 1e-9, "p99_ms": 1e-9})
    assert robot.main([str(slow), "--hz", "5", "--seconds", "0.6"]) == 0
    assert "was expected" in json.loads(capsys.readouterr().out)["warnings"][-1]
    assert robot.main([str(slow), "--hz", "5", "--seconds", "0.6", "--strict"]) == 1
    assert "was expected" in json.loads(capsys.readouterr().out)["reasons"][-1]
    assert robot.main([path, "--hz", "5", "--seconds", "0.6", "--deadline-ms", "1e-6"]) == 1
    assert "3 of 3 frames" in json.loads(capsys.readouterr().out)["reasons"][0]


def test_the_command_line_says_why_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert robot.main([str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err


UNPRINTED = "error: not everything could be printed: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a shell of Linux")
@pytest.mark.parametrize(
    ("options", "where", "code", "said"),
    [
        ("", ">/dev/full", 2, UNPRINTED),
        ("--deadline-ms 1e-6", ">/dev/full", 2, UNPRINTED),
        ("", ">&-", 0, ""),
        ("", ">&- 2>&-", 0, ""),
        ("", "| true", 0, ""),
        ("--deadline-ms 1e-6", "| true", 1, ""),
    ],
)
def test_wherever_it_is_printed_the_exit_code_is_the_judgments(
    tmp_path: Path, options: str, where: str, code: int, said: str
) -> None:
    command = f"{sys.executable} -m ampopt.robot {one_output(tmp_path / 'b')} --hz 4 --seconds 0.5 {options}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {where}"],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (code, said)


def test_neither_importing_nor_running_needs_torch_or_onnx(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys

        class Forbidden:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("torch", "torchvision", "onnx", "onnxscript"):
                    raise ImportError(f"a robot has no {name}")

        sys.meta_path.insert(0, Forbidden())
        import ampopt.robot
        assert "onnxruntime" not in sys.modules
        model = ampopt.robot.load(sys.argv[1], retune_seconds=0.1)
        y = model(**model.example)
        code = ampopt.robot.main([sys.argv[1], "--hz", "4", "--seconds", "0.5"])
        assert not {"torch", "onnx"} & set(sys.modules)
        print("ran", y.shape, code)
    """)
    path = one_output(tmp_path / "b", session=stored("0.1"))
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ran (1, 4, 8, 8) 0"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_loaded_model_takes_little_more_memory_than_its_weights(tmp_path: Path) -> None:
    count, channels = 8, 512
    names = [f"w{at}" for at in range(count)]
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((channels, channels, 3, 3)).astype(np.float32) for name in names}
    steps = ["x", *(f"c{at}" for at in range(count - 1)), "y"]
    nodes = [
        onnx.helper.make_node("Conv", [steps[at], names[at]], [steps[at + 1]], name=names[at], pads=[1] * 4)
        for at in range(count)
    ]
    shape = [1, channels, 7, 7]
    made = model(nodes, {"x": shape}, {"y": shape}, weights)
    x = rng.standard_normal(shape).astype(np.float32)
    (y,) = OnnxRunner(made, SessionOptions())(x)
    path = save_bundle(tmp_path / "b", made, {"x": x}, {"y": y})
    script = textwrap.dedent("""
        import sys
        import onnxruntime
        import ampopt.robot

        def resident():
            with open("/proc/self/statm") as file:
                return 4096 * int(file.read().split()[1])

        before = resident()
        model = ampopt.robot.load(sys.argv[1])
        model(**model.example)
        print(resident() - before)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.7 * sum(weight.nbytes for weight in weights.values())
