"""Two engines that read ONNX share one export, and each gets the model that it needs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampopt.engines import onnx_program
from ampopt.engines.onnx_program import for_onnx_runtime, plain_model
from tests.helpers import program_of

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")


def operators(model: bytes) -> list[str]:
    return [node.op_type for node in onnx.ModelProto.FromString(model).graph.node]


def test_the_shared_model_has_the_graphs_own_operators(
    exports_kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1, 3, 9, 9)
    program = program_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3)).eval(), x)
    model = plain_model(program.graph, (x,))
    assert operators(model) == ["Conv", "MaxPool"]
    assert operators(for_onnx_runtime(model)) == ["Conv", "MaxPool", "Conv", "Add"]
    monkeypatch.setattr(onnx_program, "model_of", lambda *_: pytest.fail("exported twice"))
    assert plain_model(program.graph, (x,)) == model


def test_a_model_without_poolings_is_the_same_for_both() -> None:
    x = torch.randn(2, 4)
    model = plain_model(program_of(nn.Linear(4, 4).eval(), x).graph, (x,))
    assert for_onnx_runtime(model) is model
