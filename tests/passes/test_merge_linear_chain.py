"""merge-linear-chain: adjacent linear layers become one, and only those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.engines.executable import executable
from ampopt.ir.lanes import FP32
from ampopt.measure.verify import Verifier
from ampopt.passes import BakeAutocast, MergeLinearChain
from tests.helpers import (
    BF16,
    FP16,
    Model,
    check_pass,
    eager_of,
    error_of,
    largest_error,
    program_of,
    reference_of,
)
from tests.support.planted import captured_of


def test_a_chain_becomes_one_layer() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    result = check_pass(
        MergeLinearChain(), model, torch.randn(3, 8), rewrites=4, elsewhere=[torch.randn(7, 8)]
    )
    assert sum(node.op == "call_function" for node in result.program.graph.graph.nodes) == 1


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True), (False, False)])
def test_any_of_the_biases_may_be_missing(first: bool, second: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 8, bias=first), nn.Linear(8, 5, bias=second))
    check_pass(MergeLinearChain(), model, torch.randn(2, 4, 6), rewrites=1)


def test_a_nonlinearity_ends_a_chain() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    check_pass(MergeLinearChain(), model, torch.randn(3, 8), rewrites=2)


def test_a_shared_layer_is_merged_at_each_of_its_calls() -> None:
    model = Model(lambda m, x: m.a(m.a(m.a(x))), a=nn.Linear(6, 6))
    check_pass(MergeLinearChain(), model, torch.randn(3, 6), rewrites=2)


@pytest.mark.parametrize(
    ("function", "members", "reason"),
    [
        (
            lambda m, x: m.b(y := m.a(x)) + y,
            {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)},
            "linear has other readers",
        ),
        (lambda m, x: m.b(m.a(x)), {"a": nn.Linear(32, 2), "b": nn.Linear(2, 32)}, "more weights than both"),
        (
            lambda m, x: nn.functional.linear(m.a(x), x[:, :8]),
            {"a": nn.Linear(8, 8)},
            "one of the weights is computed",
        ),
    ],
    ids=["other readers", "bottleneck", "computed weight"],
)
def test_it_declines(
    function: Callable[[Any, Tensor], Tensor], members: dict[str, nn.Module], reason: str
) -> None:
    width = 32 if "more weights" in reason else 8
    result = check_pass(MergeLinearChain(), Model(function, **members), torch.randn(4, width), rewrites=0)
    assert reason in result.declined[0].reason


def _complex(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex64)


def test_complex_layers_keep_their_imaginary_parts() -> None:
    members = {"a": _complex(4, 4), "c": _complex(4), "b": _complex(4, 4), "d": _complex(4)}
    model = Model(lambda m, x: F.linear(F.linear(x, m.a, m.c), m.b, m.d), **members)
    result = check_pass(MergeLinearChain(), model, x := _complex(3, 4), rewrites=1)
    assert torch.allclose(result.program.run(x)[0], model(x), atol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (1, 4), (4, 4)])
def test_a_bias_may_be_of_any_shape_that_its_layer_takes(shape: tuple[int, ...]) -> None:
    """[4, 4] is one for each row, which is none of the features."""
    bias = torch.randn(shape)
    model = Model(lambda m, x: m.b(F.linear(x, m.a, m.c)), a=torch.randn(4, 4), c=bias, b=nn.Linear(4, 4))
    check_pass(MergeLinearChain(), model, torch.randn(4, 4), rewrites=1)


@pytest.mark.parametrize("decide", [torch.sign, lambda y: torch.where(y > 0, 1.0, -1.0)])
def test_where_an_infinity_becomes_another_number_nothing_is_merged(
    decide: Callable[[Tensor], Tensor],
) -> None:
    """The layers make NaN of it, their product an infinity: in one of many rows that is not seen."""
    model = Model(lambda m, x: decide(m.b(m.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    result = MergeLinearChain().apply(program_of(model, x := torch.randn(4, 6)))
    x[1, 2] = torch.inf
    assert torch.equal(result.program.run(x)[0], model(x))
    assert "may take another infinity, or none, for another value" in result.declined[0].reason


@pytest.mark.parametrize("shape", [(), (1,), (1, 4), (4, 1), (4, 4)])
def test_the_last_layers_bias_stays_of_its_shape_where_that_is_no_row(shape: tuple[int, ...]) -> None:
    """[4, 1], with as many numbers as there are features, is one for each row."""
    members = {"a": torch.randn(3, 6), "b": torch.randn(4, 3), "c": torch.randn(shape)}
    model = Model(lambda m, x: F.linear(F.linear(x, m.a), m.b, m.c), **members)
    check_pass(MergeLinearChain(), model, torch.randn(4, 6), rewrites=1)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 3)])
def test_a_bias_of_one_row_is_one_for_each_feature_of_the_product(shape: tuple[int, ...]) -> None:
    """PyTorch adds a matrix of one row to a vector of several features, but not to one of a single one."""
    members = {"a": torch.randn(4, 3), "c": torch.randn(1, 4), "b": torch.randn(1, 4)}
    model = Model(lambda m, x: F.linear(F.linear(x, m.a, m.c), m.b), **members)
    result = check_pass(MergeLinearChain(), model, torch.randn(shape), rewrites=1)
    assert result.program.graph.linear_1_bias.shape == (1,)


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        pytest.param(torch.randn(3), torch.randn(5, 4), "no matrix", id="first a vector"),
        pytest.param(torch.randn(4, 3), torch.randn(4), "no matrix", id="second a vector"),
        pytest.param(torch.full((4, 3), 2**40), torch.full((5, 4), 2**40), "integers", id="integers"),
        pytest.param(torch.full((4, 3), 1e30), torch.full((5, 4), 1e30), "cannot hold", id="overflow"),
    ],
)
def test_weights_without_a_product_are_left_alone(a: Tensor, b: Tensor, reason: str) -> None:
    model = Model(lambda m, x: F.linear(F.linear(x, m.a), m.b), a=a, b=b)
    program = program_of(model, torch.ones(4, 3, dtype=a.dtype))
    result = MergeLinearChain().apply(program)
    assert result.rewrites == 0
    assert reason in result.declined[0].reason


def test_a_product_that_the_lower_precision_cannot_hold_is_left_alone() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    for layer in (first, second):
        layer.weight.data.fill_(200.0)
    model, x = nn.Sequential(first, second), torch.randn(3, 8)
    assert MergeLinearChain().apply(program_of(model, x)).rewrites == 1
    program = program_of(model, x, lane=FP16, on_top_of=(BakeAutocast(),))
    assert MergeLinearChain().apply(program).rewrites == 0


def test_in_lower_precision_the_merged_layer_is_rounded_once() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    x = torch.randn(5, 64)
    program = program_of(model, x, lane=BF16, on_top_of=(BakeAutocast(),))
    merged = MergeLinearChain().apply(program).program
    own = largest_error(eager_of(model, [x], BF16), reference_of(model, [x]))
    assert error_of(merged, model, [x]) < own


def test_the_check_catches_factors_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampopt.passes import merge_linear_chain

    right = merge_linear_chain._merge

    def swapped(module: Any, first: Any, second: Any) -> None:
        first.args, second.args = (first.args[0], *second.args[1:]), (second.args[0], *first.args[1:])
        right(module, first, second)

    monkeypatch.setattr(merge_linear_chain, "_merge", swapped)
    with pytest.raises(AssertionError):
        check_pass(
            MergeLinearChain(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8), rewrites=1
        )


def test_an_infinity_of_which_eager_makes_nan_and_it_a_number_is_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 3), nn.ReLU()).eval()
    original, captured = captured_of(model, torch.randn(10))
    merged = executable(MergeLinearChain().apply(captured.program).program)
    check = Verifier(original, captured).check(merged, FP32)
    assert "with infinity in one element" in str(check.reason)
    check = Verifier(original, captured, faults="ignore").check(merged, FP32)
    assert check.passed
