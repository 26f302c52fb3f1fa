"""The model's hash: the same for the same graph and weights, another for any change of either."""

from __future__ import annotations

import torch
from torch import nn

from ampopt.ir.model_hash import model_hash
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
