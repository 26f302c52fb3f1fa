"""What no file can hold is refused before any work, with what to do instead."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import ampopt
from ampopt.deploy import onnx_export
from ampopt.errors import AmpoptError, BundleError, ExportError
from tests.helpers import Model
from tests.support.planted import module_of

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))

COMPLEX: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "output": (lambda m, x: torch.fft.fft2(m.conv(x)), X),
    "inputs_0": (lambda m, x: m.conv(x.real), torch.complex(X, X)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_tensors_cross_no_border_of_onnx(name: str, tmp_path: Path) -> None:
    function, x = COMPLEX[name]
    model = Model(function, conv=nn.Conv2d(3, 4, 3)).eval()
    fast = module_of(model, x)
    for write in (fast.export_onnx, fast.save):
        with pytest.raises(ExportError, match=f"{name}: ONNX has no complex inputs or outputs: .*onnx=None"):
            write(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
    fast.save(tmp_path / "bundle", onnx=None)
    loaded = ampopt.load(tmp_path / "bundle", backend="ampopt", device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))


def test_a_bundle_holds_no_constant(tmp_path: Path) -> None:
    fast = module_of(Model(lambda m: m.conv(torch.ones(1, 3, 8, 8)), conv=nn.Conv2d(3, 4, 3)).eval())
    with pytest.raises(ExportError, match="takes no tensors: a bundle holds a model that does"):
        fast.save(tmp_path / "bundle")
    fast.export_onnx(tmp_path / "model.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.bfloat16, r"not valid ONNX: .*optimize model\.float\(\)"),
        (torch.float64, r"does not run here, and .*optimize model\.float\(\)"),
    ],
)
def test_what_onnx_has_no_operators_for_is_saved_without_it(
    dtype: torch.dtype, said: str, tmp_path: Path
) -> None:
    model, x = nn.Conv2d(3, 4, 3).to(dtype).eval(), X.to(dtype)
    fast = module_of(model, x)
    with pytest.raises(AmpoptError, match=rf"{said}.*save\(…, onnx=None\) writes a bundle without ONNX"):
        fast.save(tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []
    fast.save(tmp_path / "bundle", onnx=None)
    loaded = ampopt.load(tmp_path / "bundle", backend="ampopt", device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))


SIZED_BY_VALUES: dict[str, tuple[Callable[..., Any], str]] = {
    "places": (lambda m, x: m.conv(x).nonzero(), "nonzero"),
    "chosen numbers": (lambda m, x: torch.masked_select(m.conv(x), m.conv(x) > 0), "masked_select"),
    "chosen columns": (lambda m, x: m.conv(x).flatten(2)[0, :, m.conv(x).flatten(2)[0, 0] > 0], "index"),
    "a size within": (lambda m, x: x.new_zeros(m.conv(x).nonzero().shape[0]).sum() + x, "nonzero"),
}


@pytest.mark.parametrize("name", SIZED_BY_VALUES)
def test_a_bundle_holds_no_sizes_that_values_decide(name: str, tmp_path: Path) -> None:
    function, operator = SIZED_BY_VALUES[name]
    fast = module_of(Model(function, conv=nn.Conv2d(3, 4, 3)).eval(), X)
    with pytest.raises(ExportError, match=rf"inputs decide its sizes, at {operator} \(.*\.py:"):
        fast.save(tmp_path / "bundle", onnx=None)
    assert list(tmp_path.iterdir()) == []


class Ring(nn.Module):
    """Keeps results at even places, two at each; `copies`: it writes by `index_copy_`.

    What operators of bits give is a number.
    """

    kept: torch.Tensor
    place: torch.Tensor

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.conv, self.copies = nn.Conv2d(3, 4, 3), copies
        self.register_buffer("kept", torch.zeros(4, 4))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.conv(x).mean((0, 2, 3))
        if self.copies:
            self.kept.index_copy_(0, (self.place % 4 // 2 * 2)[None], result[None])
        else:
            place: Any = (self.place % 4).item()
            self.kept[place & 2] = result
        self.place += 1
        return self.kept.sum(0)


def test_a_place_that_a_value_decides_is_no_size_and_the_advice_that_is_given_helps(tmp_path: Path) -> None:
    place = r"which place the model reads or writes, at remainder \(.*\.py:.*index_copy_"
    with pytest.raises(ExportError, match=place):
        module_of(Ring(copies=False).eval(), X).save(tmp_path / "bundle", onnx=None)
    assert list(tmp_path.iterdir()) == []
    model = Ring(copies=True).eval()
    module_of(model, X).save(tmp_path / "bundle", onnx=None)
    loaded = ampopt.load(tmp_path / "bundle", backend="ampopt", device="cpu")
    with torch.no_grad():
        for x in (X, 2 * X):
            torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.parametrize("code", [errno.EFBIG, errno.ENOSPC])
def test_a_disk_that_does_not_take_the_onnx_model_is_told_of_the_bundle(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(model: Any, path: Path) -> NoReturn:
        raise OSError(code, "it does not fit", str(path))

    monkeypatch.setattr(onnx_export, "write_model", write)
    with pytest.raises(
        BundleError, match=r"the bundle '.*/robot' cannot be saved: it does not fit"
    ) as caught:
        module_of(nn.Conv2d(3, 4, 3).eval(), X).save(tmp_path / "robot")
    assert "onnx=None" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_for_temporary_files_the_bundle_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(BundleError, match=r"the bundle '.*/robot' cannot be saved: No such file .*gone"):
        module_of(nn.Conv2d(3, 4, 3).eval(), X).save(tmp_path / "robot")
