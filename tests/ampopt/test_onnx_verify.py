"""Verification of ONNX files: every output against float64, the metric, and where nodes ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from ampopt.capture import Captured
from ampopt.onnx_export import export_onnx
from ampopt.onnx_providers import CPU, CUDA, nodes_off, providers, session
from ampopt.onnx_verify import ON_CPU_FP16, OnnxVerifier, OutputCheck, verify_onnx
from ampopt.verify import Verifier
from tests.ampopt.planted import captured_of
from tests.helpers import Model

X = torch.randn(1, 4, 16, 24, generator=torch.Generator().manual_seed(0))
NAMES = ("output", "output_1")


def two(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.conv(x)
    return y, y.exp()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, Captured]:
    torch.manual_seed(0)
    original, captured = captured_of(Model(two, conv=nn.Conv2d(4, 4, 3)).eval(), X)
    path = tmp_path_factory.mktemp("onnx") / "m.onnx"
    export_onnx(original, captured, (), path)
    return path, original, captured


def test_every_output_has_its_error_beside_eagers(exported: tuple[Path, nn.Module, Captured]) -> None:
    path, original, captured = exported
    check = verify_onnx(path, original, [captured], torch.float32, NAMES)
    assert check.reason is None
    on_cpu = [row for row in check.outputs if row.provider == CPU]
    assert [row.name for row in on_cpu] == list(NAMES)
    for row in on_cpu:
        assert 0 < row.error < 1e-6
        assert 0 < row.eager_error < 1e-6
        assert row.limit == 1e-5


def test_the_wrong_output_is_the_one_that_is_named(exported: tuple[Path, nn.Module, Captured]) -> None:
    path, original, captured = exported
    other = Model(lambda m, x: (m.conv(x), m.conv(x).exp() * 1.001), conv=original.conv)
    check = verify_onnx(path, other, [captured], torch.float32, NAMES)
    assert check.reason is not None
    assert "'output_1' has error 0.001" in check.reason
    assert [row.passed for row in check.outputs if row.provider == CPU] == [True, False]


def test_a_tolerance_replaces_the_limits(exported: tuple[Path, nn.Module, Captured]) -> None:
    path, original, captured = exported
    other = Model(lambda m, x: (m.conv(x), m.conv(x).exp() * 1.001), conv=original.conv)
    assert verify_onnx(path, other, [captured], torch.float32, NAMES, tolerance=0.01).reason is None


def test_a_metric_decides_alone(exported: tuple[Path, nn.Module, Captured]) -> None:
    path, original, captured = exported

    def distance(outputs: Any, reference: Any) -> float:
        return 0.5 + float((outputs[0] - reference[0]).abs().max())

    refused = verify_onnx(path, original, [captured], torch.float32, NAMES, metric=distance, tolerance=0.4)
    assert refused.reason is not None
    assert "the metric gives 0.5" in refused.reason
    taken = verify_onnx(path, original, [captured], torch.float32, NAMES, metric=distance, tolerance=0.6)
    assert taken.reason is None
    assert taken.metric == pytest.approx(0.5, abs=1e-4)


def test_a_file_that_does_not_run_is_a_reason(exported: tuple[Path, nn.Module, Captured]) -> None:
    path, _, _ = exported
    original, captured = captured_of(Model(two, conv=nn.Conv2d(4, 4, 3)).eval(), X[:, :, :8])
    check = verify_onnx(path, original, [captured], torch.float32, NAMES)
    assert check.reason is not None
    assert "cannot run the model" in check.reason


def test_nan_where_the_original_has_none_never_passes() -> None:
    assert not OutputCheck("output", CPU, float("nan"), 0.0, 1.0).passed
    assert not OutputCheck("output", CPU, float("inf"), 0.0, float("inf")).passed


@pytest.mark.skipif(providers() != (CPU,), reason="another provider is installed")
def test_float16_on_the_cpu_alone_says_what_it_does_not_prove(
    exported: tuple[Path, nn.Module, Captured],
) -> None:
    path, original, captured = exported
    notes = verify_onnx(path, original, [captured], torch.float16, NAMES).notes
    assert ON_CPU_FP16 in notes


def test_eager_float16_on_a_cpu_has_cudas_rules() -> None:
    """Under the CPU's own, an exponential overflows in float16."""
    model = Model(lambda m, x: (m.conv(x) * 20).exp().log(), conv=nn.Conv2d(4, 4, 3)).eval()
    original, captured = captured_of(model, X)
    verifier = OnnxVerifier(original, captured, draws=0)
    assert 1e-5 < verifier.own_error(torch.float16) < 1e-2
    assert not Verifier(original, captured, draws=0).own_error(torch.float16) < 1e-2


def test_no_limit_lets_an_output_of_zeros_pass() -> None:
    model = Model(lambda m, x: m.conv(m.conv(x) * 1e-9), conv=nn.Conv2d(4, 4, 1, bias=False)).eval()
    original, captured = captured_of(model, X)
    verifier = OnnxVerifier(original, captured, draws=0)
    assert verifier.own_error(torch.float16) == 1.0
    rows = verifier.outputs(lambda x: [torch.zeros_like(x)], torch.float16, ["output"], CPU)
    assert (rows[0].error, rows[0].limit, rows[0].passed) == (1.0, 0.5, False)


def test_nodes_off_the_gpu_are_told_from_the_profile() -> None:
    def event(name: str, provider: str, cat: str = "Node") -> dict[str, Any]:
        facts = {"provider": provider, "op_name": name.split("_")[0]}
        return {"cat": cat, "name": f"{name}_kernel_time", "args": facts}

    events = [
        event("Conv_1", CUDA),
        event("TopK_2", CPU),
        event("TopK_2", CPU),
        event("run", CPU, "Session"),
        {"cat": "Node", "name": "Conv_1_fence_before", "args": {"op_name": "Conv"}},
    ]
    assert nodes_off(events, CUDA) == ("TopK_2 (TopK)",)


def test_the_profile_of_this_onnx_runtime_is_understood(
    exported: tuple[Path, nn.Module, Captured], tmp_path: Path
) -> None:
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    run = onnxruntime.InferenceSession(str(exported[0]), options, providers=[CPU])
    run.run(None, {run.get_inputs()[0].name: X.numpy()})
    events = json.loads(Path(run.end_profiling()).read_text(encoding="utf-8"))
    assert any("Conv" in name for name in nodes_off(events, CUDA))
    assert nodes_off(events, CPU) == ()


def test_a_session_leaves_no_profile_behind(exported: tuple[Path, nn.Module, Captured]) -> None:
    with session(exported[0], CPU) as run:
        folder = Path(run._directory.name)
        assert len(run(X)) == 2
    assert not folder.exists()
