"""Casts that are written into a graph, and calls that are kept out of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.baking import Kept, bake
from ampopt.ir.graph import aten, calls
from ampopt.ir.numerics import relative_error
from tests.helpers import BF16, FP16, Model, dtypes_of, program_of

X = torch.randn(2, 3, 8, 8)


def _two_convs() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()


def test_what_is_baked_needs_no_autocast_and_gives_what_autocast_gives() -> None:
    program = program_of(_two_convs(), X, lane=BF16)
    baked, count = bake(program, "amp")
    assert not baked.under_autocast
    assert count == 4  # a weight and a bias of each; the input is converted at the border
    assert torch.equal(baked.run(X)[0], program.run(X)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["amp", "O1", "O2"])
def test_a_kept_call_computes_in_its_dtype_and_what_follows_stays_in_it(
    dtype: torch.dtype, policy: str
) -> None:
    program = program_of(_two_convs(), X, lane=FP16)
    baked, _ = bake(program, policy, Kept({"conv2d": dtype}))
    found = dtypes_of(baked)
    relu = torch.float16 if policy == "O2" else dtype  # which casts what every operator reads
    assert (found["conv2d"], found["relu"], found["conv2d_1"]) == (dtype, relu, torch.float16)


def test_a_result_is_cast_back_for_all_that_read_it() -> None:
    program = program_of(_two_convs(), X, lane=FP16)
    baked, _ = bake(program, "amp", Kept({"conv2d": torch.float32}, frozenset({"conv2d"})))
    found = dtypes_of(baked)
    assert (found["conv2d"], found["relu"]) == (torch.float32, torch.float16)


def test_the_program_that_is_baked_keeps_no_marks() -> None:
    program = program_of(_two_convs(), X, lane=FP16)
    bake(program, "amp", Kept({"conv2d": torch.float32}))
    again, _ = bake(program, "amp")
    assert {dtypes_of(again)[node.name] for node in calls(again.graph, [aten.conv2d.default])} == {
        torch.float16
    }


def _cell(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    state = torch.zeros(2, 8, dtype=y.dtype)
    for step in y.unbind(1):
        state = m.cell(step, state)
    return state


def _long_cell(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)[:, 0]
    out, state = m.cell(y, (x[:, 1], x[:, 2]))
    return torch.cat([out, state])


def _quantiles(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x).float()
    return torch.quantile(y, torch.tensor([0.1, 0.9]), dim=1)


needs_later_pytorch = pytest.mark.skipif(
    torch.__version__ < "2.14",
    reason=f"torch {torch.__version__} captures no quantiles on CPUs (its issue 173659)",
)


@pytest.mark.parametrize(
    ("function", "cell", "name"),
    [
        (_cell, nn.GRUCell, "gru_cell"),
        (_long_cell, nn.LSTMCell, "getitem"),
        pytest.param(_quantiles, nn.RNNCell, "quantile", marks=needs_later_pytorch),
    ],
)
def test_an_operator_whose_dtypes_no_casts_of_its_inputs_give_stays_in_float32(
    function: Callable[..., Tensor], cell: Callable[[int, int], nn.Module], name: str
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model(function, linear=nn.Linear(8, 8), cell=cell(8, 8)).eval()
        x = torch.randn(2, 4, 8)
    baked, _ = bake(program_of(model, x, lane=BF16), "amp")
    found = dtypes_of(baked)
    assert (found["linear"], found[name]) == (torch.bfloat16, torch.float32)
    with torch.no_grad():
        assert relative_error(baked.run(x)[0], model(x)) < 0.01
