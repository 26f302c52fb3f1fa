"""How far another order of its terms may change a sum: as far as an order that an engine may have does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ampopt.ir.order_of_sums import aten, uncertainty

N = 6144
LANES = 16


def drawn(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if kind == "equal":
        return torch.full((N,), 4.37)
    x = torch.rand(N, generator=generator) if kind == "of one sign" else torch.randn(N, generator=generator)
    return x - x.double().mean().float() if kind == "cancelling" else x


def in_lanes(terms: Tensor) -> float:
    """A sum in float32 as a processor makes it: 16 sums, term by term, and their sum."""
    return float(terms.numpy().reshape(-1, LANES).cumsum(0)[-1].cumsum()[-1])


def sums(x: Tensor) -> dict[str, tuple[Any, tuple[Any, ...], float]]:
    """Operators of a row, their arguments, and the result as that order makes it."""
    ones, square = torch.ones(N), (x - x.mean()).square()
    return {
        "sum": (aten.sum.default, (x,), in_lanes(x)),
        "sum of a row": (aten.sum.dim_IntList, (x[None], [1]), in_lanes(x)),
        "mean": (aten.mean.default, (x,), in_lanes(x) / N),
        "mean of a row": (aten.mean.dim, (x[None], [1]), in_lanes(x) / N),
        "running sum": (aten.cumsum.default, (x, 0), in_lanes(x)),
        "variance": (aten.var.correction, (x,), in_lanes(square) / (N - 1)),
        "product": (aten.mm.default, (x[None], ones[:, None]), in_lanes(x)),
        "dot product": (aten.dot.default, (x, ones), in_lanes(x)),
        "squared distance": (aten.mse_loss.default, (x, torch.zeros(N)), in_lanes(x.square()) / N),
        "its sum": (aten.mse_loss.default, (x, torch.zeros(N), 2), in_lanes(x.square())),
    }


KINDS = ("of any sign", "cancelling", "of one sign", "equal")
PAIRS = [
    (name, kind)
    for name in sums(torch.ones(N))
    for kind in KINDS
    if kind != "equal" or "product" not in name  # whose terms are not looked at
]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_it_covers_the_order_of_a_processor_and_not_much_more(name: str, kind: str) -> None:
    x = drawn(kind)
    func, args, in_another_order = sums(x)[name]
    exact = func(*(each.double() if isinstance(each, Tensor) else each for each in args))
    found = uncertainty(func, func(*args), args, {}, repeats=True)
    assert found is not None
    assert found.shape == exact.shape
    last, most = float(exact.flatten()[-1]), float(found.flatten()[-1])
    assert abs(in_another_order - last) <= 4 * most  # of which verification takes a multiple of 4
    root = float(x.double().square().mean().sqrt())
    assert most < 2e-5 * max(abs(last), N * root if "mean" not in name else root)


def test_the_deviation_is_that_of_the_variance() -> None:
    for x in (drawn("of one sign"), torch.full((N,), 4.37)):
        squares, root = (
            uncertainty(func, func(x), (x,), {}, repeats=True)
            for func in (aten.var.correction, aten.std.correction)
        )
        assert squares is not None
        assert root is not None
        deviation = float(x.double().std())
        assert float(root) == pytest.approx((deviation**2 + float(squares)) ** 0.5 - deviation, rel=1e-2)
    equal = torch.full((2, N), 4.37)
    kept = {"correction": 1, "keepdim": True}
    result = aten.var.correction(equal, [1], **kept)
    found = uncertainty(aten.var.correction, result, (equal, [1]), kept, repeats=True)
    assert found is not None
    assert found.shape == (2, 1)


def test_a_bias_is_no_term_and_a_factor_is_one() -> None:
    x, y, bias = torch.randn(2, 5), torch.randn(5, 3), torch.full((3,), 1e6)
    plain = uncertainty(aten.mm.default, x @ y, (x, y), {}, repeats=False)
    result = torch.addmm(bias, x, y, alpha=-2)
    found = uncertainty(aten.addmm.default, result, (bias, x, y), {"alpha": -2}, repeats=False)
    assert plain is not None
    assert found is not None
    assert torch.equal(found, 2 * plain)


def test_of_terms_that_are_0_there_is_nothing_to_round() -> None:
    few = torch.zeros(N)
    few[::1000] = 1.0
    dense = uncertainty(aten.sum.default, torch.tensor(6144.0), (torch.ones(N),), {}, repeats=False)
    sparse = uncertainty(aten.sum.default, few.sum(), (few,), {}, repeats=False)
    assert dense is not None
    assert sparse is not None
    assert float(sparse) < float(dense) / 500
    assert float(sparse) == pytest.approx(few.sum() * (1 + 7**0.5 / 8) * 2**-24)


@pytest.mark.parametrize(
    ("terms", "repeat"),
    [
        (torch.full((64,), 0.3), True),
        (torch.full((64,), 0.3) * (1 + 1e-7 * torch.arange(64)), True),  # rounded otherwise here and there
        (torch.tensor([0.3, 0.7]).repeat(32), True),
        (torch.linspace(0.3, 0.7, 64), False),
        (torch.tensor([0.3] + [0.0] * 63), False),
    ],
)
def test_what_repeats_itself_may_round_to_the_same_side(terms: Tensor, repeat: bool) -> None:
    with_it, without = (
        uncertainty(aten.sum.default, terms.sum(), (terms,), {}, repeats=each) for each in (True, False)
    )
    assert with_it is not None
    assert without is not None
    assert bool(with_it > without) is repeat


def test_a_sum_in_float64_has_float64s_roundings() -> None:
    x = torch.randn(100)
    single = uncertainty(aten.sum.default, x.sum(), (x,), {}, repeats=False)
    double = uncertainty(
        aten.sum.default, x.sum(dtype=torch.float64), (x,), {"dtype": torch.float64}, repeats=False
    )
    assert single is not None
    assert double is not None
    assert float(double / single) == pytest.approx(2**-29)


OTHERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "integers that were numbers": (aten.quantize_per_tensor.default, (torch.ones(3), 0.1, 0, torch.qint8)),
    "an activation": (aten.relu.default, (torch.ones(3),)),
    "integers": (aten.sum.default, (torch.ones(3, dtype=torch.int64),)),
    "complex numbers": (aten.sum.default, (torch.ones(3, dtype=torch.complex64),)),
    "numbers that are not dense": (aten.sum.default, (torch.ones(3).to_sparse(),)),
    "several results": (aten.var_mean.correction, (torch.ones(3),)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators_have_none(name: str) -> None:
    func, args = OTHERS[name]
    assert uncertainty(func, func(*args), args, {}, repeats=True) is None


def test_numbers_that_are_not_finite_have_none() -> None:
    x = torch.tensor([1.0, np.inf])
    found = uncertainty(aten.sum.default, x.sum(), (x,), {}, repeats=True)
    assert found is not None
    assert float(found) == 0.0


def test_squares_that_are_not_summed_are_certain() -> None:
    given = (torch.ones(3), torch.zeros(3), 0)
    found = uncertainty(aten.mse_loss.default, aten.mse_loss.default(*given), given, {}, repeats=True)
    assert found is not None
    assert float(found.abs().max()) == 0.0


def test_a_product_whose_terms_cancel_is_not_as_uncertain_as_one_of_one_sign() -> None:
    x, y = torch.randn(1, 100_352), torch.randn(100_352, 1)
    mixed, same = (
        uncertainty(aten.mm.default, a @ b, (a, b), {}, repeats=False)
        for a, b in ((x, y), (x.abs(), y.abs()))
    )
    assert mixed is not None
    assert same is not None
    assert float(same) > 10 * float(mixed)
