"""What a model writes to memory that it asks for is in a bundle, and no memory that nothing has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ampopt
from ampopt.bundle.written_memory import with_written_memory
from ampopt.errors import ExportError
from ampopt.ir.graph import aten
from tests.helpers import Model, program_of, targets_of
from tests.support.planted import module_of

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def halves(m: Any, x: Tensor) -> Tensor:
    out = torch.empty(2, 8)
    out[:, :4], out[:, 4:] = x, x * 2
    return out


def integers(m: Any, x: Tensor) -> Tensor:
    out = torch.empty(4, dtype=torch.int64)
    out[:2], out[2:] = x[:, 0] > 0, 3
    return out


def booleans(m: Any, x: Tensor) -> Tensor:
    out = x.new_empty((2, 4), dtype=torch.bool)
    out[0], out[1] = x[0] > 0, x[1] < 1
    return out


def alike(m: Any, x: Tensor) -> Tensor:
    out = torch.empty_like(x, dtype=torch.float64)
    out[:, ::2], out[:, 1::2] = x[:, ::2], x[:, 1::2] * 2
    return out


FILLED: dict[str, tuple[Callable[..., Tensor], object]] = {
    "empty": (halves, aten.full.default),
    "empty, integers": (integers, aten.full.default),
    "new_empty": (booleans, aten.new_full.default),
    "empty_like": (alike, aten.full_like.default),
}


@pytest.mark.parametrize("name", FILLED)
def test_memory_that_is_written_is_filled_before(name: str) -> None:
    function, filling = FILLED[name]
    program = program_of(Model(function), X)
    before = program.graph.code
    changed = program.with_graph(with_written_memory(program.graph))
    assert program.graph.code == before
    assert not any("empty" in str(target) for target in targets_of(changed))
    assert filling in targets_of(changed)
    (found,), (expected,) = changed.run(X), program.run(X)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert with_written_memory(changed.graph) is changed.graph


@pytest.mark.parametrize("name", FILLED)
def test_a_bundle_holds_what_is_written(name: str, tmp_path: Path) -> None:
    model = Model(FILLED[name][0]).eval()
    module_of(model, X).save(tmp_path / "bundle", onnx=None)
    loaded = ampopt.load(tmp_path / "bundle", backend="ampopt", device="cpu")
    for x in (X, -X):
        assert torch.equal(loaded(x), model(x))


def test_memory_with_another_layout_is_refused(tmp_path: Path) -> None:
    def innermost(m: Any, x: Tensor) -> Tensor:
        out = torch.empty((1, 2, 2, 2), memory_format=torch.channels_last)
        out[:] = x.view(1, 2, 2, 2)
        return out

    with pytest.raises(ExportError, match=r"empty.*nothing has written"):
        module_of(Model(innermost).eval(), X).save(tmp_path / "bundle", onnx=None)
