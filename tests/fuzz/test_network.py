"""The generator: the same networks from the same seeds, of every kind of layer, and calls that differ."""

from __future__ import annotations

import pytest
import torch

from fuzz import calls
from fuzz.network import KINDS, Layer, Spec, build, draw, make_call
from fuzz.pick import Pick

SPEC = Spec(7, (2, 4, 6, 5), (Layer("conv_bn", 1), Layer("activation", 2), Layer("linear", 3)))


def test_a_seed_gives_the_same_network_and_call_again() -> None:
    for seed in range(20):
        spec = draw(seed)
        assert spec == draw(seed)
        first, second = build(spec), build(spec)
        assert str(first) == str(second)
        for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(make_call(spec).tensors, make_call(spec).tensors, strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_a_description_survives_json() -> None:
    assert Spec.from_json(SPEC.to_json()) == SPEC


def test_every_kind_of_layer_is_drawn_and_every_drawn_layer_is_in_the_network() -> None:
    kinds = set[str]()
    for seed in range(300):  # the rarest layer is first drawn with 271
        spec = draw(seed)
        if drawn := {layer.kind for layer in spec.layers} - kinds:
            kinds |= drawn
            assert len(build(spec).steps) == len(spec.layers)
    assert kinds == KINDS.keys()


def test_leaving_a_layer_out_keeps_the_others() -> None:
    smaller = Spec(SPEC.seed, SPEC.shape, SPEC.layers[:1] + SPEC.layers[2:])
    assert str(build(smaller).steps[0]) == str(build(SPEC).steps[0])


@pytest.mark.parametrize("memory", list(calls.MEMORIES))
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (1, 2, 3, 4, 5)])
def test_memory_does_not_change_numbers(memory: str, shape: tuple[int, ...]) -> None:
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    if memory == "expanded":
        values = torch.zeros(shape)
    tensor = calls.in_memory(memory, values.clone())
    torch.testing.assert_close(tensor.detach(), values)
    copy = calls.same_memory(tensor)
    assert (copy.stride(), copy.requires_grad) == (tensor.stride(), tensor.requires_grad) or tensor.is_neg()
    torch.testing.assert_close(copy.detach(), values)


@pytest.mark.parametrize("kind", list(calls.CALLS))
def test_every_way_to_call_reaches_the_layers(kind: str) -> None:
    x = torch.ones(2, 3)
    call = calls.arguments(kind, x, torch.Generator().manual_seed(0))
    y, seen = calls.entrance(call.args, call.kwargs, torch.ones(5, 3))
    assert y.shape == x.shape
    assert seen[-1] is y
    others = {"two", "row", "kwarg", "kwargs only", "zero-dim", "dict", "list", "nested"}
    assert len(seen) == (2 if kind in others else 1)


@pytest.mark.parametrize("values", list(calls.VALUES))
def test_numbers_are_what_their_name_says(values: str) -> None:
    numbers = calls.numbers(values, (4, 5), torch.Generator().manual_seed(0))
    assert numbers.shape == (4, 5)
    finite = {"nan": 19, "inf": 19, "minus inf": 19}.get(values, 20)
    assert int(torch.isfinite(numbers).sum()) == finite


def test_choices_do_not_depend_on_the_version_of_python() -> None:
    pick = Pick(0)
    chosen = [
        pick.number(0, 9),
        pick.one(*"abcdef"),
        pick.maybe(),
        pick.divisor(12, 8),
        pick.weighted({"x": 1, "y": 2}),
    ]
    assert chosen == [5, "a", False, 1, "y"]
