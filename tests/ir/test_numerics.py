"""How far two tensors are apart, and random inputs to compare on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ampopt.ir.numerics import ResultsRoundedAnew, fresh_draw, relative_error, rounded_anew, widened

INF, NAN = float("inf"), float("nan")


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize(
    ("actual", "reference", "error"),
    [
        (t(1, 2), t(1, 2), 0.0),
        (t(3, 4), t(0, 4), 0.75),
        (t(0, 0), t(3, 4), 1.0),
        (t(3, 4), t(0, 0), 5.0),  # nothing to be relative to: the absolute error
        (t(0, 0), t(0, 0), 0.0),
        (t(1, 2, 3), t(1, 2), INF),
        (t(1, 2).view(1, 2), t(1, 2), INF),
        (t(), t(), 0.0),
        (t(1, NAN), t(1, 2), INF),
        (t(1, 2), t(1, NAN), INF),
        (t(1, NAN), t(1, NAN), 0.0),
        (t(1, INF), t(1, 2), INF),
        (t(1, INF), t(1, -INF), INF),
        (t(1, INF), t(1, INF), 0.0),
        (t(1, NAN), t(1, INF), INF),
        (t(2, NAN), t(1, NAN), 1.0),
        (t(NAN, 1), t(1, NAN), INF),
        (torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 9]), 0.25),
        (torch.tensor([True, False]), torch.tensor([True, True]), 0.5),
        (torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long), 0.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), math.sqrt(2)),
        (torch.tensor(2.0), torch.tensor(1.0), 1.0),
    ],
)
def test_the_relative_error(actual: Tensor, reference: Tensor, error: float) -> None:
    assert relative_error(actual, reference) == pytest.approx(error)


def test_the_error_is_taken_in_float64() -> None:
    reference = torch.full((1000,), 1e30, dtype=torch.float64)
    assert relative_error(reference.float(), reference) < 1e-7
    low = torch.full((10,), 300.0, dtype=torch.float16)
    assert relative_error(low, low.double() * (1 + 1e-6)) == pytest.approx(1e-6, rel=0.01)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.integers(0, 99))
def test_a_fresh_draw_is_like_its_example_but_another(values: list[float], seed: int) -> None:
    example = torch.tensor(values, dtype=torch.float64)
    kept = example.clone()
    drawn = fresh_draw(example, torch.Generator().manual_seed(seed))
    assert torch.equal(example, kept)
    assert (drawn.shape, drawn.dtype) == (example.shape, example.dtype)
    assert torch.isfinite(drawn).all()
    if example.std() > 0:
        assert drawn.min() >= example.min()
        assert drawn.max() <= example.max()


def test_a_fresh_draw_of_indices_is_another_order_of_them() -> None:
    example = torch.arange(12).view(3, 4)
    drawn = fresh_draw(example, torch.Generator().manual_seed(0))
    assert not torch.equal(drawn, example)
    assert torch.equal(drawn.flatten().sort().values, example.flatten())


@pytest.mark.parametrize("example", [torch.zeros(3), torch.tensor(2.0), torch.empty(0, 3), torch.ones(1)])
def test_a_fresh_draw_of_a_constant_is_finite(example: Tensor) -> None:
    drawn = fresh_draw(example, torch.Generator().manual_seed(0))
    assert drawn.shape == example.shape
    assert torch.isfinite(drawn).all()


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "places": Tensor.to_sparse,
    "rows": Tensor.to_sparse_csr,
    "columns": Tensor.to_sparse_csc,
    "blocks": lambda x: x.to_sparse_bsr((2, 2)),
    "packed": Tensor.to_mkldnn,
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("kind", SPARSE)
def test_a_fresh_draw_of_what_is_not_dense_has_other_values_in_the_same_places(kind: str) -> None:
    dense = torch.diag(torch.arange(1.0, 9.0))
    example = SPARSE[kind](dense)
    drawn = fresh_draw(example, torch.Generator().manual_seed(0))
    assert (drawn.layout, drawn.shape, drawn.dtype) == (example.layout, example.shape, example.dtype)
    assert torch.equal(example.to_dense(), dense)
    assert not torch.equal(drawn.to_dense(), dense)
    if kind in ("places", "rows", "columns"):
        assert torch.equal(drawn.to_dense() != 0, dense != 0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_anew_moves_by_at_most_one_rounding(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(1000, dtype=torch.float64, device=device)
    moved = rounded_anew(x, dtype, torch.Generator(device).manual_seed(0))
    assert moved.device == x.device
    assert torch.equal(moved, rounded_anew(x, dtype, torch.Generator(device).manual_seed(0)))
    steps = ((moved - x) / x).abs() / (torch.finfo(dtype).eps / 2)
    assert steps.max() <= 1.0
    assert steps.mean() > 0.4
    assert moved.dtype is x.dtype
    whole = torch.arange(3)
    assert rounded_anew(whole, dtype, torch.Generator()) is whole


def test_both_parts_of_a_complex_number_are_rounded_anew() -> None:
    x = torch.randn(64, dtype=torch.complex64)
    moved = rounded_anew(x.conj(), torch.float16, torch.Generator().manual_seed(0))
    assert moved.dtype is torch.complex64
    for before, after in ((x.real, moved.real), (-x.imag, moved.imag)):
        change = ((after - before) / before).abs()
        assert 0 < float(change.max()) <= torch.finfo(torch.float16).eps / 2 * (1 + 1e-3)
        assert float(change.median()) > 0


def test_what_has_a_fraction_is_widened_and_the_rest_stays() -> None:
    kinds = (torch.float16, torch.float64, torch.complex64, torch.int8, torch.bool)
    found = [widened(torch.ones(2, dtype=dtype)) for dtype in kinds]
    wide = (torch.float64, torch.float64, torch.complex128, torch.int8, torch.bool)
    assert tuple(tensor.dtype for tensor in found) == wide


@pytest.mark.parametrize(("value", "dtype", "most"), [(False, torch.bool, 1), (7, torch.uint8, 255)])
def test_booleans_and_bytes_of_one_value_are_drawn_from_all(
    value: int, dtype: torch.dtype, most: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    example = torch.full((4, 64), value, dtype=dtype).t()
    drawn = fresh_draw(example, generator)
    assert (drawn.dtype, drawn.shape, drawn.stride()) == (dtype, example.shape, example.stride())
    assert drawn.unique().numel() > most // 3
    mixed = example.clone()
    mixed[0, 0] = not value
    assert sorted(fresh_draw(mixed, generator).flatten().tolist()) == sorted(mixed.flatten().tolist())
    assert fresh_draw(example[:0], generator).shape == (0, 4)


def test_integers_of_one_value_stay_so_that_indices_stay_valid() -> None:
    example = torch.full((8,), 5)
    assert torch.equal(fresh_draw(example, torch.Generator()), example)


@pytest.mark.parametrize(
    "sum_of", [torch.sum, torch.mean, lambda x: x.mean((0, 1)), lambda x: x.sum(-1).sum()]
)
def test_sums_whose_terms_cancel_change_as_another_order_changes_them(sum_of: Any) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(13))
    in_turn = float(x.numpy().cumsum()[-1]) / (1 if sum_of(torch.ones(2, 2)) > 1 else x.numel())
    exact, changes = sum_of(x.double()), []
    for seed in range(6):
        with ResultsRoundedAnew(torch.float32, torch.Generator().manual_seed(seed), 0.0):
            changes.append(float((sum_of(x) - exact).abs()))
    assert 0.2 * float((in_turn - exact).abs()) < max(changes) < 1e-4 * float(exact.abs())


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_sums_of_what_is_not_finite_stay_what_they_are(value: float) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = value
    with ResultsRoundedAnew(torch.float32, torch.Generator().manual_seed(0), 16.0):
        moved = x.sum(1), x.mean(), torch.ones(2, 0).mean(1), torch.ones(4, dtype=torch.int64).sum()
    assert torch.allclose(moved[0], x.sum(1), rtol=1e-5, equal_nan=True)
    assert torch.allclose(moved[1], x.mean(), equal_nan=True)
    assert bool(moved[2].isnan().all())
    assert int(moved[3]) == 4
