"""Bundles with one program for a range of sizes: every size in it is right, others are refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampopt
from ampopt import robot
from ampopt.bundle.files import open_bundle, write_bundle
from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import BundleError, InputError
from ampopt.ir.lane_io import LaneIO
from ampopt.ir.lanes import lanes_for
from ampopt.passes import BakeAutocast, ChannelsLast, FoldConvBn, OnnxRuntime, Script
from tests.helpers import Model, with_statistics
from tests.support.sized import sized_module

HERE = Path(__file__).resolve().parents[1]
RANGES = {"batch": (1, 4), "height": (8, 20)}


def image(batch: int = 2, height: int = 12, width: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def segmenter() -> nn.Module:
    """A mask of the image's size, and a vector of numbers, with the sizes in the code."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> dict[str, Tensor]:
        y = m.norm(m.conv(x)).relu()
        mask = F.interpolate(y, size=x.shape[-2:], mode="bilinear") / x.shape[2]
        return {"mask": mask, "scores": m.head(y.mean((2, 3)))}

    layers = {"conv": nn.Conv2d(3, 4, 3, 2, 1), "norm": nn.BatchNorm2d(4), "head": nn.Linear(4, 5)}
    return with_statistics(Model(forward, **layers))


MODEL = segmenter()


@pytest.fixture(scope="module")
def fast() -> OptimizedModule:
    passes = FoldConvBn(), ChannelsLast()
    return sized_module(MODEL, image(), dynamic=RANGES, passes=passes)


@pytest.fixture(scope="module")
def bundle(fast: OptimizedModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "robot.ampopt"
    fast.save(path, tune_s=0.3)
    return path


SIZES = [(1, 8), (4, 20), (1, 20), (2, 12), (3, 11), (4, 17)]
OUTSIDE = {
    "a larger batch": (image(5), r"batch is 1 to 4, and dimension 0 of 'inputs_0' is 5"),
    "a smaller height": (image(1, 7), r"height is 8 to 20, and dimension 2 of 'inputs_0' is 7"),
    "another width": (image(1, 8, 9), r"takes"),
    "another rank": (image()[0], r"takes"),
}


@pytest.mark.parametrize("backend", ["ampopt", "onnxruntime", "original", "auto"])
def test_every_backend_answers_every_size_and_refuses_others(bundle: Path, backend: str) -> None:
    loaded = ampopt.load(bundle, backend=backend, device="cpu")
    assert loaded.backend == backend or backend == "auto"
    assert loaded.notes == []
    assert loaded.sizes == RANGES
    with torch.no_grad():
        for size in SIZES:
            expected, found = MODEL(image(*size)), loaded(image(*size))
            assert found.keys() == expected.keys()
            for name in expected:
                assert torch.allclose(found[name], expected[name], atol=1e-5), (size, name)
    for x, reason in OUTSIDE.values():
        with pytest.raises(InputError, match=f"made for other calls: .*{reason}"):
            loaded(x)
    assert loaded.health.refusals == len(OUTSIDE)
    assert loaded.health.late_captures == 0


def test_the_passes_are_replayed_with_sizes_that_vary(bundle: Path) -> None:
    loaded = ampopt.load(bundle, backend="ampopt", device="cpu")
    assert isinstance(loaded._call, OptimizedModule)
    assert [step.name for step in loaded._call.program.recipe] == ["fold-conv-bn", "channels-last"]
    assert loaded._call.sizes == RANGES


ENGINES = {"script": (Script(),), "ort": (FoldConvBn(), OnnxRuntime(session=()))}


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_come_back(engine: str, tmp_path: Path) -> None:
    passes = ENGINES[engine]
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))
    sized_module(model, image(), dynamic=RANGES, passes=passes).save(tmp_path / "b", onnx=None)
    loaded = ampopt.load(tmp_path / "b", device="cpu")
    assert isinstance(loaded._call, OptimizedModule)
    assert [step.name for step in loaded._call.program.recipe] == [step.name for step in passes]
    for size in SIZES:
        assert torch.allclose(loaded(image(*size)), model(image(*size)), atol=1e-5)


def test_a_mixed_lane_comes_back(tmp_path: Path) -> None:
    (lane,) = lanes_for("bf16", torch.device("cpu"), None)
    module = sized_module(MODEL, image(), dynamic=RANGES, lane=lane, passes=(BakeAutocast(),))
    module.save(tmp_path / "b", onnx=None)
    loaded = ampopt.load(tmp_path / "b", device="cpu")
    for size in SIZES:
        found, expected = loaded(image(*size))["mask"], module(image(*size))["mask"]
        assert torch.allclose(found, expected, atol=1e-3)


def test_the_dtypes_of_a_lane_stay_at_the_border(tmp_path: Path) -> None:
    (lane,) = lanes_for("bf16", torch.device("cpu"), None)
    model = LaneIO.of_call(MODEL, (image(),), {}, torch.bfloat16)
    passes = (BakeAutocast(),)
    sized_module(model, image().bfloat16(), dynamic=RANGES, passes=passes, lane=lane).save(
        tmp_path / "b", tune_s=0.1
    )
    for backend in ("ampopt", "onnxruntime", "original"):
        loaded = ampopt.load(tmp_path / "b", backend=backend, device="cpu")
        found, expected = loaded(image(3, 9).bfloat16())["mask"], MODEL(image(3, 9))["mask"]
        assert found.dtype is torch.bfloat16
        assert float((found.float() - expected).norm()) < 0.05 * float(expected.norm())
        with pytest.raises(InputError, match="it takes bfloat16"):
            loaded(image(3, 9))


def test_a_range_of_one_size_is_fixed(tmp_path: Path) -> None:
    sized_module(MODEL, image(), dynamic={"batch": (1, 4), "height": (12, 12)}).save(
        tmp_path / "b", onnx=None
    )
    loaded = ampopt.load(tmp_path / "b", device="cpu")
    assert torch.allclose(loaded(image(3))["mask"], MODEL(image(3))["mask"], atol=1e-5)
    with pytest.raises(InputError, match="height is 12 to 12, and dimension 2"):
        loaded(image(3, 13))


def test_an_example_of_size_one_stands_for_no_constant(tmp_path: Path) -> None:
    module = sized_module(MODEL, image(1), dynamic=RANGES, passes=(OnnxRuntime(session=()),))
    module.save(tmp_path / "b", onnx=None)
    loaded = ampopt.load(tmp_path / "b", backend="ampopt", device="cpu")
    for size in SIZES:
        assert torch.allclose(loaded(image(*size))["mask"], MODEL(image(*size))["mask"], atol=1e-5)


def test_on_another_machine_the_passes_stay_and_a_note_says_so(bundle: Path, tmp_path: Path) -> None:
    def elsewhere(manifest: dict[str, Any], files: dict[str, bytes], tensors: dict[str, Tensor]) -> None:
        manifest["fingerprint"]["device"] = "an abacus"

    loaded = ampopt.load(rewritten(bundle, tmp_path / "b", elsewhere), backend="ampopt", device="cpu")
    assert loaded.notes[0].startswith("made on another machine, whose best passes these are: device an")
    assert torch.allclose(loaded(image(3))["mask"], MODEL(image(3))["mask"], atol=1e-5)


def test_inputs_that_share_a_size_have_the_same(tmp_path: Path) -> None:
    model = Model(lambda m, x, y: x @ y.transpose(1, 2)).eval()
    module = sized_module(model, torch.randn(3, 4, 5), torch.randn(3, 6, 5), dynamic={"batch": (1, 4)})
    module.save(tmp_path / "b", tune_s=0.2)
    loaded, runner = ampopt.load(tmp_path / "b", device="cpu"), robot.load(tmp_path / "b")
    x, y = torch.randn(2, 4, 5), torch.randn(2, 6, 5)
    assert torch.allclose(loaded(x, y), x @ y.transpose(1, 2), atol=1e-5)
    for call in (lambda: loaded(x, y[:1]), lambda: runner(x.numpy(), y[:1].numpy())):
        with pytest.raises(InputError, match="the batch of 'inputs_0' is 2, and that of 'inputs_1' is 1"):
            call()


def test_the_runner_without_torch_answers_every_size_and_refuses_others(bundle: Path) -> None:
    runner = robot.load(bundle)
    assert runner.sizes == RANGES
    assert runner.inputs[0].shape == ("batch", 3, "height", 8)
    with torch.no_grad():
        for size in SIZES:
            expected, found = MODEL(image(*size)), runner(image(*size).numpy())
            assert isinstance(found, dict)
            for name in expected:
                np.testing.assert_allclose(found[name], expected[name].numpy(), atol=1e-5)
    for x, reason in OUTSIDE.values():
        with pytest.raises(InputError, match=reason):
            runner(x.numpy())


def test_the_runner_needs_no_torch(bundle: Path) -> None:
    script = textwrap.dedent("""
        import sys

        class Forbidden:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "torch":
                    raise ImportError("a robot has no torch")

        sys.meta_path.insert(0, Forbidden())
        import numpy as np
        from ampopt import robot
        model = robot.load(sys.argv[1])
        print(model(np.zeros((3, 3, 9, 8), np.float32))["mask"].shape)
    """)
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-c", script, str(bundle)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "(3, 4, 9, 8)"


def test_the_manifest_is_of_schema_2_and_that_of_a_static_module_of_1(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    assert manifest["schema"] == 2
    assert manifest["sizes"]["inputs"] == [{"0": "batch", "2": "height"}]
    assert len(manifest["sizes"]["corners"]) == 4
    names = {info.name for info in onnx.load_from_string(open_bundle(bundle).read("model.onnx")).graph.input}
    assert names == {"inputs_0"}


Change = Callable[[dict[str, Any], dict[str, bytes], dict[str, Tensor]], None]


def rewritten(bundle: Path, target: Path, change: Change) -> Path:
    """The bundle with its manifest, files and self-test changed, and hashed anew, as an attacker would."""
    opened = open_bundle(bundle)
    manifest, files = dict(opened.manifest), {name: opened.read(name) for name in opened.names}
    del manifest["files"]
    tensors = safetensors.torch.load(files["self_test.safetensors"])
    change(manifest, files, tensors)
    files["self_test.safetensors"] = safetensors.torch.save(tensors)
    write_bundle(target, manifest, dict(files))
    return target


def _wrong_corner(manifest: dict[str, Any], files: dict[str, bytes], tensors: dict[str, Tensor]) -> None:
    tensors["corner2.output.mask"] = 1.1 * tensors["corner2.output.mask"]


def _missing_corner(manifest: dict[str, Any], files: dict[str, bytes], tensors: dict[str, Tensor]) -> None:
    del tensors["corner1.output.scores"]


def _other_corner(manifest: dict[str, Any], files: dict[str, bytes], tensors: dict[str, Tensor]) -> None:
    for name in ("input.inputs_0", "output.mask", "output.scores"):
        tensors[f"corner0.{name}"] = tensors[f"corner3.{name}"].clone()


def _wider(manifest: dict[str, Any], files: dict[str, bytes], tensors: dict[str, Tensor]) -> None:
    manifest["sizes"]["ranges"][0]["high"] = 64
    for corner in manifest["sizes"]["corners"]:
        corner["batch"] = {4: 64}.get(corner["batch"], 1)


def _another_dimension(manifest: dict[str, Any], files: dict[str, bytes], tensors: dict[str, Tensor]) -> None:
    manifest["sizes"]["inputs"] = [{"0": "batch", "3": "height"}]


FALSE: dict[str, tuple[Change, str]] = {
    "a wrong output at a corner": (_wrong_corner, "self-test at batch 4, height 8 fails"),
    "a corner without an output": (_missing_corner, "has no corner1.output.scores"),
    "the tensors of another corner": (_other_corner, "shape"),
    "a range that was not verified": (_wider, "shape"),
    "a range of another dimension": (_another_dimension, "shape"),
}


@pytest.mark.parametrize("runner", ["load", "robot"])
@pytest.mark.parametrize("name", FALSE)
def test_a_bundle_with_false_sizes_is_refused(name: str, runner: str, bundle: Path, tmp_path: Path) -> None:
    change, reason = FALSE[name]
    path = rewritten(bundle, tmp_path / "b", change)
    with pytest.raises(BundleError, match=reason):
        robot.load(path) if runner == "robot" else ampopt.load(path, backend="ampopt", device="cpu")


def test_a_static_program_in_a_bundle_with_ranges_is_refused(bundle: Path, tmp_path: Path) -> None:
    sized_module(MODEL, image(), dynamic={"batch": (1, 4)}).save(tmp_path / "narrow", tune_s=0.2)
    narrow = open_bundle(tmp_path / "narrow")

    def exchange(manifest: dict[str, Any], files: dict[str, bytes], tensors: dict[str, Tensor]) -> None:
        files |= {name: narrow.read(name) for name in ("program.json", "weights.safetensors", "model.onnx")}

    path = rewritten(bundle, tmp_path / "b", exchange)
    with pytest.raises(BundleError, match=r"program.json, node .*|self-test at"):
        ampopt.load(path, backend="ampopt", device="cpu")
    with pytest.raises(BundleError, match="the manifest says that its dimension 2 is height 8 to 20"):
        robot.load(path)
