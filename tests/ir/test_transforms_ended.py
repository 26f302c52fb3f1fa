"""A capture that fails within a transform of `torch.func` leaves its thread without that transform."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import ampopt
from ampopt.ir.transforms_ended import transforms_ended


class Derivative(nn.Module):
    """The derivative of each row's layer along ones, which `torch.export` cannot capture."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def along(row: Tensor) -> Tensor:
            return torch.func.jvp(lambda r: self.layer(r).sin(), (row,), (torch.ones_like(row),))[1]  # type: ignore[no-any-return]

        result: Tensor = torch.vmap(along)(x)
        return result


def transforms() -> tuple[int, int]:
    return torch._C._functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level


@pytest.mark.usefixtures("quick")
def test_captures_that_fail_within_vmap_and_jvp_leave_neither() -> None:
    """The graph that TorchDynamo makes of the model begins transforms, which an exporter did not end."""
    model, x = Derivative().eval(), torch.randn(3, 4)
    with torch.no_grad():
        expected = model(x)
    fast = ampopt.optimize(model, x)
    assert transforms() == (0, -1)
    with torch.no_grad():
        assert torch.equal(fast(x), expected)  # it was an error: "Nested forward mode AD is not supported"
        assert torch.equal(model(x), expected)
    assert not nn.Linear(2, 2).requires_grad_(requires_grad=False).weight.requires_grad


def test_transforms_that_surround_the_caller_stay() -> None:
    def within(row: Tensor) -> Tensor:
        before = transforms()
        with transforms_ended():
            torch._C._functorch._vmap_increment_nesting(2, "error")
            torch._C._functorch._grad_increment_nesting()
            assert transforms()[0] == before[0] + 2
        assert transforms() == before
        return row.sin()

    x = torch.randn(3, 2)
    result, tangent, *_ = torch.func.jvp(torch.vmap(within), (x,), (torch.ones_like(x),))
    assert torch.equal(result, x.sin())
    torch.testing.assert_close(tangent, x.cos())
    assert transforms() == (0, -1)


def test_transforms_of_every_kind_are_ended() -> None:
    functions = torch._C._functorch
    with transforms_ended():
        functions._jvp_increment_nesting()
        functions._func_increment_nesting(True)
        functions._vmap_increment_nesting(2, "error")
        functions._grad_increment_nesting()
        functions._vmap_increment_nesting(3, "error")
    assert transforms() == (0, -1)


def test_a_level_of_the_callers_stays() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.full((2,), 3.0))
        with transforms_ended():
            torch._C._functorch._vmap_increment_nesting(2, "error")
        assert torch.equal(forward_ad.unpack_dual(dual * 2).tangent, torch.full((2,), 6.0))
