"""Mixed precision taken out of a program again: unrounded weights, float32 throughout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampopt.ir.widening import widened
from ampopt.passes import BakeAutocast, FoldConvBn
from tests.helpers import BF16, Model, dtypes_of, program_of, several_kinds

X = torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(0))


def test_a_baked_program_is_the_float32_one_again() -> None:
    model = several_kinds()
    baked = program_of(model, X, lane=BF16, on_top_of=[BakeAutocast(), FoldConvBn()])
    assert torch.bfloat16 in dtypes_of(baked).values()
    wide = widened(baked)
    assert torch.bfloat16 not in dtypes_of(wide).values()
    assert wide.lane == BF16
    assert torch.bfloat16 in dtypes_of(baked).values()  # it is untouched
    with torch.no_grad():
        expected = model(X)
    error = (wide.run(X)[0].float() - expected).norm() / expected.norm()
    assert error < (1e-6 if wide.exit[0].dtype is torch.float32 else 2**-8)
    plain = program_of(model, X, on_top_of=[FoldConvBn()])
    weights = [sorted(float(w.double().sum()) for w in p.graph.buffers()) for p in (wide, plain)]
    assert weights[0] == pytest.approx(weights[1], rel=1e-6)


def test_what_the_model_stores_in_low_precision_is_widened_as_it_is() -> None:
    model = Model(lambda m, x: x * m.scale.weight.float(), scale=nn.Linear(4, 4).to(torch.bfloat16)).eval()
    x = torch.randn(4, 4)
    wide = widened(program_of(model, x, lane=BF16, on_top_of=[BakeAutocast()]))
    assert set(dtypes_of(wide).values()) == {torch.float32}
    with torch.no_grad():
        assert torch.equal(wide.run(x)[0], model(x))
