"""Dynamic dimensions take other sizes and have the user's names."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ampopt.errors import ExportError, InputError, VerificationError
from tests.helpers import Model
from tests.support.exporting import conv_bn, export, run, shapes_of


def test_dynamic_dimensions_have_the_users_names_and_take_other_sizes(tmp_path: Path) -> None:
    path, model = tmp_path / "m.onnx", conv_bn()
    dynamic = {"input": {0: "n", 2: "rows", 3: "columns"}}
    export(model, path, dynamic=dynamic)
    assert shapes_of(path)["input"] == ["n", 4, "rows", "columns"]
    assert shapes_of(path)["output"][:2] == ["n", 4]
    assert shapes_of(path)["output"][2] in ("rows - 2", "rows-2")
    for sizes in itertools.product((1, 3), (5, 16)):
        x = torch.randn(sizes[0], 4, sizes[1], 7)
        assert np.allclose(run(path, x)[0], model(x).detach().numpy(), atol=1e-4)


def test_a_slice_that_is_whole_for_the_example_is_kept_for_other_batches(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    export(Model(lambda m, x: x[:2] * 2), path, dynamic="batch")
    assert run(path, torch.randn(5, 4, 16, 24))[0].shape[0] == 2


def test_static_shapes_are_the_default(tmp_path: Path) -> None:
    export(conv_bn(), tmp_path / "m.onnx")
    assert shapes_of(tmp_path / "m.onnx") == {"input": [1, 4, 16, 24], "output": [1, 4, 14, 22]}


def test_a_model_that_fixes_its_batch_is_not_exported_dynamic(tmp_path: Path) -> None:
    model = Model(lambda m, x: m.conv(x).reshape(1, -1), conv=nn.Conv2d(4, 4, 3))
    fixed = Model(lambda m, x: x + m.table, table=torch.randn(3, 4, 16, 24))
    with pytest.raises(ExportError, match=r"cannot be exported with dynamic batch: .*static shapes"):
        export(fixed, tmp_path / "m.onnx", torch.randn(3, 4, 16, 24), dynamic="batch")
    with pytest.raises((ExportError, VerificationError)):
        export(model, tmp_path / "m.onnx", dynamic={"inputs_0": {1: "channels"}})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dynamic", ["all", {"y": {0: "n"}}, {"input": {4: "n"}}, {"input": {0: "a b"}}])
def test_dynamic_dimensions_that_are_not_there_are_refused(dynamic: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dynamic"):
        export(conv_bn(), tmp_path / "m.onnx", dynamic=dynamic)
