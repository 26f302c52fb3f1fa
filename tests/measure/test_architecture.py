"""Which models are the same for `compare --baseline`: weights may differ, and architectures may not."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ampopt.measure.architecture import Architecture, architecture_of


def net(width: int = 8, kernel: int = 3, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, kernel), nn.BatchNorm2d(width), activation())


def with_buffer(size: int, *, persistent: bool = True) -> nn.Module:
    model = net()
    model.register_buffer("anchors", torch.zeros(size), persistent=persistent)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    return model


def test_other_weights_are_the_same_architecture_and_counts_are_those_of_parameters() -> None:
    found = architecture_of(net())
    trained = net().half().train().requires_grad_(requires_grad=False)
    assert found == architecture_of(trained)
    assert (found.parameters, found.modules) == (3 * 8 * 9 + 8 + 8 + 8, 4)
    assert architecture_of(tied()).parameters == 16


@pytest.mark.parametrize(
    "other",
    [
        lambda: net(width=128),
        lambda: net(kernel=5),
        lambda: net(activation=nn.GELU),
        lambda: with_buffer(3),
        lambda: nn.Sequential(*net().children(), nn.ReLU()),
        lambda: nn.ModuleDict(dict(zip(("a", "b", "c"), net().children(), strict=True))),
    ],
    ids=["width", "kernel", "activation", "buffer", "depth", "names"],
)
def test_what_makes_another_architecture(other: Callable[[], nn.Module]) -> None:
    assert architecture_of(other()) != architecture_of(net())


def test_buffers_that_are_not_saved_and_classes_inside_of_a_script_count() -> None:
    assert architecture_of(with_buffer(3, persistent=False)) != architecture_of(
        with_buffer(4, persistent=False)
    )
    one, other = (torch.jit.script(net(activation=each)) for each in (nn.ReLU, nn.GELU))
    assert architecture_of(one) != architecture_of(other)


def test_it_is_read_as_it_was_written_and_nothing_else_is() -> None:
    found = architecture_of(net())
    written = json.loads(json.dumps(found.to_dict()))
    assert Architecture.read(written) == found
    broken: object
    for broken in (None, [], {}, {**written, "parameters": "1"}, {**written, "hash": 1}, {**written, "x": 1}):
        assert Architecture.read(broken) is None
