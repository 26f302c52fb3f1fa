"""The weights of a compiled graph: writes that no version counter counts are noticed, too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ampopt.search.graph_weights import MOST_OF_A_VECTOR, SAMPLED, GraphWeights
from tests.helpers import with_statistics


def net() -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Embedding(6, 4)))


def weights_of(model: nn.Module) -> dict[int, Tensor]:
    return dict(enumerate([*model.parameters(), *model.buffers()]))


def train_batch_norm(model: nn.Module) -> None:
    conv, norm = model.get_submodule("0"), model.get_submodule("1")
    norm.train()
    norm(conv(torch.randn(2, 3, 8, 8)))
    norm.eval()


def step_of(optimizer: type[torch.optim.Optimizer]) -> Callable[[nn.Module], None]:
    def step(model: nn.Module) -> None:
        weight = model.get_parameter("0.weight")
        weight.grad = torch.ones_like(weight)
        optimizer([weight], lr=0.1, fused=True).step()  # type: ignore[call-arg]

    return step


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "batch norm in training": train_batch_norm,
    "fused Adam": step_of(torch.optim.Adam),
    "fused SGD": step_of(torch.optim.SGD),
    "data": lambda model: model.get_parameter("0.weight").data.mul_(2.0),
    "one value of a vector": lambda model: model.get_buffer("1.running_var").data[5:6].add_(1e-6),
    "NumPy": lambda model: model.get_parameter("2.weight").detach().numpy().fill(0.5),
    "all rows but the first": lambda model: model.get_parameter("2.weight").data[1:].add_(1.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_is_not_counted_is_noticed(name: str) -> None:
    model = net()
    inputs = weights_of(model)
    del inputs[len(inputs) - 1]  # the number of batches: an evaluation graph does not have it
    held = GraphWeights(inputs)
    before = [weight._version for weight in inputs.values()]
    given = list(inputs.values())
    assert held.are_now(given)
    with torch.no_grad():
        WRITES[name](model)
    assert [weight._version for weight in given] == before
    assert not held.are_now(given)


@pytest.mark.parametrize(
    "weight",
    [
        torch.full((3,), float("nan")),
        torch.randn(4, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(4, 6)[:, ::2],
        torch.randn(1, 3).expand(4, 3),
        torch.randn(2 * MOST_OF_A_VECTOR),
        torch.tensor(True),
        torch.empty(0, 3),
        torch.randn(3, 3, dtype=torch.complex64).conj(),
    ],
    ids=["NaN", "layout", "parts", "expanded", "long", "0-d", "empty", "conjugate"],
)
def test_any_weight_is_the_same_until_it_is_written(weight: Tensor) -> None:
    held = GraphWeights({1: weight})
    given = [torch.zeros(1), weight]
    assert held.are_now(given)
    assert held.are_now(given)
    assert not held.are_now([torch.zeros(1), weight.clone()])


def small(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that each of these dtypes has, and none twice in 64."""
    return torch.arange(math.prod(shape)).remainder(64).reshape(shape).to(dtype)


COMPLEX = torch.complex(torch.arange(16.0), torch.arange(16.0) + 1)

UNUSUAL: dict[str, Tensor] = {
    "every second value": small((16,))[::2],
    "every second value of many": small((2 * MOST_OF_A_VECTOR,))[::2],
    "a column": small((12, 5))[:, 3],
    "a part of each row": small((8, 16))[:, :2],
    "columns": small((3, 32)).t()[::4, 1:],
    "a crop": small((1, 2, 8, 8)).to(memory_format=torch.channels_last)[:, :, 2:4, 3:6],
    "bytes": small((12, 5), torch.int8)[:, 1:2],
    "float8": small((12, 5), torch.float8_e4m3fn)[:, 1:2],
    "bfloat16": small((12, 5), torch.bfloat16)[:, 1:2],
    "expanded": small((1, 3)).expand(4, 3),
    "expanded, with gaps": small((8, 1, 2))[::2].expand(4, 5, 2),
    "one value for all": torch.tensor(2.0).expand(4, 3),
    "windows": small((8,)).unfold(0, 3, 1)[:5],
    "conjugate": COMPLEX.conj(),
    "conjugate, with gaps": COMPLEX[::2].conj(),
    "negative": COMPLEX.conj().imag,
    "complex128": COMPLEX.to(torch.complex128)[::2],
    "conjugate matrix": COMPLEX.reshape(4, 4).t().conj(),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_write_to_any_value_is_noticed_whatever_the_strides(name: str) -> None:
    """Vectors of up to 4096 and others of up to 16 values, which are compared as a whole."""
    weight = nn.Parameter(UNUSUAL[name], requires_grad=False)
    held, version = GraphWeights({0: weight}), weight._version
    for place in itertools.product(*map(range, weight.shape[:-1]), {0, weight.shape[-1] - 1}):
        before = weight.data[place].clone()
        weight.data[place] = 65
        assert weight._version == version
        assert not held.are_now([weight]), f"{place} is not compared"
        weight.data[place] = before
        assert held.are_now([weight])


def test_sixteen_values_from_the_middle_of_a_matrix_with_gaps_are_compared() -> None:
    weight = small((64, 64))[:, 1::2]
    held, noticed = GraphWeights({0: weight}), []
    for place in itertools.product(range(64), range(32)):
        weight.data[place] += 1
        if not held.are_now([weight]):
            noticed.append(place)
        weight.data[place] -= 1
    assert noticed == [*((31, column) for column in range(24, 32)), *((32, column) for column in range(8))]
    assert len(noticed) == SAMPLED


def test_a_graph_without_weights_has_nothing_to_compare() -> None:
    assert GraphWeights({}).are_now([torch.zeros(1)])
