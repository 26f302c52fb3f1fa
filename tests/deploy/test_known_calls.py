"""The kinds of call that are known: found by their keys, bounded, and forgotten from the oldest on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy.known_calls import MOST_KEYS, KnownCalls, Served
from ampopt.engines.executable import executable
from ampopt.ir.asked import Asked
from ampopt.ir.signature import flatten_call
from tests.helpers import Model
from tests.support.planted import captured_of


def image(size: int = 4) -> Tensor:
    return torch.arange(float(size * size)).reshape(1, 1, size, size)


TIMES = Model(lambda m, x, y: x.amax() * y)


def served(*inputs: Tensor, model: nn.Module | None = None, layout: bool = False) -> Served:
    """A program of a ReLU, or of another model, for inputs like these."""
    _, captured = captured_of((model or nn.ReLU()).eval(), *inputs)
    run = executable(captured.program)
    return Served(run, captured.layout, captured, captured.program, Asked(layout=layout), run)


def find(calls: KnownCalls, x: Tensor) -> Served | None:
    return calls.find(*flatten_call((x,), {}))


def test_a_call_is_found_by_its_shape_and_strides() -> None:
    calls = KnownCalls(4)
    admitted = calls.admit(served(image()))
    assert find(calls, image()) is admitted
    assert find(calls, image(5)) is None
    assert find(calls, image().transpose(2, 3)) is None
    assert calls.of_any_strides(*flatten_call((image().transpose(2, 3),), {})) is admitted


def test_a_call_of_one_tensor_has_a_short_way_that_is_the_latest_from_then_on() -> None:
    calls = KnownCalls(4)
    calls.admit(served(image()))
    assert calls.latest == {}
    assert calls.short([image(5)]) is None
    answer = calls.short([image() - 3])
    assert answer is not None
    assert calls.latest == {1: answer}
    assert torch.equal(answer(image() - 3), (image() - 3).relu())
    assert answer(image(5)) is NotImplemented


def test_a_call_of_several_tensors_has_one_too() -> None:
    calls, x, y = KnownCalls(4), image(), image(3)
    calls.admit(served(x, y, model=TIMES))
    assert calls.short([x]) is None
    assert calls.short([y, x]) is None
    assert (answer := calls.short([x, y])) is not None
    assert calls.latest == {2: answer}
    assert torch.equal(answer(x + 1, y), (x + 1).amax() * y)
    assert answer(y, x) is NotImplemented
    assert answer(x, x) is NotImplemented


X, Y = torch.ones(2, 3), torch.ones(3)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [(([X, Y],), {}), ((X,), {"y": Y}), ((X, 2), {}), ((X, X), {}), ((X, nn.Parameter(Y)), {}), ((), {})],
    ids=["in a list", "by name", "a number", "one twice", "a parameter", "nothing"],
)
def test_only_positional_plain_tensors_have_a_short_way(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    calls, made = KnownCalls(4), served(X, Y, model=TIMES)
    leaves, spec = flatten_call(args, kwargs)
    calls.remember(leaves, spec, made)
    assert calls.find(leaves, spec) is made
    assert calls.short([each for each in leaves if isinstance(each, torch.Tensor)]) is None


def test_the_program_used_longest_ago_goes_first_with_its_short_way() -> None:
    calls = KnownCalls(2)
    for size in (4, 5):
        calls.admit(served(image(size)))
    assert find(calls, image(4)) is not None  # 5 has not been used since
    calls.admit(served(image(6)))
    assert calls.programs == 2
    assert [find(calls, image(size)) is None for size in (4, 5, 6)] == [False, True, False]
    assert calls.short([image(5)]) is None
    assert calls.of_any_strides(*flatten_call((image(5),), {})) is None
    assert calls.latest == {}


def test_keys_are_bounded_where_one_program_serves_many_strides() -> None:
    calls = KnownCalls(1)
    admitted = calls.admit(served(image()))
    for offset in range(2 * MOST_KEYS):
        x = torch.zeros(99).as_strided((1, 1, 4, 4), (16, 16, 4 + offset, 1))
        calls.remember(*flatten_call((x,), {}), admitted)
    assert len(calls.answers) == MOST_KEYS
    assert calls.programs == 1


def test_the_original_counts_as_a_key_and_not_as_a_program() -> None:
    calls = KnownCalls(1)
    calls.admit(served(image()))
    calls.remember(*flatten_call((image(7),), {}), Served(nn.ReLU(), reason="it is the original"))
    assert (len(calls.answers), calls.programs) == (2, 1)
    assert find(calls, image()) is not None


def test_where_the_model_asks_how_a_tensor_lies_keys_say_where_it_begins() -> None:
    calls = KnownCalls(4)
    calls.admit(served(image()))
    assert calls.short([image()]) is not None
    admitted = calls.admit(served(image(5), layout=True))
    assert calls.short([image()]) is None, "what recognizes a tensor does not see where it begins"
    assert calls.latest == {}
    assert find(calls, image(5)) is admitted
    later = torch.zeros(26)[1:].view(1, 1, 5, 5)
    assert find(calls, later) is None
    assert find(calls, image()) is not None, "what was known before is known by its new key"


def test_strides_that_a_program_does_not_hold_for_are_told_apart() -> None:
    calls, call = KnownCalls(4), flatten_call((image(),), {})
    calls.admit(served(image()))
    calls.distinguish_strides(*call)
    assert calls.of_any_strides(*call) is None
    calls.admit(served(image()))
    assert calls.of_any_strides(*call) is None, "the next program for them holds for its own strides"


def test_an_operator_that_reads_strides_gets_a_program_for_each() -> None:
    calls, x = KnownCalls(4), torch.ones(4, 4)
    calls.admit(served(x, model=Model(lambda m, x: torch.as_strided(x, (2, 2), (4, 1)) + 0)))
    assert calls.of_any_strides(*flatten_call((x,), {})) is None
    assert find(calls, x) is not None


@pytest.mark.parametrize("most", [1, 3])
def test_what_fails_is_tried_again_so_many_times(most: int) -> None:
    calls, call = KnownCalls(2), flatten_call((image(),), {})
    again = [calls.count_failure(*call, most=most) for _ in range(most)]
    assert again == [True] * (most - 1) + [False]
    assert not calls.failures


def test_failures_are_bounded_and_forgotten_with_success() -> None:
    calls = KnownCalls(1)
    for size in range(1, 3 * MOST_KEYS):
        calls.count_failure(*flatten_call((image(size),), {}), most=3)
    assert len(calls.failures) == MOST_KEYS
    calls.admit(served(image(3 * MOST_KEYS - 1)))
    assert len(calls.failures) == MOST_KEYS - 1


def test_a_model_that_keeps_a_state_goes_the_long_way_under_its_lock() -> None:
    class Counts(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x + self.count

    made = served(image(), model=Counts())
    states: list[Any] = []

    def run(x: Tensor) -> tuple[Tensor, ...]:
        states.append(x)
        return (x,)

    made.run = run
    calls = KnownCalls(1)
    calls.admit(made)
    answer = calls.short([image()])
    assert answer is not None
    answer(image())
    assert len(states) == 1
