"""What the tests of the ONNX export share: a short way to export, and what a file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from ampopt.deploy.onnx_export import OnnxReport, export_onnx
from tests.helpers import with_statistics
from tests.support.planted import captured_of

X = torch.randn(1, 4, 16, 24, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(1, 3, 32, 48, generator=torch.Generator().manual_seed(0))


def export(model: nn.Module, path: Path, *args: Any, **options: Any) -> OnnxReport:
    inputs = args or (X,)
    original, captured = captured_of(model.eval(), *inputs)
    return export_onnx(original, captured, (), path, **options)


def run(path: Path, *inputs: Tensor) -> list[np.ndarray[Any, Any]]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [taken.name for taken in session.get_inputs()]
    return list(session.run(None, dict(zip(names, [x.numpy() for x in inputs], strict=True))))


def shapes_of(path: Path) -> dict[str, list[int | str]]:
    model = onnx.load(path)
    return {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*model.graph.input, *model.graph.output)
    }


def conv_bn() -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
