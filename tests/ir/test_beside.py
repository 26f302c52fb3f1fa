"""Every call of a graph alone, beside float64: its error, its values, and what reaches the outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.baking import bake
from ampopt.ir.beside import Seen, contributions, exact_outputs, observe
from ampopt.ir.program import Program
from tests.helpers import BF16, FP16, Model, program_of, reference_of, several_kinds

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def baked(model: nn.Module, *inputs: Tensor, lane: Any = FP16) -> Program:
    return bake(program_of(model.eval(), *inputs, lane=lane), "amp")[0]


@pytest.mark.parametrize("lane", [FP16, BF16])
def test_the_outputs_in_float64_are_the_models(lane: Any) -> None:
    model = several_kinds()
    (expected,) = reference_of(model, [X])
    (found,) = exact_outputs(baked(model, X, lane=lane), [X])
    assert torch.allclose(found, expected, rtol=1e-12)


def test_a_dtype_argument_does_not_lower_the_reference() -> None:
    model = Model(lambda m, x: torch.softmax(x, -1, dtype=torch.float32).to(torch.float16).float() * 3)
    (found,) = exact_outputs(program_of(model, X), [X])
    assert torch.allclose(found, 3 * X.double().softmax(-1), rtol=1e-12)


def test_complex_numbers_between_real_ones_are_rounded_as_the_graph_does() -> None:
    """Their magnitudes were in float64, which no product in float16 takes."""

    def spectrum(m: Any, x: Tensor) -> Any:
        return m.b((torch.fft.rfft(m.a(x)) * m.filter).abs())

    factors = torch.randn(9, dtype=torch.complex64)
    model = Model(spectrum, a=nn.Linear(16, 16), b=nn.Linear(9, 4), filter=factors)
    program = baked(model, X[0, 0])
    (exact,), (found,) = exact_outputs(program, [X[0, 0]]), program.run(X[0, 0])
    assert exact.dtype is torch.float64
    assert 0 < torch.linalg.vector_norm(found - exact) / torch.linalg.vector_norm(exact) < 1e-2
    seen = observe(program, [(X[0, 0],)])
    assert seen["abs_1"].gives == {torch.float32}
    assert 0 < seen["abs_1"].error < 1e-6


@pytest.fixture
def _two_threads() -> Iterator[None]:
    """From two threads on oneDNN computes transposed convolutions in float32."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_a_result_without_elements_is_not_asked_for_in_float64() -> None:
    """Whose kernels refuse some that float32's give; those of float16 do on some processors, too."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            empty = m.conv(x)
        return m.linear(x), empty

    x = torch.randn(2, 4, 2, 7)
    conv = nn.ConvTranspose2d(4, 4, 1, padding=(1, 0))
    model = Model(forward, linear=nn.Linear(7, 3), conv=conv)
    assert model(x)[1].shape == (2, 4, 0, 7)
    with pytest.raises(RuntimeError, match="Output size is too small"):
        copy.deepcopy(model).double()(x.double())
    program = baked(model, x)
    exact, empty = exact_outputs(program, [x])
    assert exact.dtype is empty.dtype is torch.float64
    assert empty.shape == (2, 4, 0, 7)
    assert contributions(program, [(x,)]).keys() == {"_to_copy_default", "linear"}


def test_the_largest_value_is_that_of_float64_where_the_call_overflows() -> None:
    linear = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        linear.weight.fill_(10_000.0)
    seen = observe(
        baked(nn.Sequential(linear, nn.ReLU()), torch.full((1, 4), 3.0)), [(torch.full((1, 4), 3.0),)]
    )
    assert seen["linear"].largest == 120_000
    assert seen["linear"].overflows
    assert seen["relu"].largest == 120_000
    assert not seen["relu"].overflows, "an infinity that it reads is not its own"
    assert seen["relu"].largest_read == 120_000
    assert seen["linear"].gives == {torch.float16}


def test_a_call_that_rounds_nothing_has_no_error() -> None:
    seen = observe(baked(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)), X), [(X,)])
    assert 1e-5 < seen["conv2d"].error < 1e-3
    assert seen["relu"].error == seen["max_pool2d"].error == 0.0


def test_what_is_seen_on_several_inputs_is_the_worst_of_each() -> None:
    a, b = Seen(1.0, 5.0, 0.1, True, frozenset({torch.float16})), Seen(2.0, 3.0, 0.2, False)
    assert a.joined(b) == Seen(2.0, 5.0, 0.2, True, frozenset({torch.float16}))


def _scaled(factor: float) -> Callable[..., Any]:
    return lambda m, x: m.last(m.a(x).relu() * factor + m.b(x).relu())


def test_contributions_follow_what_reaches_the_outputs() -> None:
    """A branch that is scaled down a thousandfold contributes about a thousandth."""
    torch.manual_seed(0)
    a, b, last = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
    b.load_state_dict(a.state_dict())
    shares = contributions(baked(Model(_scaled(1e-3), a=a, b=b, last=last), X), [(X,)])
    assert 1e-4 < shares["conv2d"] / shares["conv2d_1"] < 1e-2
    assert shares["conv2d_1"] > 1e-5


def test_contributions_add_up_to_about_the_error_of_the_whole() -> None:
    torch.manual_seed(0)
    convs = [nn.Sequential(nn.Conv2d(3 if k == 0 else 8, 8, 3, padding=1), nn.Tanh()) for k in range(5)]
    model = nn.Sequential(*convs)
    program = baked(model, X)
    (expected,), (got,) = exact_outputs(program, [X]), program.run(X)
    error = float((got.double() - expected).norm() / expected.norm())
    total = sum(share**2 for share in contributions(program, [(X,)]).values()) ** 0.5
    assert 0.5 < total / error < 2.0


def test_several_results_of_one_call_are_compared_each() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y, z = m.conv(x).split(4, 1)
        return y.relu() + z

    seen = observe(baked(Model(function, conv=nn.Conv2d(3, 8, 3)), X), [(X,)])
    assert any(name.startswith("getitem") for name in seen)
    assert all(found.error < 1e-2 for found in seen.values())
