"""What code can tell of a call's tensors besides their values: their classes, and attributes of theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import CaptureError, InputError
from tests.deploy.test_runtime_calls import check
from tests.helpers import Model
from tests.support.planted import module_of

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Image(Tensor):
    """Results have this class, too."""


def test_a_tensor_of_another_class_is_answered_in_it() -> None:
    model = Model(lambda m, x: x + 1)
    fast = module_of(model, X)
    for _ in range(2):
        assert type(fast(X.as_subclass(Image))) is Image
        assert type(fast(X)) is Tensor
    assert fast.health.served_by_original == 2


def test_a_parameter_is_answered_by_the_program_unless_the_model_asks() -> None:
    weight = nn.Parameter(X.clone(), requires_grad=False)
    fast = module_of(Model(lambda m, x: x + 1), X)
    check(fast, Model(lambda m, x: x + 1), weight)
    assert fast.health.served_by_original == 0
    asking = Model(lambda m, x: x + isinstance(x, nn.Parameter))
    fast = module_of(asking, X)
    for _ in range(2):
        check(fast, asking, weight)
        check(fast, asking, X)
    assert fast.health.served_by_original == 2


class Scaled(Tensor):
    """An image with a scale."""

    scale: float


def with_scale(tensor: Tensor) -> Tensor:
    made: Any = tensor.as_subclass(Scaled)
    made.scale = 3.0
    return made  # type: ignore[no-any-return]


def with_gradients(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


@pytest.mark.parametrize(
    ("ask", "given"),
    [
        (lambda m, x: x * (1 + isinstance(x, nn.Parameter)), nn.Parameter(X.clone())),
        (lambda m, x: x * (1 + isinstance(x, nn.Parameter)), nn.Parameter(X.clone(), requires_grad=False)),
        (lambda m, x: x * getattr(x, "scale", 1.0), with_scale(X.clone())),
        (lambda m, x: x * getattr(x, "scale", 1.0), with_scale(with_gradients(X))),
        (lambda m, x: x * (1 + isinstance(x, Scaled)), with_scale(with_gradients(X))),
    ],
    ids=["parameter", "constant", "scale", "scale and gradients", "class and gradients"],
)
def test_the_original_gets_arguments_with_their_class_and_attributes(ask: Any, given: Tensor) -> None:
    model = Model(ask)
    fast = module_of(model, X)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(given), model(given), check_stride=False)
            check(fast, model, X)
    assert fast.health.served_by_original == 2
    assert torch.equal(fast(given), model(given))


def marked(**attributes: Any) -> Tensor:
    """A plain tensor with attributes."""
    made = X.clone()
    vars(made).update(attributes)
    return made


@pytest.mark.parametrize(
    ("ask", "given"),
    [
        (lambda m, x: x * getattr(x, "gain", 1), [marked(gain=1), marked(gain=3), marked(gain=5)]),
        (lambda m, x: x * (2 if hasattr(x, "stamp") else 1), [marked(stamp=0.0), marked(stamp=1.0)]),
        (lambda m, x: x * getattr(x, "gain", 1), [marked(gain=3).requires_grad_()]),
    ],
    ids=["a number", "whether there is one", "with gradients"],
)
def test_attributes_that_the_code_asks_for_are_for_the_original(ask: Any, given: list[Tensor]) -> None:
    model = Model(ask)
    fast = module_of(model, X)
    with torch.no_grad():
        for _ in range(2):
            check(fast, model, X)
            for tensor in given:
                check(fast, model, tensor)
    assert fast.health.served_by_original == 2 * len(given)
    with pytest.raises(InputError, match="asks its arguments for attributes"):
        fast.prepare((given[0],))
    fast.strict = True
    check(fast, model, X)


def test_attributes_that_no_code_asks_for_are_for_the_program() -> None:
    fast = module_of(model := Model(lambda m, x: x + 1), X)
    check(fast, model, marked(stamp=1.0))
    assert fast.health.served_by_original == 0


def test_an_example_with_an_attribute_that_matters_is_more_than_a_graph() -> None:
    for ask in (lambda m, x: x * getattr(x, "gain", 1), lambda m, x: x * x.gain):
        with pytest.raises(CaptureError):
            module_of(Model(ask), marked(gain=3))
