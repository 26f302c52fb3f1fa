"""How a model leaves: names are looked at early, options arrive, and the process stays as it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import BundleError, InputError
from ampopt.passes import FoldConvBn
from tests.helpers import with_statistics
from tests.support.planted import module_of, optimize

X = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))
DONE = "the result"


@pytest.fixture(scope="module")
def fast() -> OptimizedModule:
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    return module_of(model, X, passes=(FoldConvBn(),))


class Recorder:
    """Stands for the work: what it was asked for, and no result but that it was done."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.options: dict[str, Any] = {}

    def __call__(self, *given: Any, **options: Any) -> str:
        self.given, self.options = list(given), options
        os.environ["TORCH_LEFT_BEHIND"] = "1"
        return DONE


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for name in ("export_onnx", "save_bundle"):
        monkeypatch.setattr(f"ampopt.deploy.deployable.{name}", recorder)
    return recorder


def test_the_export_is_of_the_original_with_the_passes_that_were_kept(
    fast: OptimizedModule, work: Recorder, tmp_path: Path
) -> None:
    assert fast.export_onnx(tmp_path / "m.onnx") == DONE  # type: ignore[comparison-overlap]
    original, captured, passes, path = work.given
    assert [type(layer) for layer in original] == [nn.Conv2d, nn.BatchNorm2d]
    assert torch.equal(captured.program.examples[0], X)
    assert (passes, path) == ((FoldConvBn(),), tmp_path / "m.onnx")


def test_precision_is_the_lanes_unless_it_is_asked_for(
    fast: OptimizedModule, work: Recorder, tmp_path: Path
) -> None:
    fast.export_onnx(tmp_path / "m.onnx")
    assert work.options["precision"] == "fp32"
    fast.export_onnx(tmp_path / "m.onnx", precision="fp16")
    assert work.options["precision"] == "fp16"


def test_every_option_of_the_export_arrives(fast: OptimizedModule, work: Recorder, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "io": "fp16",
        "target": "tensorrt",
        "dynamic": "batch",
        "input_names": ["x"],
        "output_names": ["y"],
        "force": True,
    }
    fast.export_onnx(tmp_path / "m.onnx", **options)
    assert options.items() <= work.options.items()


def test_the_users_metric_and_tolerance_hold_for_the_file_too(work: Recorder, tmp_path: Path) -> None:
    def metric(outputs: Any, reference: Any) -> float:
        return float((outputs - reference).abs().max())

    optimize(nn.ReLU(), X, metric=metric, tolerance=0.25, budget_s=1.0).export_onnx(tmp_path / "m.onnx")
    assert work.options["metric"] is metric
    assert work.options["tolerance"] == 0.25


def test_every_option_of_a_bundle_arrives(fast: OptimizedModule, work: Recorder, tmp_path: Path) -> None:
    options: dict[str, Any] = {"onnx": "fp16", "cpp": True, "as_folder": True, "tune_s": 3.0}
    fast.save(tmp_path / "b", **options)
    assert work.given[0] is fast
    assert work.given[-1] == tmp_path / "b"
    assert work.options == options | {"sign_key": None}
    fast.save(tmp_path / "b")
    defaults = {"onnx": "auto", "cpp": False, "as_folder": False, "tune_s": 10.0, "sign_key": None}
    assert work.options == defaults


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.engine", r"stands for an engine of TensorRT.*: choose a name that ends in \.onnx"),
        ("model.ampopt", r"stands for a bundle, which `save` writes: name it model\.onnx"),
        ("", "is a folder: name the file"),
    ],
)
def test_a_name_that_is_none_for_onnx_is_refused_before_the_work(
    name: str, message: str, fast: OptimizedModule, work: Recorder, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        fast.export_onnx(tmp_path / name)
    assert not work.given
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("robot.engine", "stands for an engine of TensorRT"),
        ("robot.onnx", r"which `export_onnx` writes: name the bundle robot\.ampopt"),
    ],
)
def test_a_name_that_is_none_for_a_bundle_is_refused_before_the_work(
    name: str, message: str, fast: OptimizedModule, work: Recorder, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        fast.save(tmp_path / name)
    assert not work.given
    assert not list(tmp_path.iterdir())


def test_a_key_that_is_not_there_is_refused_before_the_work(
    fast: OptimizedModule, work: Recorder, tmp_path: Path
) -> None:
    with pytest.raises((BundleError, InputError), match=r"nowhere\.pem"):
        fast.save(tmp_path / "b", sign_key=tmp_path / "nowhere.pem")
    assert not work.given


@pytest.mark.parametrize("name", ["m.onnx", "b"])
def test_what_the_work_leaves_in_the_process_is_put_back(
    name: str, fast: OptimizedModule, work: Recorder, tmp_path: Path
) -> None:
    (fast.export_onnx if name == "m.onnx" else fast.save)(tmp_path / name)
    assert work.given
    assert "TORCH_LEFT_BEHIND" not in os.environ
