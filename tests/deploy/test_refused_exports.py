"""What no file can hold is refused before any work, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampopt
from ampopt.errors import AmpoptError, ExportError
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
    [(torch.bfloat16, "not valid ONNX: .*optimize model.float()"), (torch.float64, "does not run here, and")],
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
