"""A program answers a call as it answers its normal form, where the model does so, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import CaptureError
from ampopt.ir.normal_form import is_normal, normal_form, tells_equal_from_same, true_copy, why_not_normal
from ampopt.ir.signature import flatten_call
from tests.helpers import Model
from tests.support.planted import captured_of

CPU = torch.device("cpu")
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Image(Tensor):
    """A tensor of another class, that its results have, too."""


def call(*args: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {}


A_LIST: list[Any] = [3]
A_DICT: dict[str, Any] = {"x": [X]}


@pytest.mark.parametrize(
    ("args", "normal"),
    [
        ([X, 1, 1, None, None], True),
        ([X, X.clone()], True),
        ([X, X.view(3, 2)], True),
        ([X, X], False),
        ([X, None, X], False),
        ([nn.Parameter(X)], False),
        ([X.as_subclass(Image)], False),
        ([X, A_LIST, [3]], True),
        ([X, (), ()], True),
        ([X, A_LIST, A_LIST], False),
        ([X, [A_LIST], {"a": (A_LIST,)}], False),
        ([A_DICT, A_DICT], False),
    ],
)
def test_what_is_plain_and_given_once_is_normal(args: list[Any], normal: bool) -> None:
    leaves, spec = flatten_call(args, {})
    assert is_normal(leaves, spec) is normal
    found, plain = normal_form(leaves, spec)
    assert is_normal(found, plain)
    assert (plain == spec) or not normal
    for before, after in zip(leaves, found, strict=True):
        assert torch.equal(before, after) if isinstance(before, Tensor) else before is after
    if normal:
        assert all(before is after for before, after in zip(leaves, found, strict=True))


SAME = "same tensor or container"
KINDS = r"class of its arguments \(Parameter\)"


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (lambda m, a, b: a * 2 + b, (X, X), None),
        (lambda m, a, b: a * (2 if a is b else 3), (X, X), SAME),
        (lambda m, a, b: a if a is b else b, (X, X), None),
        (lambda m, a, b: a[0] * (2 if a is b else 3), ([X], A_LIST), None),
        (lambda m, x, a, b: x * (2 if a is b else 3), (X, A_LIST, A_LIST), SAME),
        (lambda m, x, a, b: x * a[0] + b[0], (X, A_LIST, A_LIST), None),
        (lambda m, a, b: a["x"][0] * (2 if a["x"] is b["x"] else 3), (A_DICT, A_DICT), SAME),
        (lambda m, a, b: a[:1] if a is b else a, (X, X), SAME),
        (lambda m, a, b: [a] if a is b else (a,), (X, X), SAME),
        (lambda m, a, b: (a, int(a is b)), (X, X), SAME),
        (lambda m, a, b: a * (2 if a is b else 3), (torch.zeros(2, 3),) * 2, SAME),
        (lambda m, a: a + 1, (nn.Parameter(X),), None),
        (lambda m, a: a + isinstance(a, nn.Parameter), (nn.Parameter(X),), KINDS),
        (lambda m, a: a + 1, (X.as_subclass(Image),), r"\(Image\)"),
        (lambda m, a: a.as_subclass(Tensor) + 1, (X.as_subclass(Image),), None),
        (lambda m, a: a * torch.rand(1) if a.dim() else a, (nn.Parameter(X),), None),
    ],
    ids=[
        *("uses both", "asks", "asks in vain", "other lists", "lists", "lists in vain", "lists in dicts"),
        *("shape", "structure", "constant", "zeros"),
        *("parameter", "asks for it", "results have the class", "class in vain", "draws alike"),
    ],
)
def test_a_model_that_can_tell_is_found_by_calling_it_both_ways(
    function: Any, args: tuple[Any, ...], reason: str | None
) -> None:
    found = why_not_normal(Model(function), *call(*args), CPU)
    assert found is None if reason is None else found is not None
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found)


def test_draws_that_the_model_refuses_count_for_nothing() -> None:
    def function(m: Any, a: Tensor, b: Tensor) -> Tensor:
        if not torch.equal(a, X):
            raise ValueError("another input")
        return a + b

    assert why_not_normal(Model(function), *call(X, X), CPU) is None


def test_neither_the_model_nor_its_inputs_are_changed() -> None:
    def function(m: Any, a: Tensor, b: Tensor) -> Tensor:
        m.count.add_(1)
        return a.add_(1) + b

    model, x = Model(function, count=torch.zeros(())), X.clone()
    assert why_not_normal(model, *call(x, x), CPU) is not None, "it writes into both at once"
    assert torch.equal(x, X)
    assert torch.equal(model.get_buffer("count"), torch.zeros(()))


@pytest.mark.parametrize(
    ("function", "args", "tells"),
    [
        (lambda m, a, b: a * (2 if a is b else 3), (X, X + 1), True),
        (lambda m, a, b: a * (2 if a is b else 3), (X, X[:1]), False),
        (lambda m, a, b: a + b, (X, X + 1), False),
        (lambda m, a: a, (X,), False),
        (lambda m, a, b: {False: a}[a is b], (X, X + 1), True),
    ],
    ids=["asks", "never the same", "uses both", "one", "refuses"],
)
def test_whether_a_model_tells_equal_from_same(function: Any, args: tuple[Any, ...], tells: bool) -> None:
    assert tells_equal_from_same(Model(function), *flatten_call(args, {}), CPU) is tells


@pytest.mark.parametrize("tensor", [X, nn.Parameter(X), X.as_subclass(Image)], ids=["plain", "param", "own"])
def test_a_true_copy_has_the_class_and_other_memory(tensor: Tensor) -> None:
    made = true_copy(tensor)
    assert type(made) is type(tensor)
    assert made.requires_grad == tensor.requires_grad
    assert made.data_ptr() != tensor.data_ptr()
    assert torch.equal(made, tensor)


@pytest.mark.parametrize("kind", [Tensor, nn.Parameter])
def test_a_sparse_tensor_has_a_true_copy(kind: Any) -> None:
    plain = torch.eye(3).to_sparse()
    tensor = plain if kind is Tensor else kind(plain)
    made = true_copy(tensor)
    assert (type(made), made.layout) == (kind, torch.sparse_coo)
    with torch.no_grad():
        made.mul_(2)
    assert torch.equal(tensor.to_dense(), torch.eye(3))


def test_a_capture_has_a_tensor_for_each_argument() -> None:
    _, captured = captured_of(Model(lambda m, a, b: a - 2 * b), X, X)
    assert is_normal(captured.leaves, captured.spec)
    (out,) = captured.program.run(X, X + 1)
    assert torch.equal(out, X - 2 * (X + 1))


def test_a_model_that_can_tell_is_not_captured_from_such_a_call() -> None:
    with pytest.raises(CaptureError, match="which of its arguments are the same tensor"):
        captured_of(Model(lambda m, a, b: a * (2 if a is b else 3)), X, X)


def test_attention_that_asks_which_way_is_shorter_is_answered_by_any() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(1, 9, 32)
    assert why_not_normal(model, *call(x, x, x), CPU) is None
    assert why_not_normal(model, *call(x, x + 1, x), CPU) is None
