"""The functions of the exporter are read once, and nobody else sees or changes what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ampopt.engines import onnx_registry
from ampopt.engines.onnx_registry import registry_kept

OPSET = 20
RELU, UNKNOWN = torch.ops.aten.relu.default, torch.ops.aten.grid_sampler_3d_backward.default


@pytest.fixture(scope="module")
def functions() -> Any:
    """What onnxscript lists, of which it reads the source each time."""
    pytest.importorskip("onnxscript")
    return pytest.importorskip(onnx_registry.EXPORTERS).onnxscript_apis.get_torchlib_ops()


@pytest.fixture
def registry(functions: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exporter's class, and nothing read yet; the list that it makes a registry of is there."""
    exporters = pytest.importorskip(onnx_registry.EXPORTERS)
    monkeypatch.setattr(exporters.onnxscript_apis, "get_torchlib_ops", lambda: functions)
    monkeypatch.setattr(onnx_registry, "_read", {})
    return exporters.ONNXRegistry


def read(registry: Any) -> Any:
    return registry().from_torchlib(opset_version=OPSET)


def test_a_registry_is_read_once_and_says_what_a_new_one_says(registry: Any) -> None:
    anew = read(registry)
    with registry_kept():
        first = read(registry)
    with registry_kept():
        second = read(registry)
    assert first.get_decomps(RELU)[0] is second.get_decomps(RELU)[0]
    assert anew.get_decomps(RELU)[0] is not first.get_decomps(RELU)[0]
    assert second.opset_version == anew.opset_version == OPSET
    assert type(second) is type(anew)
    for operator, found in anew.functions.items():
        assert [each.onnx_function for each in second.functions[operator]] == [
            each.onnx_function for each in found
        ]
    assert anew.functions.keys() == second.functions.keys()
    with registry_kept():
        assert registry.from_torchlib().get_decomps(RELU)[0] is not first.get_decomps(RELU)[0]


def test_what_one_export_adds_no_other_has(registry: Any) -> None:
    with registry_kept():
        mine = read(registry)
        mine.register_op(RELU, lambda x: x, is_complex=False)
        mine.register_op(UNKNOWN, lambda x: x, is_complex=False)
        next_one = read(registry)
    assert len(mine.get_decomps(RELU)) == len(next_one.get_decomps(RELU)) + 1
    assert mine.is_registered(UNKNOWN)
    assert not next_one.is_registered(UNKNOWN)


def test_the_class_is_as_it_was_after_the_block_and_a_failed_export_is_not_built_on(registry: Any) -> None:
    before = vars(registry)["from_torchlib"]
    with registry_kept():
        first = read(registry)
    with pytest.raises(ValueError, match="no such operator"), registry_kept():
        raise ValueError("no such operator")
    assert vars(registry)["from_torchlib"] is before
    with registry_kept():
        assert read(registry).get_decomps(RELU)[0] is not first.get_decomps(RELU)[0]


@pytest.mark.parametrize("module", ["torch.onnx", "torch.onnx.no_such_module"])
def test_an_exporter_without_such_a_class_reads_as_it_does(
    module: str, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_registry, "EXPORTERS", module)
    with registry_kept():
        one, other = read(registry), read(registry)
    assert one.get_decomps(RELU)[0] is not other.get_decomps(RELU)[0]
