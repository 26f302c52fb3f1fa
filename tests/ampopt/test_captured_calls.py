"""What a call of a captured graph does around its launch; forms of the graph are Python objects here."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.cuda_graphs import FORMS, CapturedGraph


class FakeForm:
    """Doubles what lies at the first address into what lies at the second, and counts its moves."""

    made = moves = 0

    def __init__(self, *_: object) -> None:
        FakeForm.made += 1

    def move(self, addresses: tuple[int, ...]) -> None:
        FakeForm.moves += 1
        self.addresses = addresses

    def launch(self, stream: int) -> None:
        source, target = ((ctypes.c_float * 4).from_address(address) for address in self.addresses)
        target[:] = [2 * value for value in source]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr("ampopt.cuda_graphs.ReadyGraph", FakeForm)
    monkeypatch.setattr("ampopt.cuda_graphs.ALIGNED", 16)
    FakeForm.made = FakeForm.moves = 0


@pytest.fixture
def captured() -> CapturedGraph:
    """As after a capture."""
    graph: Any = CapturedGraph.__new__(CapturedGraph)
    graph._lock, graph._is_static, graph._moves = threading.Lock(), False, True
    graph._inputs, graph._outputs = [torch.zeros(4)], (torch.zeros(4),)
    graph._strides, graph._index, graph._raw_stream = [(1,)], 0, 7
    graph._graph, graph._forms, graph._next = None, {}, None
    graph._stream = SimpleNamespace(query=lambda: True)
    made: CapturedGraph = graph
    return made


def number(value: float) -> Tensor:
    return torch.full((4,), float(value))


def test_each_result_is_the_callers_and_right(captured: CapturedGraph) -> None:
    inputs = [number(value) for value in range(12)]
    found = [captured(x)[0] for x in inputs]
    assert len({y.data_ptr() for y in found}) == 12
    assert all(torch.equal(y, 2 * x) for x, y in zip(inputs, found, strict=True))


def test_a_form_is_used_again_for_the_same_addresses(captured: CapturedGraph) -> None:
    room = [(torch.empty(4),) for _ in range(2)]
    turns: Iterator[int] = iter([0, 1] * 10)

    def fresh() -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        outputs = room[next(turns)]
        return outputs, (outputs[0].data_ptr(),)

    captured._fresh = fresh  # type: ignore[method-assign]
    x = number(3)
    for _ in range(8):
        assert torch.equal(captured(x)[0], number(6))
    assert (FakeForm.made, FakeForm.moves) == (2, 2)


def test_forms_are_bounded_and_the_oldest_moves(captured: CapturedGraph) -> None:
    inputs = [number(value) for value in range(FORMS + 4)]
    results = [captured(x)[0] for x in inputs]
    assert (FakeForm.made, FakeForm.moves, len(captured._forms)) == (FORMS, FORMS + 4, FORMS)
    assert all(torch.equal(y, 2 * x) for x, y in zip(inputs, results, strict=True))


def test_another_layout_is_copied_and_leaves_its_tensor_alone(captured: CapturedGraph) -> None:
    x = torch.arange(8.0)[::2]
    assert torch.equal(captured(x)[0], 2 * x)
    assert torch.equal(captured._inputs[0], x)


@pytest.mark.parametrize("first", [True, False])
def test_a_result_belongs_to_the_mode_of_its_own_call(captured: CapturedGraph, first: bool) -> None:
    for inference in (first, not first, first):
        with torch.inference_mode(inference):
            assert captured(number(1))[0].is_inference() == inference


def test_memory_that_is_missing_for_the_next_result_costs_this_one_nothing(
    captured: CapturedGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[[Tensor], Tensor] = torch.empty_like
    left = [1]

    def empty_like(tensor: Tensor) -> Tensor:
        if not left:
            raise torch.OutOfMemoryError("full")
        left.pop()
        return real(tensor)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    assert torch.equal(captured(number(1))[0], number(2))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        captured(number(1))
    left.append(1)
    assert torch.equal(captured(number(4))[0], number(8))
