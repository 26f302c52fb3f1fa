"""One program for a range of sizes: right at every size in it, never used outside, refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampopt.deploy.runtime import OptimizedModule
from ampopt.deploy.sized_program import NoSizedProgramError
from ampopt.errors import StrictError
from ampopt.ir.lane_io import LaneIO
from ampopt.ir.lanes import lanes_for
from ampopt.passes import (
    BakeAutocast,
    ChannelsLast,
    FoldConvBn,
    FuseConvOnednn,
    OnnxRuntime,
    RemoveInferenceNoops,
    Script,
)
from tests.helpers import Model, with_statistics
from tests.support.exporting import run, shapes_of
from tests.support.sized import sized_module

BATCH = {"batch": (1, 8)}


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    return with_statistics(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)))


def conv(function: Any) -> nn.Module:
    torch.manual_seed(0)
    return Model(function, conv=nn.Conv2d(3, 4, 3, padding=1)).eval()


def image(batch: int = 4, height: int = 8, width: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def assert_right(fast: OptimizedModule, model: nn.Module, *inputs: Tensor, error: float = 1e-5) -> None:
    with torch.no_grad():
        expected = model(*inputs)
    found = fast(*inputs)
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert float((found - expected).norm()) <= error * float(expected.norm())


def late(fast: OptimizedModule) -> int:
    """How many programs were made, and calls answered by the original."""
    return fast.health.late_captures + fast.health.served_by_original


RECIPES = {
    "graph": (),
    "rewrites": (RemoveInferenceNoops(), FoldConvBn(), ChannelsLast()),
    "script": (FoldConvBn(), Script()),
    "onnx-runtime": (FoldConvBn(), OnnxRuntime(session=())),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_size_of_the_range_is_right_and_needs_no_other_program(name: str) -> None:
    model = net()
    fast = sized_module(model, image(), dynamic=BATCH, passes=RECIPES[name])
    assert fast.sizes == {"batch": (1, 8)}
    for batch in (8, 1, 2, 3, 4, 5, 6, 7, 1):
        assert_right(fast, model, image(batch))
    assert late(fast) == 0


@pytest.mark.parametrize("name", RECIPES)
def test_two_sizes_may_vary_at_once(name: str) -> None:
    model, ranges = net(), {"height": (6, 20), "width": (5, 12)}
    fast = sized_module(model, image(1), dynamic=ranges, passes=RECIPES[name])
    for height, width in ((6, 5), (6, 12), (20, 5), (20, 12), (7, 11), (13, 6), (8, 8)):
        assert_right(fast, model, image(1, height, width))
    assert late(fast) == 0


def test_a_size_outside_gets_a_program_of_its_own() -> None:
    model = net()
    fast = sized_module(model, image(), dynamic={"batch": (2, 8)})
    for number, batch in enumerate((1, 9, 1), start=1):
        assert_right(fast, model, image(batch))
        assert late(fast) == min(number, 2)
    assert_right(fast, model, image(4, 9))
    assert late(fast) == 3


def test_no_capture_and_no_original_is_needed_within_the_range_where_a_module_is_strict() -> None:
    fast = sized_module(net(), image(), dynamic=BATCH, strict=True, max_captures=0)
    fast(image(7))
    with pytest.raises(StrictError):
        fast(image(9))


def test_a_size_that_is_prepared_has_a_program_of_its_own() -> None:
    model = net()
    fast = sized_module(model, image(), dynamic=BATCH)
    spec = fast._optimized.captured.spec
    fast(image(2))
    assert fast._calls.find([image(2)], spec) is fast._new.in_range
    fast.prepare((2, 3, 8, 8))
    prepared = fast._calls.find([image(2)], spec)
    assert prepared is not fast._new.in_range
    assert_right(fast, model, image(2))
    fast.prepare((2, 3, 8, 8))
    assert fast._calls.find([image(2)], spec) is prepared
    fast(image(3))
    assert fast._calls.find([image(3)], spec) is fast._new.in_range


def test_a_copy_has_the_range_too() -> None:
    model = net()
    fast = copy.deepcopy(sized_module(model, image(), dynamic=BATCH))
    assert fast.sizes == {"batch": (1, 8)}
    assert_right(fast, model, image(6))
    assert late(fast) == 0


def test_other_strides_are_right() -> None:
    model = net()
    fast = sized_module(model, image().to(memory_format=torch.channels_last), dynamic=BATCH)
    for batch in (1, 3, 8):
        assert_right(fast, model, image(batch).to(memory_format=torch.channels_last))
        assert_right(fast, model, image(batch))
        assert_right(fast, model, image(batch).transpose(2, 3))
        assert_right(fast, model, image(2 * batch)[::2])


REFUSED = {
    "branch at one": (lambda m, x: m.conv(x) if x.shape[0] == 1 else 2 * m.conv(x), "wrong at batch 1"),
    "branch within": (lambda m, x: m.conv(x) if x.shape[0] == 5 else 2 * m.conv(x), "torch.export refuses"),
    "branch by order": (lambda m, x: m.conv(x) if x.shape[0] > 5 else 2 * m.conv(x), "torch.export refuses"),
    "hard-coded batch": (lambda m, x: m.conv(x).reshape(4, -1), "torch.export refuses"),
    "number in the result": (lambda m, x: (m.conv(x), x.shape[0]), "a number that depends on the sizes"),
    "fixed table": (lambda m, x: m.conv(x) + torch.ones(4, 1, 1, 1), "torch.export refuses"),
    "a view by the size": (lambda m, x: x.view(x.size(0) * 2, -1), "torch.export refuses"),
    "strides": (lambda m, x: m.conv(x) * x.stride(0), "how tensors lie in memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_one_program_for_all_sizes_is_refused_by_name(name: str) -> None:
    function, reason = REFUSED[name]
    with pytest.raises(NoSizedProgramError) as error:
        sized_module(conv(function), image(), dynamic=BATCH)
    assert reason in str(error.value)


RIGHT = {
    "squeeze": lambda m, x: m.conv(x).mean((1, 2, 3), keepdim=True).squeeze(),
    "mean over the batch": lambda m, x: m.conv(x) - m.conv(x).mean(0, keepdim=True),
    "batch by batch": lambda m, x: m.conv(x).flatten(1) @ m.conv(x).flatten(1).T,
    "sizes as numbers": lambda m, x: m.conv(x) / x.shape[0] + torch.arange(x.shape[0]).view(-1, 1, 1, 1),
    "broadcast": lambda m, x: m.conv(x) + torch.zeros(x.shape[0], 1, 1, 1),
    "a branch outside": lambda m, x: m.conv(x) if x.shape[0] > 20 else 2 * m.conv(x),
}


@pytest.mark.parametrize("engine", ["graph", "onnx-runtime"])
@pytest.mark.parametrize("name", RIGHT)
def test_sizes_that_a_model_computes_with_are_right(name: str, engine: str) -> None:
    model = conv(RIGHT[name])
    passes = (OnnxRuntime(session=()),) if engine == "onnx-runtime" else ()
    fast = sized_module(model, image(), dynamic=BATCH, passes=passes)
    for batch in range(1, 9):
        assert_right(fast, model, image(batch))
    assert late(fast) == 0
    assert_right(fast, model, image(21))


def test_sizes_at_which_the_model_fails_are_named() -> None:
    model = conv(lambda m, x: F.interpolate(m.conv(x)[..., ::2, ::2], scale_factor=2) + m.conv(x))
    with pytest.raises(NoSizedProgramError, match=r"torch.export refuses it|fails at height"):
        sized_module(model, image(1), dynamic={"height": (6, 9)})


def test_a_range_may_be_of_one_size() -> None:
    dynamic = {"batch": (1, 8), "height": (8, 8)}
    model, fast = net(), sized_module(net(), image(), dynamic=dynamic, strict=True)
    for batch in (1, 5, 8):
        assert_right(fast, model, image(batch))
    assert sized_module(net(), image(), dynamic={"batch": (4, 4)}).sizes == {"batch": (4, 4)}


def test_an_engine_that_does_not_take_other_sizes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its form, a pooling to a size has the windows of the example's."""
    monkeypatch.setattr("ampopt.engines.onnx_graph.TO_SIZES", {})
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)).eval()
    with pytest.raises(NoSizedProgramError, match="at height 6"):
        sized_module(model, image(1), dynamic={"height": (6, 20)}, passes=(OnnxRuntime(session=()),))


def test_an_engine_takes_poolings_to_a_size_at_all_of_them() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)).eval()
    fast = sized_module(
        model, image(1), dynamic={"height": (6, 20)}, passes=(OnnxRuntime(session=()),), strict=True
    )
    for height in (6, 9, 20):
        assert_right(fast, model, torch.randn(1, 3, height, image(1).shape[-1]))


def test_inputs_that_share_a_size_have_the_same() -> None:
    model = Model(lambda m, x, y: x @ y.transpose(1, 2)).eval()
    fast = sized_module(model, torch.randn(3, 4, 5), torch.randn(3, 6, 5), dynamic=BATCH, strict=True)
    for batch in (1, 2, 8):
        assert_right(fast, model, torch.randn(batch, 4, 5), torch.randn(batch, 6, 5))
    with pytest.raises(RuntimeError):
        fast(torch.randn(2, 4, 5), torch.randn(3, 6, 5))


def test_sizes_that_the_model_wants_equal_are_not_two_ranges() -> None:
    model = Model(lambda m, x, y: x @ y.transpose(1, 2)).eval()
    ranges = {"inputs_0": {0: (1, 8)}, "inputs_1": {0: (1, 8)}}
    with pytest.raises(NoSizedProgramError, match=r"torch.export refuses"):
        sized_module(model, torch.randn(3, 4, 5), torch.randn(3, 6, 5), dynamic=ranges)


class Counter(nn.Module):
    """Adds the mean of all images so far."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.mean(0)
        return x + self.total


def test_a_state_is_refused_by_name() -> None:
    with pytest.raises(NoSizedProgramError, match="keeps a state in its buffer total"):
        sized_module(Counter().eval(), image(), dynamic=BATCH)


def test_passes_of_one_size_are_left_out() -> None:
    model = net()
    fast = sized_module(model, image(), dynamic=BATCH, passes=(FoldConvBn(), FuseConvOnednn()))
    assert fast._sized is not None
    assert fast._sized.left_out == ("fuse-conv-onednn",)
    assert [step.name for step in fast._sized.program.recipe] == ["fold-conv-bn"]
    assert_right(fast, model, image(7))


def test_mixed_precision_is_right_at_every_size() -> None:
    (lane,) = lanes_for("bf16", torch.device("cpu"), None)
    model = net()
    fast = sized_module(model, image(), dynamic=BATCH, passes=(BakeAutocast(), FoldConvBn()), lane=lane)
    for batch in (1, 2, 5, 8):
        assert_right(fast, model, image(batch), error=0.05)


def test_sizes_that_decide_which_convolutions_are_wrong_below_fp32_are_refused() -> None:
    (lane,) = lanes_for("bf16", torch.device("cpu"), None)
    model, ranges = nn.Conv2d(3, 4, (1, 2), dilation=3, padding=(0, 3)).eval(), {"width": (2, 12)}
    with pytest.raises(NoSizedProgramError, match="at width 2 PyTorch computes conv2d wrongly below FP32"):
        sized_module(model, image(1), dynamic=ranges, passes=(BakeAutocast(),), lane=lane)
    sized_module(model, image(1), dynamic=ranges)


def test_the_dtypes_of_a_lane_stay_at_the_border() -> None:
    (lane,) = lanes_for("bf16", torch.device("cpu"), None)
    model = LaneIO.of_call(net(), (image(),), {}, torch.bfloat16)
    fast = sized_module(model, image().bfloat16(), dynamic=BATCH, passes=(BakeAutocast(),), lane=lane)
    for batch in (1, 2, 8):
        assert_right(fast, model, image(batch).bfloat16(), error=0.05)
    assert late(fast) == 0


def test_the_onnx_file_has_the_range(tmp_path: Path) -> None:
    model, path = net(), tmp_path / "m.onnx"
    fast = sized_module(model, image(), dynamic=BATCH, passes=(FoldConvBn(),))
    assert fast.export_onnx(path).verified
    assert shapes_of(path)["input"] == ["batch", 3, 8, 8]
    for batch in (1, 2, 5, 8):
        found = run(path, image(batch))[0]
        assert np.allclose(found, model(image(batch)).detach().numpy(), atol=1e-5)
    fast.export_onnx(path, dynamic={})
    assert shapes_of(path)["input"] == [4, 3, 8, 8]
