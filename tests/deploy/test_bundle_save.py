"""`OptimizedModule.save`: what is in a bundle, what its self-test asks, and what a bundle cannot hold."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import onnx
import pytest
import safetensors.torch
import torch
from torch import nn

import ampopt
from ampopt.bundle.files import BundleFiles, open_bundle
from ampopt.deploy.known_backend import BACKEND
from ampopt.deploy.runtime import OptimizedModule
from ampopt.deploy.self_test import SelfTest
from ampopt.errors import ExportError, InputError, VerificationError
from ampopt.passes import ChannelsLast, FoldConvBn, FuseConvOnednn
from tests.helpers import Model, reference_of, with_statistics
from tests.support.planted import module_of, optimize

X = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    return with_statistics(nn.Sequential(*layers))


@pytest.fixture(scope="module")
def fast() -> OptimizedModule:
    module = module_of(network(), X, passes=(FoldConvBn(), ChannelsLast()))
    module.report.model = "Small"
    return module


@pytest.fixture(scope="module")
def bundle(fast: OptimizedModule, tmp_path_factory: pytest.TempPathFactory) -> BundleFiles:
    """Everything that a bundle can hold, with ONNX in float16."""
    path = tmp_path_factory.mktemp("bundle") / "robot.ampopt"
    fast.save(path, onnx="fp16", tune_s=0.2, cpp=True)
    return open_bundle(path)


def test_a_bundle_holds_everything_that_a_robot_needs(bundle: BundleFiles) -> None:
    own = {"program.json", "weights.safetensors", "self_test.safetensors", "report.json"}
    assert set(bundle.names) - {BACKEND} == own | {"program.pt", "model.onnx"}
    manifest = bundle.manifest
    assert manifest["model"]["name"] == "Small"
    assert manifest["lane"] == {"name": "fp32", "dtype": "float32"}
    assert manifest["inputs"] == [
        {"name": "input", "shape": [1, 3, 12, 12], "dtype": "float32", "layout": "contiguous"}
    ]
    assert manifest["fingerprint"]["torch"] == torch.__version__
    p50, p99 = (manifest["latency"][name] for name in ("p50_ms", "p99_ms"))
    assert 0 < p50 <= (math.inf if p99 is None else p99)  # of too few calls there is no p99
    assert json.loads(bundle.read("report.json"))["model"] == "Small"
    recipe = json.loads(bundle.read("program.json"))["recipe"]
    assert [step["pass"] for step in recipe] == ["fold-conv-bn", "channels-last"]


def test_what_is_stored_is_the_captured_model_and_not_what_this_machine_made_of_it(
    bundle: BundleFiles,
) -> None:
    weights = safetensors.torch.load(bundle.read("weights.safetensors"))
    stored = {tensor.shape for tensor in weights.values()}
    assert {layer.shape for layer in network().state_dict().values() if layer.dim() > 0} <= stored
    assert "batch_norm" in bundle.read("program.json").decode()


def test_the_onnx_model_is_in_the_precision_asked_for_with_options_that_were_tuned(
    bundle: BundleFiles,
) -> None:
    found = bundle.manifest["onnx"]
    model = onnx.load_from_string(bundle.read("model.onnx"))
    assert found["precision"] == "fp16"
    assert found["opset"] == model.opset_import[0].version
    assert any(w.data_type == onnx.TensorProto.FLOAT16 for w in model.graph.initializer)
    assert "threads" in found["session"]
    assert found["latency"]["p50_ms"] > 0


def test_the_self_test_is_the_examples_with_the_originals_outputs_in_float64(bundle: BundleFiles) -> None:
    tensors = safetensors.torch.load(bundle.read("self_test.safetensors"))
    assert tensors.keys() == {"input.input", "output.output"}
    assert torch.equal(tensors["input.input"], X)
    (exact,) = reference_of(network(), [X])
    assert torch.equal(tensors["output.output"], exact.float())


def test_the_tolerance_is_as_wide_as_the_widest_precision_in_the_bundle_needs(
    fast: OptimizedModule, bundle: BundleFiles, tmp_path: Path
) -> None:
    fast.save(tmp_path / "b", onnx=None)
    plain = open_bundle(tmp_path / "b")
    assert "onnx" not in plain.manifest
    assert "model.onnx" not in plain.names
    assert 0 < plain.manifest["tolerance"] < 1e-3
    assert 1e-3 < bundle.manifest["tolerance"] <= 0.5


def test_the_users_tolerance_is_the_bundles(tmp_path: Path) -> None:
    optimize(nn.ReLU(), X, tolerance=0.125, budget_s=1.0).save(tmp_path / "b", onnx=None)
    assert open_bundle(tmp_path / "b").manifest["tolerance"] == 0.125


def test_a_program_that_would_fail_its_self_test_is_not_saved(tmp_path: Path) -> None:
    squares = Model(lambda m, x: (x * 1e30).square().sqrt())  # no float32 holds these, and float64 does
    with pytest.raises(VerificationError, match=r"would not load.*output 'output' .* error of inf"):
        module_of(squares, X).save(tmp_path / "b", onnx=None)
    assert not (tmp_path / "b").exists()


def test_a_model_that_rounds_by_itself_is_tested_within_that(tmp_path: Path) -> None:
    def rounds(m: Model, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: torch.Tensor = m.get_submodule("conv")(x).relu()
            return result

    module = module_of(Model(rounds, conv=nn.Conv2d(3, 8, 3)), X)
    module.save(tmp_path / "b", onnx=None)
    loaded = ampopt.load(tmp_path / "b", device="cpu")
    assert loaded.backend == "ampopt"
    assert loaded(X).dtype is torch.bfloat16


def test_a_folder_holds_the_same_files(fast: OptimizedModule, tmp_path: Path) -> None:
    fast.save(tmp_path / "b", onnx=None, as_folder=True)
    assert (tmp_path / "b").is_dir()
    fast.save(tmp_path / "zip", onnx=None)
    assert set(open_bundle(tmp_path / "b").names) == set(open_bundle(tmp_path / "zip").names)


def test_cpp_gets_the_program_without_kernels_that_a_trace_cannot_hold(tmp_path: Path) -> None:
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())).eval()
    fused = module_of(model, X, passes=(FoldConvBn(), FuseConvOnednn()))
    assert any(buffer.is_mkldnn for buffer in fused.program.graph.buffers())
    fused.save(tmp_path / "robot.ampopt", onnx=None, cpp=True)
    program = torch.jit.load(io.BytesIO(open_bundle(tmp_path / "robot.ampopt").read("program.pt")))
    assert torch.allclose(program([X])[0], model(X), atol=1e-5)


def test_cpp_gets_this_machines_own_program_where_a_trace_holds_it(bundle: BundleFiles) -> None:
    program = torch.jit.load(io.BytesIO(bundle.read("program.pt")))
    assert torch.allclose(program([X])[0], network()(X), atol=1e-5)
    assert "batch_norm" not in str(program.inlined_graph)


def test_the_self_tests_tensors_are_plain_copies() -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    low, number = torch.tensor([1.5, 2.0], dtype=torch.bfloat16), torch.tensor(3)
    tensors = SelfTest({"image": image}, {"low": low, "number": number}, 0.1).tensors()
    assert list(tensors) == ["input.image", "output.low", "output.number"]
    assert tensors["input.image"].is_contiguous()
    assert torch.equal(tensors["input.image"], image)
    assert tensors["output.low"].dtype is torch.float32  # NumPy has no bfloat16
    assert tensors["output.low"].tolist() == [1.5, 2.0]
    assert tensors["output.number"].dtype is torch.int64
    image.zero_()
    assert tensors["input.image"].sum() == 276


def test_a_precision_that_there_is_not_is_refused(fast: OptimizedModule, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="onnx='int8': choose 'auto', 'fp32', 'fp16', or None"):
        fast.save(tmp_path / "b", onnx="int8")
    assert not list(tmp_path.iterdir())


def test_what_a_file_cannot_hold_is_an_export_error_and_leaves_the_old_bundle(tmp_path: Path) -> None:
    target = tmp_path / "b"
    module_of(nn.ReLU(), X).save(target, onnx=None)
    before = target.read_bytes()
    shows = module_of(Model(lambda m, x: x + torch.empty_permuted(x.shape, (0, 1, 2, 3)).zero_()), X)
    with pytest.raises(ExportError, match="empty_permuted"):
        shows.save(target, onnx=None)
    assert target.read_bytes() == before
