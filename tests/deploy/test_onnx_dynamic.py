"""Dynamic dimensions take other sizes and have the user's names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.deploy.onnx_dynamic import doubled, one_more, ones
from ampopt.errors import ExportError, InputError, VerificationError
from tests.helpers import Model
from tests.support.exporting import conv_bn, export, run, shapes_of
from tests.support.planted import captured_of


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


SIZES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "padded to a multiple": lambda x, h: F.pad(x, (0, 0, 0, -(-h // 8) * 8 - h)),
    "cut at a quarter, rounded up": lambda x, h: x[:, :, : -(-(h + 8) // 4)],
    "a negative quotient": lambda x, h: x + (5 - h) // 3,
    "a negative remainder": lambda x, h: x + -h % 7,
    "by a negative size": lambda x, h: x + h // (3 - h),
    "a ratio rounded up": lambda x, h: F.pad(x, (0, 0, 0, math.ceil(h / 8) * 8 - h)),
    "ratios rounded": lambda x, h: x + math.floor(-h / 3) + math.trunc(h / 5),
    "a quotient and a ratio": lambda x, h: x * (h / 10) + h // 3,
}


@pytest.mark.parametrize("name", SIZES)
def test_arithmetic_on_sizes_is_pythons_at_every_size(name: str, tmp_path: Path) -> None:
    """At the example's size, a multiple of 8, some of them are right by chance."""
    function, path = SIZES[name], tmp_path / "m.onnx"
    export(Model(lambda m, x: function(x, x.shape[2])), path, dynamic={"inputs_0": {2: "height"}})
    for height in range(9, 34):
        x = torch.randn(1, 4, height, 24)
        expected, found = function(x, height), run(path, x)[0]
        assert found.shape == tuple(expected.shape), height
        assert np.allclose(found, expected, atol=1e-5), height


FLOATS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a range": lambda x, h: torch.arange(0.0, h * 0.1, 0.1) + x.sum(),
    "a quotient": lambda x, h: x + h * 0.1 // 0.1,
    "a remainder": lambda x, h: x + h * 0.1 % 0.1,
    "a product rounded up": lambda x, h: x + math.ceil(h * 0.1 / 0.1),
}


@pytest.mark.parametrize("name", FLOATS)
def test_what_a_size_decides_in_floating_point_is_refused(name: str, tmp_path: Path) -> None:
    """9 * 0.1 // 0.1 is 8 in Python's float64, and 9 in ONNX's float32."""
    function = FLOATS[name]
    with pytest.raises(ExportError, match=r"float32, and Python in float64.*export with static shapes"):
        export(
            Model(lambda m, x: function(x, x.shape[2])),
            tmp_path / "m.onnx",
            dynamic={"inputs_0": {2: "rows"}},
        )
    assert not list(tmp_path.iterdir())


class PadsOdd(nn.Module):
    """Another branch for odd sizes, of which a capture at an even one has none."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(2) if x.shape[2] % 2 == 0 else x.mean(2) + 1


def test_a_file_is_verified_at_sizes_that_are_no_multiples(tmp_path: Path) -> None:
    with pytest.raises((ExportError, VerificationError)):
        export(PadsOdd(), tmp_path / "m.onnx", dynamic={"x": {2: "rows"}})
    assert not list(tmp_path.iterdir())


def test_a_size_that_the_model_does_not_take_is_not_asked_for(tmp_path: Path) -> None:
    def even(m: Any, x: Tensor) -> Tensor:
        return torch.cat([F.interpolate(F.max_pool2d(x, 2), scale_factor=2.0), x], 1)

    path = tmp_path / "m.onnx"
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        even(None, torch.randn(1, 4, 17, 24))
    export(Model(even), path, dynamic={"inputs_0": {2: "rows"}})
    assert run(path, torch.randn(1, 4, 20, 24))[0].shape == (1, 8, 20, 24)


def test_the_other_sizes_are_multiples_and_one_more_and_odd_for_a_batch_of_one() -> None:
    model, captured = captured_of(Model(lambda m, x: x * 2), torch.randn(1, 4, 6))
    dims = ({0: "batch", 2: "width"},)
    more = one_more(model, captured, dims)
    assert more is not None
    shapes = [tuple(each.program.examples[0].shape) for each in (doubled(captured, dims), more)]
    assert shapes == [(2, 4, 12), (3, 4, 7)]
    fixed, captured = captured_of(Model(lambda m, x: x + m.w, w=torch.randn(1, 4, 6)), torch.randn(1, 4, 6))
    assert one_more(fixed, captured, dims) is None


ALONE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "another branch": lambda m, x: m.conv(x) * (3 if x.shape[0] == 1 else 2),
    "a size that only one has not": lambda m, x: m.conv(x)[:2].flatten(0, 1),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_file_that_is_wrong_for_a_batch_of_one_is_not_written(name: str, tmp_path: Path) -> None:
    """A capture takes every size for another than 1, and the example has 4."""
    model = Model(ALONE[name], conv=nn.Conv2d(3, 4, 3, padding=1))
    with pytest.raises(VerificationError, match=r"of \[1, 3, 8, 6\]"):
        export(model, tmp_path / "m.onnx", torch.randn(4, 3, 8, 6), dynamic="batch")
    assert not list(tmp_path.iterdir())


def test_each_open_size_is_one_alone_where_it_is_not_and_the_model_takes_that() -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.max_pool2d(x, (1, 2)) + y.mean()

    model, captured = captured_of(Model(forward), torch.randn(4, 3, 8, 6), torch.randn(4, 1))
    dims = ({0: "batch", 2: "height", 3: "width"}, {0: "batch", 1: "more"})
    shapes = [[tuple(e.shape) for e in each.program.examples] for each in ones(model, captured, dims)]
    assert shapes == [[(1, 3, 8, 6), (1, 1)], [(4, 3, 1, 6), (4, 1)]]


RESIZES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "upsample_nearest2d": lambda m, x: F.interpolate(m.conv(x), size=(int(x.shape[2] * 0.3) + 1, 7)),
}


@pytest.mark.parametrize("name", RESIZES)
def test_a_file_that_is_wrong_at_other_sizes_names_these_and_what_has_one_size(
    name: str, tmp_path: Path
) -> None:
    model = Model(RESIZES[name], conv=nn.Conv2d(3, 4, 3, padding=1))
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    said = rf"of \[1, 3, 16, 16\], over .*; sizes vary, and its {name} \(\w+.py:\d+\) may have"
    with pytest.raises(VerificationError, match=said):
        export(model, tmp_path / "model.onnx", x, dynamic={"inputs_0": {2: "height", 3: "width"}})
    assert list(tmp_path.iterdir()) == []
