"""What is no plain tensor is refused, with what to do; a nested one does not end the process."""

from __future__ import annotations

import warnings

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
