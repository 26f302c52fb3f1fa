"""What is no plain tensor is refused, with what to do; a nested one does not end the process."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from ampopt.errors import InputError
from ampopt.ir.plain_tensors import check_no_derivatives, check_plain, is_surrounded, without_derivatives
from tests.support.planted import module_of

X = torch.ones(2, 3)


def odd() -> dict[str, tuple[Tensor, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse": (X.to_sparse(), r"tensor 0 of the call is sparse_coo: convert it with \.to_dense"),
            "csr": (X.to_sparse_csr(), r"sparse_csr: convert it with \.to_dense"),
            "mkldnn": (X.to_mkldnn(), r"mkldnn: convert it with \.to_dense"),
            "nested": (torch.nested.nested_tensor([X, X]), "is nested: call the module with one"),
            "jagged": (torch.nested.nested_tensor([X, X], layout=torch.jagged), "is a NestedTensor"),
            "quantized": (
                torch.quantize_per_tensor(X, 0.1, 0, torch.quint8),
                r"is quantized: convert it with \.dequantize",
            ),
            "fake": (FakeTensorMode().from_tensor(X), "is a FakeTensor, which is no plain tensor"),
        }


class _Named(Tensor):
    """A tensor of another class that keeps its numbers where all do."""


@pytest.mark.parametrize("name", odd())
def test_what_is_not_plain_is_refused_with_what_to_do(name: str) -> None:
    tensor, message = odd()[name]
    fast = module_of(nn.Linear(3, 2), X)
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            fast(tensor)
        assert torch.equal(fast(X), fast(X.clone()))
    assert fast._new.captures == 0
    assert len(fast._calls.answers) == 1
    with pytest.raises(InputError, match=message):
        fast.prepare(tensor)


@pytest.mark.parametrize(
    "tensor", [X, nn.Parameter(X), X.t(), X[:, :0], X.as_subclass(_Named), torch._neg_view(X), X.long()]
)
def test_plain_tensors_are_taken(tensor: Tensor) -> None:
    check_plain([tensor])
    check_no_derivatives([tensor, None, 3])
    assert not is_surrounded()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_derivative_of_a_real_or_complex_result_is_refused(dtype: torch.dtype) -> None:
    asking = X.clone().requires_grad_()
    (result,) = without_derivatives((torch.ones(3, dtype=dtype),), [asking])
    with pytest.raises(InputError, match="has no derivatives"):
        (result.abs().sum() + asking.sum()).backward()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "all": lambda result: result.mul_(2),
    "one": lambda result: result.__setitem__(0, 5),
    "a view": lambda result: result[1:].zero_(),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("base", [torch.ones(4), torch.ones(2, 4)[1], torch.ones(4, 2).t()[0]])
def test_results_may_be_written_to_and_have_no_derivative_after(base: Tensor, count: int, write: str) -> None:
    asking, own = X.clone().requires_grad_(), base.clone()
    results = without_derivatives([base, torch.ones(2)][:count], [asking])
    WRITES[write](own)
    WRITES[write](results[0])
    assert torch.equal(results[0].detach(), own)
    assert results[0].data_ptr() == base.data_ptr(), "it is no copy"
    with pytest.raises(InputError, match="has no derivatives"):
        (results[0].sum() + asking.sum()).backward()


def test_a_result_of_inference_mode_has_no_derivative() -> None:
    with torch.inference_mode():
        inner = torch.ones(3)
    with pytest.raises(InputError, match="has no derivatives"):
        without_derivatives(inner, [X.clone().requires_grad_()]).sum().backward()


def test_gradients_of_others_that_need_a_results_numbers_are_right() -> None:
    asking = X.clone().requires_grad_()
    squares = (asking * asking).sum()
    result = without_derivatives(asking, [asking])
    squares.backward()
    assert torch.equal(asking.grad, 2 * X)  # type: ignore[arg-type]
    squares = (asking * asking).sum()
    result.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
