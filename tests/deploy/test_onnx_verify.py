"""Verification of ONNX files: every output against float64, the metric, and where nodes ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.deploy import onnx_verify
from ampopt.deploy.onnx_export import export_onnx
from ampopt.deploy.onnx_verify import (
    ON_CPU_FP16,
    OnnxVerifier,
    OutputCheck,
    nodes_off,
    providers,
    to_numpy,
    verify_onnx,
)
from ampopt.ir.capture import Captured
from ampopt.ir.lanes import FP32
from ampopt.measure.followed import FOLLOWED_FROM
from ampopt.measure.verify import Verifier
from ampopt.ort.options import CPU, CUDA
from ampopt.ort.session import Node
from tests.helpers import FP16, Model
from tests.support.planted import captured_of

X = torch.randn(1, 4, 16, 24, generator=torch.Generator().manual_seed(0))
ROWS = torch.zeros(16, 24, dtype=torch.int64)
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
    check = verify_onnx(path, original, [captured], FP32, NAMES)
    assert check.reason is None
    on_cpu = [row for row in check.outputs if row.provider == CPU]
    assert [row.name for row in on_cpu] == list(NAMES)
    for row in on_cpu:
        assert 0 < row.error < 1e-5
        assert 0 < row.eager_error < 1e-5
        assert 1e-5 <= row.limit < 2e-5


def test_the_wrong_output_is_the_one_that_is_named(exported: tuple[Path, nn.Module, Captured]) -> None:
    path, original, captured = exported
    other = Model(lambda m, x: (m.conv(x), m.conv(x).exp() * 1.001), conv=original.conv)
    check = verify_onnx(path, other, [captured], FP32, NAMES)
    assert check.reason is not None
    assert "'output_1' has error 0.001" in check.reason
    assert [row.passed for row in check.outputs if row.provider == CPU] == [True, False]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda m, i: (i // 3 + i.clamp(min=0) // (2**31 + 1),), "with a large integer"),
        (lambda m, i: (i.clamp(min=-1) // 3,), "the smallest integers alone"),
        (lambda m, i: (i // 3 + torch.arange(12)[i] * 0,), "in the inputs it answers, and eager does not"),
    ],
    ids=["a large one", "bounds", "what the original refuses"],
)
def test_a_file_is_checked_with_integers_as_programs_are(tmp_path: Path, other: Any, reason: str) -> None:
    ids = torch.tensor([[1, 5, 2], [0, 3, 4]])
    original, captured = captured_of(Model(lambda m, i: (i // 3,)).eval(), ids)
    export_onnx(original, captured, (), tmp_path / "m.onnx")
    assert verify_onnx(tmp_path / "m.onnx", original, [captured], FP32, ["y"]).reason is None
    check = verify_onnx(tmp_path / "m.onnx", Model(other).eval(), [captured], FP32, ["y"])
    assert check.reason is not None
    assert check.reason.startswith(CPU)
    assert reason in check.reason


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Model(lambda m, x: m.l(x[0, 2])[0], l=nn.LSTM(24, 4)), "LSTM"),
        (lambda: Model(lambda m, x: m.l(x[0, 2])[0], l=nn.GRU(24, 4)), "GRU"),
        (lambda: Model(lambda m, x: F.max_pool2d(x, 2)), "MaxPool"),
        (
            lambda: Model(lambda m, x: x[0, 0].scatter_reduce(0, m.i, x[0, 2], "amax"), i=ROWS),
            "ScatterElements",
        ),
    ],
    ids=["lstm", "gru", "pooling", "scatter"],
)
def test_a_note_names_the_operator_that_loses_nan(
    make: Callable[[], nn.Module], name: str, tmp_path: Path
) -> None:
    original, captured = captured_of(make().eval(), X)
    report = export_onnx(original, captured, (), tmp_path / "m.onnx")
    assert any(f"ONNX Runtime's {name} may take NaN for a number" in note for note in report.notes)


def test_a_tolerance_replaces_the_limits(exported: tuple[Path, nn.Module, Captured]) -> None:
    path, original, captured = exported
    other = Model(lambda m, x: (m.conv(x), m.conv(x).exp() * 1.001), conv=original.conv)
    assert verify_onnx(path, other, [captured], FP32, NAMES, tolerance=0.01).reason is None


def test_a_metric_decides_alone(exported: tuple[Path, nn.Module, Captured]) -> None:
    path, original, captured = exported

    def distance(outputs: Any, reference: Any) -> float:
        return 0.5 + float((outputs[0] - reference[0]).abs().max())

    refused = verify_onnx(path, original, [captured], FP32, NAMES, metric=distance, tolerance=0.4)
    assert refused.reason is not None
    assert "the metric gives 0.5" in refused.reason
    taken = verify_onnx(path, original, [captured], FP32, NAMES, metric=distance, tolerance=0.6)
    assert taken.reason is None
    assert taken.metric == pytest.approx(0.5, abs=1e-4)


def test_a_file_that_does_not_run_is_a_reason(exported: tuple[Path, nn.Module, Captured]) -> None:
    path, _, _ = exported
    original, captured = captured_of(Model(two, conv=nn.Conv2d(4, 4, 3)).eval(), X[:, :, :8])
    check = verify_onnx(path, original, [captured], FP32, NAMES)
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
    notes = verify_onnx(path, original, [captured], FP16, NAMES).notes
    assert ON_CPU_FP16 in notes


def test_eager_float16_on_a_cpu_has_cudas_rules() -> None:
    """Under the CPU's own, an exponential overflows in float16."""
    model = Model(lambda m, x: (m.conv(x) * 20).exp().log(), conv=nn.Conv2d(4, 4, 3)).eval()
    original, captured = captured_of(model, X)
    verifier = OnnxVerifier(original, captured, draws=0)
    assert 1e-5 < verifier.own_error(FP16) < 1e-2
    assert not Verifier(original, captured, draws=0).own_error(FP16) < 1e-2


def test_no_limit_lets_an_output_of_zeros_pass() -> None:
    model = Model(lambda m, x: m.conv(m.conv(x) * 1e-9), conv=nn.Conv2d(4, 4, 1, bias=False)).eval()
    original, captured = captured_of(model, X)
    verifier = OnnxVerifier(original, captured, draws=0)
    assert verifier.own_error(FP16) == 1.0
    rows = verifier.outputs(lambda x: [torch.zeros_like(x)], FP16, ["output"], CPU)
    assert (rows[0].error, rows[0].passed) == (1.0, False)
    assert rows[0].limit <= FP16.limits.without_eager  # eager, which vanishes, is no yardstick


def test_nodes_of_another_provider_are_named() -> None:
    nodes = {CUDA: [Node("Conv_1", "Conv")], CPU: [Node("TopK_2", "TopK")]}
    assert nodes_off(nodes, CUDA) == ("TopK_2 (TopK)",)
    assert nodes_off(nodes, CPU) == ("Conv_1 (Conv)",)


def test_a_provider_that_does_not_start_is_a_note(
    exported: tuple[Path, nn.Module, Captured], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, original, captured = exported
    monkeypatch.setattr("ampopt.deploy.onnx_verify.providers", lambda: (CPU, "NoSuchExecutionProvider"))
    monkeypatch.setitem(onnx_verify._ONCE, "NoSuchExecutionProvider", {})
    check = verify_onnx(path, original, [captured], FP32, NAMES)
    assert check.reason is None
    assert check.providers == (CPU,)
    assert any("nothing was verified on NoSuchExecutionProvider" in note for note in check.notes)


def test_a_file_that_the_cpu_does_not_load_is_refused(
    exported: tuple[Path, nn.Module, Captured], tmp_path: Path
) -> None:
    _, original, captured = exported
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    check = verify_onnx(tmp_path / "broken.onnx", original, [captured], FP32, NAMES)
    assert check.reason is not None
    assert "does not load the model" in check.reason


def test_a_provider_that_makes_numbers_of_nan_is_told(tmp_path: Path) -> None:
    for model, told in ((nn.MaxPool2d(2), True), (nn.AvgPool2d(2), False)):
        original, captured = captured_of(model.eval(), X)
        report = export_onnx(original, captured, (), tmp_path / "m.onnx")
        lost = [note for note in report.notes if "a sensor's fault would be lost" in note]
        assert bool(lost) is told
        assert report.verified


@pytest.mark.parametrize("function", [F.logsigmoid, F.softplus, torch.logaddexp, F.mish])
def test_a_file_is_right_far_outside_of_the_examples_range(function: Any, tmp_path: Path) -> None:
    two = function is torch.logaddexp
    model = Model(lambda m, x: function(x, -x) if two else function(x)).eval()
    original, captured = captured_of(model, X)
    assert export_onnx(original, captured, (), tmp_path / "m.onnx").verified


@pytest.mark.parametrize("lazy", [torch._neg_view(torch.ones(2)), torch.full((2,), 1 - 2j).conj()])
def test_an_array_has_what_is_negated_or_conjugated_by_a_bit_alone(lazy: Tensor) -> None:
    assert to_numpy(lazy).tolist() == lazy.tolist()


def _best(m: Any, x: Tensor) -> Tensor:
    """What is computed from the 100 best of many, of which float16 takes others."""
    features = torch.tanh(m.features(x))
    places = m.score(features).squeeze(-1).topk(100, dim=1).indices
    return m.head(features.gather(1, places[..., None].expand(-1, -1, 32)))  # type: ignore[no-any-return]


def test_a_file_in_float16_is_compared_with_the_original_that_chooses_as_it_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(_best, features=nn.Linear(16, 32), score=nn.Linear(32, 1), head=nn.Linear(32, 4))
    original, captured = captured_of(model.eval(), torch.randn(4, 600, 16))
    path = tmp_path / "m.onnx"
    report = export_onnx(original, captured, (), path, precision="fp16")
    assert {row.provider for row in report.outputs} >= {"torch", CPU}
    assert all(row.error < FOLLOWED_FROM for row in report.outputs)
    plain = verify_onnx(path, original, [captured], FP16, report.output_names)  # nobody tells its choices
    assert plain.error > FOLLOWED_FROM
