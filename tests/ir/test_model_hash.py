"""The model's hash: the same for the same graph and weights, another for any change of either."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn

from ampopt.ir.model_hash import are_equal, model_hash, weight_bytes
from tests.support.planted import captured_of

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def hash_of(model: nn.Module) -> str:
    return model_hash(captured_of(model.eval(), X)[1].program.graph)


def test_equal_models_have_one_hash() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert hash_of(model) == hash_of(model)
    assert len(hash_of(model)) == 64


def test_one_weight_or_one_option_makes_another_hash() -> None:
    conv, activation = nn.Conv2d(3, 4, 3), nn.LeakyReLU(0.1)
    before = hash_of(nn.Sequential(conv, activation))
    with_option = hash_of(nn.Sequential(conv, nn.LeakyReLU(0.2)))
    with torch.no_grad():
        conv.weight[0, 0, 0, 0] += 1e-3
    assert len({before, with_option, hash_of(nn.Sequential(conv, activation))}) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
@pytest.mark.parametrize(
    "strides", [((1, 1, 1, 1), (9, 9, 9, 9)), ((1,), (384,)), ((), ()), ((0, 3), (7, 2)), ((2, 3), (1, 4))]
)
def test_bytes_are_those_of_the_plain_layout(
    dtype: torch.dtype, strides: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    weight = torch.arange(20).to(dtype).as_strided(*strides, 1)
    assert weight_bytes(weight) == bytes(
        torch.tensor(weight.tolist(), dtype=dtype).view(-1).view(torch.uint8).tolist()
    )


def test_bytes_of_a_lazy_conjugate_or_negative_are_its_values() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert weight_bytes(z.conj()) == weight_bytes(torch.tensor([1 - 2j, 3 + 4j]))
    assert weight_bytes(z.conj().imag) == weight_bytes(torch.tensor([-2.0, 4.0]))


def test_a_model_with_one_weight_cut_from_another_is_optimized() -> None:
    conv = nn.Conv2d(1, 1, 1)
    conv.weight = nn.Parameter(torch.randn(4, 4, 3, 3)[:1, :1, :1, :1])
    assert len(model_hash(captured_of(conv.eval(), torch.randn(1, 1, 4, 4))[1].program.graph)) == 64


def test_graphs_are_equal_by_their_calls_and_their_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.1)).eval()

    def graph(model: nn.Module) -> fx.GraphModule:
        return captured_of(model, X)[1].program.graph

    first, second, changed = graph(model), graph(copy.deepcopy(model)), copy.deepcopy(model)
    assert are_equal(first, first)
    assert are_equal(first, second)
    with torch.no_grad():
        changed[0].weight[0, 0, 0, 0] += 1e-3  # type: ignore[index, operator]
    assert not are_equal(first, graph(changed))
    changed = copy.deepcopy(model)
    changed[2] = nn.LeakyReLU(0.2)
    assert not are_equal(first, graph(changed))
    name = next(str(node.target) for node in second.graph.nodes if node.op == "get_attr")
    weight = second.get_buffer(name)
    setattr(second, name, weight.clone(memory_format=torch.channels_last))
    assert not are_equal(first, second), "the layout counts: compilers have read it"
