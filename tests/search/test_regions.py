"""Models that are no single graph: their submodules are optimized, and they answer as they did."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import InputError
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.sampling import Gain, Measurement
from ampopt.search.partly_optimized import PartlyOptimizedModule
from benchmarks.models import randomize_batch_norm
from tests.helpers import with_statistics
from tests.support import snapshot
from tests.support.planted import keep_the_patched, optimize

pytestmark = pytest.mark.usefixtures("quick")
X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Branching(nn.Module):
    """A model whose path depends on its input's values."""

    def __init__(self) -> None:
        super().__init__()
        self.bright = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.dark = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        """Bright images one way, dark ones the other."""
        out: Tensor = self.bright(x) if x.mean() > 0 else self.dark(x)
        return out


class Stateful(nn.Module):
    """A model that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Add the number of the call."""
        self.count.add_(1)
        out: Tensor = self.conv(x) + self.count
        return out


class Noisy(nn.Module):
    """A model that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Add noise."""
        return self.conv(x) + torch.rand(1)  # type: ignore[no-any-return]


class Timed(nn.Module):
    """A submodule that answers otherwise after its time."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.end = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), time.monotonic() + 1e9

    def forward(self, x: Tensor) -> Tensor:
        """The features, none when the time is over."""
        return self.net(x) * (0 if time.monotonic() > self.end else 1)  # type: ignore[no-any-return]


class Overwriting(nn.Module):
    """A model that changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize in place, then convolve."""
        return self.conv(x.sub_(0.5))  # type: ignore[no-any-return]


def test_a_submodule_that_reads_the_clock_is_no_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_the_patched(monkeypatch)
    model: Any = with_statistics(nn.Sequential(Timed(), nn.Conv2d(4, 4, 3)))
    fast: Any = optimize(model, X, precision="fp32")
    assert set(fast.report.regions) <= {"0.net", "1"}
    assert any("it reads the clock (time.monotonic) at test_regions.py" in note for note in fast.report.notes)
    torch.testing.assert_close(fast(X), model(X), atol=1e-4, rtol=1e-4)


def test_data_dependent_control_flow_is_served_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_patched(monkeypatch)
    model = with_statistics(Branching())
    before = snapshot.of_model(model), snapshot.of_torch()
    fast = optimize(model, X.abs(), precision="fp32")
    assert snapshot.differences(before[0], snapshot.of_model(model)) == []
    assert snapshot.differences(before[1], snapshot.of_torch()) == []
    assert isinstance(fast, PartlyOptimizedModule)
    assert list(fast.report.regions) == ["bright"]
    assert fast.report.chosen == "fp32"
    assert (fast.report.speedup, fast.report.gain) == (2.0, Gain(2.0, 2.0, 2.0))
    assert fast.report.notes[0].startswith("not one graph: torch.export cannot capture Branching")
    assert fast.report.lanes["fp32"].eager_error is None
    assert f"error {fast.report.lanes['fp32'].error:.1e} from eager\n" in str(fast.report)
    for x in (X.abs(), -X.abs(), X.abs()[..., :6], torch.cat([X, X]).abs()):
        assert torch.allclose(fast(x), model(x), atol=1e-5)


@pytest.mark.parametrize(
    "noisy",
    [{"after": (2.0, 2.0, 2.0, 2.0, 3.0, 1.0)}, {"after": (2.0,) * 6, "before again": (1.9,) * 6}],
    ids=["the times vary", "the original differs from itself as much"],
)
def test_where_the_whole_is_no_faster_outside_the_noise_the_original_runs(
    noisy: dict[str, tuple[float, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(samplers: dict[str, Any], **options: Any) -> dict[str, Measurement]:
        return {name: Measurement(noisy.get(name, (2.2,) * 6)) for name in samplers}

    monkeypatch.setattr("ampopt.measure.headline.interleave", measured)
    report = optimize(with_statistics(Branching()), X.abs()).report
    assert (report.chosen, report.speedup) == (ORIGINAL, 1.0)
    assert "the original runs: it is not faster" in report.notes
    assert "result: the original model" in str(report)


def test_hooks_of_a_submodule_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_patched(monkeypatch)
    model = Branching()
    with_statistics(model)
    model.bright.register_forward_hook(lambda module, args, output: output * 2)
    model.bright.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    fast = optimize(model, X.abs(), precision="fp32")
    assert torch.allclose(fast(X.abs()), model(X.abs()), atol=1e-5)
    assert fast.report.chosen == "fp32", fast.report.notes


def test_a_model_with_state_begins_where_the_users_model_stands() -> None:
    model = Stateful().eval()
    twin = copy.deepcopy(model)
    fast = optimize(model, X, precision="fp32")
    assert model.count == 0
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(fast(X), twin(X), atol=1e-5)


def test_a_model_that_draws_random_numbers_draws_the_same_ones() -> None:
    model = Noisy().eval()
    fast = optimize(model, X, precision="fp32")
    torch.manual_seed(3)
    expected = [model(X), model(X)]
    torch.manual_seed(3)
    assert all(torch.allclose(fast(X), one, atol=1e-6) for one in expected)


def test_a_model_that_changes_its_input_still_does() -> None:
    model, one, other = Overwriting().eval(), X.clone(), X.clone()
    fast = optimize(model, X, precision="fp32")
    for _ in range(2):
        assert torch.allclose(fast(one), model(other), atol=1e-5)
        assert torch.equal(one, other)


def test_a_model_without_any_graph_runs_as_it_was() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x - 1

    fast = optimize(Bare(), X)
    assert fast.report.chosen == ORIGINAL
    assert "no part of it can be captured: the model runs as it was" in fast.report.notes
    assert torch.equal(fast(X.abs()), X.abs() + 1)


def test_saving_is_refused_with_the_line_that_is_in_the_way() -> None:
    fast = optimize(with_statistics(Branching()), X.abs(), precision="fp32", budget_s=1.0)
    line = r'because of test_regions\.py:\d+, "out: Tensor = self\.bright\(x\) if x\.mean\(\) > 0 else'
    with pytest.raises(InputError, match=f"a bundle holds a model .* not one graph: .* {line}"):
        fast.save("robot.ampopt")
    with pytest.raises(InputError, match=f"an ONNX file holds a model .* not one graph: .* {line}"):
        fast.export_onnx("model.onnx")


def test_training_moving_and_pickling_are_refused() -> None:
    fast = optimize(with_statistics(Branching()), X.abs())
    for refused in (fast.train, fast.half, lambda: fast.to("meta"), lambda: pickle.dumps(fast)):
        with pytest.raises(InputError, match="an optimized module"):
            refused()
    for copied in (copy.copy, copy.deepcopy, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(InputError, match=r"state_dict\(\) and optimize it again"):
            copied(fast)
    assert fast.eval() is fast


def faster_rcnn() -> nn.Module:
    """A torchvision detector with random weights that finds something."""
    from torchvision.models import detection
    from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
    from torchvision.ops import MultiScaleRoIAlign

    torch.manual_seed(0)
    options: dict[str, Any] = {"box_score_thresh": 0.0, "rpn_score_thresh": 0.0}
    options |= {"box_detections_per_img": 10, "rpn_post_nms_top_n_test": 50}
    options |= {"weights": None, "weights_backbone": None, "min_size": 96}
    model: Any = detection.fasterrcnn_mobilenet_v3_large_320_fpn(**options).eval()
    # A head as that of `keypointrcnn_resnet50_fpn`, whose eight layers of 512 take long.
    model.roi_heads.keypoint_roi_pool = MultiScaleRoIAlign(["0", "1"], output_size=14, sampling_ratio=2)
    model.roi_heads.keypoint_head = KeypointRCNNHeads(256, (32, 32)).eval()
    model.roi_heads.keypoint_predictor = KeypointRCNNPredictor(32, num_keypoints=5)
    generator = torch.Generator().manual_seed(0)
    # Scores that differ by more than rounding, as those of a trained model do.
    nn.init.normal_(model.rpn.head.cls_logits.weight, std=0.3)
    nn.init.normal_(model.roi_heads.box_predictor.cls_score.weight, std=0.01)
    with torch.no_grad():
        randomize_batch_norm(model.backbone, (torch.rand(1, 3, 64, 64, generator=generator),), generator)
    return model  # type: ignore[no-any-return]


def ssd() -> nn.Module:
    """A small one, with a loop over classes."""
    from tests.batched.detectors import detector

    return detector("ssd", 0.0)


@pytest.mark.parametrize("make", [ssd, faster_rcnn])
def test_a_detector_finds_what_it_found(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_the_patched(monkeypatch)
    monkeypatch.setattr("ampopt.system.budget.MARGIN_S", 1e3)  # a busy machine may take long to capture
    pytest.importorskip("torchvision")
    model, generator = make(), torch.Generator().manual_seed(0)
    calls = [[torch.rand(3, *size, generator=generator)] for size in ((96, 128), (128, 96))]
    fast = optimize(model, (calls[0],), budget_s=3.0, precision="fp32")
    assert any(region.startswith("backbone") for region in fast.report.regions)
    assert fast.report.chosen == "fp32", fast.report.notes
    for call in calls:
        with torch.no_grad():
            (found,), (expected,) = fast(call), model(call)
        assert found.keys() == expected.keys()
        assert len(expected["boxes"]) > 1
        assert expected["scores"].std() > 0
        assert torch.equal(found["labels"], expected["labels"])
        # Eager's own error against float64 is up to 4e-4 of a score and 0.02 pixels in these random networks.
        assert ("keypoints" in expected) == (make is faster_rcnn)
        for key, atol in {"boxes": 0.05, "scores": 2e-3, "keypoints": 0.05}.items():
            if key in expected:
                assert torch.allclose(found[key], expected[key], rtol=1e-3, atol=atol), key


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return X.clone()


class OverwritingBranching(Overwriting):
    """One that is no single graph, and whose submodule is optimized."""

    def forward(self, x: Tensor) -> Tensor:
        """Write to a part of the input, convolve what is bright."""
        x[:, 0] = 0.5
        x.clamp_(min=0.0)
        return self.conv(x) if x.sum() > 0 else x


@pytest.mark.parametrize("make", [Overwriting, OverwritingBranching])
@pytest.mark.parametrize("made", [X.clone, in_inference_mode])
@pytest.mark.parametrize("served", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
def test_a_model_that_writes_its_input_does_so_in_every_mode(
    make: Any, made: Any, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_the_patched(monkeypatch)
    model = make().eval()
    with served():
        fast = optimize(model, made(), precision="fp32", cache=False)
        expected, found = made(), made()
        if expected.is_inference() and not torch.is_inference_mode_enabled():
            with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                fast(found)
            with torch.no_grad(), pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                model(expected)
            return
        with contextlib.nullcontext() if torch.is_inference_mode_enabled() else torch.no_grad():
            assert torch.allclose(fast(found), model(expected), atol=1e-5)
        assert torch.equal(found, expected)
        assert not torch.equal(found, X)
    assert isinstance(fast, PartlyOptimizedModule)
    assert list(fast.report.regions) == ["conv"]


def test_a_region_that_fails_runs_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("no time")

    monkeypatch.setattr("ampopt.search.parts_search.optimize_region", failing)
    model = Branching().eval()
    fast = optimize(model, X.abs(), cache=False, precision="fp32")
    assert "submodule bright runs as it was: ZeroDivisionError: no time" in fast.report.notes
    with torch.no_grad():
        assert torch.equal(fast(X.abs()), model(X.abs()))


def test_where_the_comparison_fails_the_original_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> None:
        raise ZeroDivisionError("no samples")

    monkeypatch.setattr("ampopt.search.regions.PartwiseOptimizer._compare", failing)
    model = Branching().eval()
    fast = optimize(model, X.abs(), cache=False)
    assert fast.report.chosen == ORIGINAL
    assert "the original runs: the last comparison failed: ZeroDivisionError: no samples" in fast.report.notes
    with torch.no_grad():
        assert torch.equal(fast(X.abs()), model(X.abs()))
