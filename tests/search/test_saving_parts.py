"""A part of a model that is no single graph is saved and exported as a model of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import ampopt
from ampopt import robot
from ampopt.bundle.files import open_bundle
from ampopt.errors import InputError
from ampopt.measure.entry import ORIGINAL
from ampopt.search.partly_optimized import PartlyOptimizedModule
from tests.helpers import Model, with_statistics
from tests.support.planted import keep_the_patched, optimize

pytestmark = pytest.mark.usefixtures("quick")
X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Cropping(nn.Module):
    """A model with Python before and after its only network."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
        self.backbone = nn.Sequential(*layers)

    def forward(self, x: Tensor, *, least: float = 0.0) -> Tensor:
        """Crop, segment, and sum up what is found."""
        crop = x[..., :6, :6] if x.mean() > least else x[..., 2:, 2:]
        found: Tensor = self.backbone(2 * crop).sum((2, 3))
        return found


@pytest.fixture
def cropping(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, PartlyOptimizedModule]:
    keep_the_patched(monkeypatch)
    model = with_statistics(Cropping())
    fast = optimize(model, X.abs(), precision="fp32", budget_s=4.0)
    assert isinstance(fast, PartlyOptimizedModule)
    assert "backbone" in fast.report.regions
    return model, fast


def test_a_part_is_saved_as_a_model_of_its_own_with_its_real_inputs(
    cropping: tuple[nn.Module, PartlyOptimizedModule], tmp_path: Path
) -> None:
    model, fast = cropping
    fast.save(tmp_path / "b.ampopt", part="backbone", tune_s=0.2)
    loaded = ampopt.load(tmp_path / "b.ampopt", device="cpu")
    assert loaded.manifest["model"]["name"] == "backbone"
    assert loaded.manifest["inputs"][0]["shape"] == [1, 3, 6, 6]
    tensors = safetensors.torch.load(open_bundle(tmp_path / "b.ampopt").read("self_test.safetensors"))
    assert torch.equal(tensors["input.input"], 2 * X.abs()[..., :6, :6])
    crop = torch.randn(1, 3, 6, 6)
    expected = model.get_submodule("backbone")(crop)
    assert torch.allclose(loaded(crop), expected, atol=1e-5)
    found = robot.load(tmp_path / "b.ampopt")(crop.numpy())
    assert isinstance(found, np.ndarray)
    assert torch.allclose(torch.from_numpy(found), expected, atol=1e-5)


def test_a_part_is_exported_alone(cropping: tuple[nn.Module, PartlyOptimizedModule], tmp_path: Path) -> None:
    report = cropping[1].export_onnx(tmp_path / "m.onnx", part="backbone", precision="fp16")
    assert report.verified
    assert (report.inputs, report.precision) == (("input",), "fp16")


def test_refusals_name_the_line_and_the_parts(
    cropping: tuple[nn.Module, PartlyOptimizedModule], tmp_path: Path
) -> None:
    fast = cropping[1]
    line = r'because of test_saving_parts\.py:\d+, "crop = x\[\.\.\., :6, :6\] if x\.mean\(\) > least else'
    for write, name in ((fast.save, "b.ampopt"), (fast.export_onnx, "m.onnx")):
        with pytest.raises(InputError, match=f"not one graph: .*{line}.* parts alone: 'backbone'"):
            write(tmp_path / name)
        with pytest.raises(InputError, match="part='head': choose from 'backbone'"):
            write(tmp_path / name, part="head")
    fast.report.regions["regions.py:7"] = fast.report.regions["backbone"]
    with pytest.raises(InputError, match=r"is code between submodules.* are 'backbone'"):
        fast.save(tmp_path / "b.ampopt", part="regions.py:7")
    assert not list(tmp_path.iterdir())


def test_where_the_original_answers_no_part_can_be_saved(tmp_path: Path) -> None:
    model = Model(lambda m, x: m.conv(x) + 1 if x.sum() > 0 else x - 1, conv=nn.Identity())
    fast = optimize(model.eval(), X, budget_s=1.0)
    assert fast.report.chosen == ORIGINAL
    fast.report.regions["conv"] = fast.report  # it was optimized, and the whole was not faster
    with pytest.raises(InputError, match=r"part='conv': no submodule of it is optimized \(the original"):
        fast.save(tmp_path / "b.ampopt", part="conv")


def test_a_model_of_one_graph_has_no_parts(tmp_path: Path) -> None:
    fast = optimize(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), X, budget_s=1.0)
    for write, name in ((fast.save, "b.ampopt"), (fast.export_onnx, "m.onnx")):
        with pytest.raises(InputError, match=r"is one graph, and .* holds all of it: leave part='0'"):
            write(tmp_path / name, part="0")
