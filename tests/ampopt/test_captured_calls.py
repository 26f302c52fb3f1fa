"""What a call of a captured graph does around its launch; forms of the graph are Python objects here."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.cuda_graphs import FORMS, CapturedGraph


class FakeForm:
    """Doubles what lies at the first address into what lies at the second, and counts moves and launches."""

    moves = launches = static = 0
    context = contextlib.nullcontext()

    def move(self, addresses: tuple[int, ...]) -> None:
        self.moves += 1
        self.addresses = addresses

    def launch(self, stream: int) -> None:
        assert stream == 7
        self.launches += 1
        addresses = (*self.addresses, self.static)[:2]
        source, target = ((ctypes.c_float * 4).from_address(address) for address in addresses)
        target[:] = [2 * value for value in source]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr("ampopt.cuda_graphs.ALIGNED", 16)


@pytest.fixture
def captured() -> CapturedGraph:
    """As after a capture."""
    graph: Any = CapturedGraph.__new__(CapturedGraph)
    graph._lock, graph._is_static, graph._moves = threading.Lock(), False, True
    graph._inputs, graph._outputs = [torch.zeros(4)], (torch.zeros(4),)
    graph._strides, graph._index, graph._raw_stream = [(1,)], 0, 7
    graph._forms, graph._spare = {}, [FakeForm() for _ in range(FORMS)]
    graph._fresh = [lambda: torch.zeros(4)]
    made: CapturedGraph = graph
    return made


def number(value: float) -> Tensor:
    return torch.full((4,), float(value))


def test_each_result_is_the_callers_and_right(captured: CapturedGraph) -> None:
    inputs = [number(value) for value in range(12)]
    found = [captured(x)[0] for x in inputs]
    assert len({y.data_ptr() for y in found}) == 12
    assert all(torch.equal(y, 2 * x) for x, y in zip(inputs, found, strict=True))


def test_a_loop_launches_one_form_that_is_set_to_the_next_result_after_the_launch(
    captured: CapturedGraph,
) -> None:
    first, second = captured._spare[:2]
    x, y = number(3), number(4)
    for count in range(1, 9):
        assert torch.equal(captured(x)[0], number(6))
        assert (first.launches, first.moves) == (count, count + 1)  # type: ignore[attr-defined]
    for _ in range(4):
        assert torch.equal(captured(y)[0], number(8))
        assert torch.equal(captured(x)[0], number(6))
    assert (first.launches, second.launches) == (12, 4)  # type: ignore[attr-defined]
    assert (first.moves, second.moves) == (13, 5)  # type: ignore[attr-defined]


def test_forms_are_bounded_and_the_oldest_moves(captured: CapturedGraph) -> None:
    forms, inputs = list(captured._spare), [number(value) for value in range(FORMS + 1)]
    results = [captured(x)[0] for x in inputs]
    assert [form.launches for form in forms] == [2, *[1] * (FORMS - 1)]  # type: ignore[attr-defined]
    assert list(captured._forms) == [(x.data_ptr(),) for x in inputs[1:]]
    assert all(torch.equal(y, 2 * x) for x, y in zip(inputs, results, strict=True))


def test_static_results_stay_where_they_are(captured: CapturedGraph) -> None:
    captured._is_static = True
    (buffer,), form, x = captured._outputs, captured._spare[0], number(5)
    form.static = buffer.data_ptr()  # type: ignore[attr-defined]
    for value in (5, 6):
        (found,) = captured(x.fill_(value))
        assert found is buffer
        assert torch.equal(found, number(2 * value))
    assert (form.launches, form.addresses) == (2, (x.data_ptr(),))  # type: ignore[attr-defined]


def test_a_bare_launch_repeats_the_call_with_its_tensors(captured: CapturedGraph) -> None:
    form, x, y = captured._spare[0], number(3), number(4)
    launch = captured.bare_launch(x)
    captured(y)
    launch()
    assert form.launches == 2  # type: ignore[attr-defined]
    (prepared,) = captured._forms[x.data_ptr(),].outputs or ()
    assert torch.equal(prepared, number(6))


def test_another_layout_is_copied_and_leaves_its_tensor_alone(captured: CapturedGraph) -> None:
    x = torch.arange(8.0)[::2]
    assert torch.equal(captured(x)[0], 2 * x)
    assert torch.equal(captured._inputs[0], x)


@pytest.mark.parametrize("first", [True, False])
def test_a_result_belongs_to_the_mode_of_its_own_call(captured: CapturedGraph, first: bool) -> None:
    for inference in (first, not first, first):
        with torch.inference_mode(inference):
            assert captured(number(1))[0].is_inference() == inference


def test_memory_that_is_missing_for_the_next_result_costs_this_one_nothing(captured: CapturedGraph) -> None:
    left = [1]

    def fresh() -> Tensor:
        if not left:
            raise torch.OutOfMemoryError("full")
        left.pop()
        return torch.zeros(4)

    captured._fresh = [fresh]
    assert torch.equal(captured(number(1))[0], number(2))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        captured(number(1))
    left.append(1)
    assert torch.equal(captured(number(4))[0], number(8))


@pytest.fixture
def quick(captured: CapturedGraph) -> Callable[[Tensor], tuple[Tensor, ...]]:
    found = captured.quick(number(0))
    assert found is not captured
    return found


Quick = Callable[[Tensor], tuple[Tensor, ...]]


def test_a_quick_call_answers_as_any_other(captured: CapturedGraph, quick: Quick) -> None:
    first, x = captured._spare[0], number(3)
    for count in range(1, 4):
        assert torch.equal(quick(x)[0], number(6))
        assert torch.equal(captured(x)[0], number(6))
        assert first.launches == 2 * count  # type: ignore[attr-defined]
    shifted = torch.arange(5.0)[1:]
    assert shifted.data_ptr() % 16
    for _ in range(2):
        assert torch.equal(quick(shifted)[0], 2 * shifted)
    assert torch.equal(captured._inputs[0], shifted)


def test_a_quick_call_like_earlier_ones_does_without_the_rest(
    captured: CapturedGraph, quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[object] = []
    real = captured._call

    def call(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        whole.append(tensors)
        return real(tensors)

    monkeypatch.setattr(captured, "_call", call, raising=False)
    x, y = number(3), number(4)
    found = [quick(each)[0] for each in (x, x, x, y, y, x)]
    assert [each[0].item() for each in found] == [6, 6, 6, 8, 8, 6]
    assert len({each.data_ptr() for each in found}) == 6
    assert whole == [(x,), (y,)]


@pytest.mark.parametrize("first", [True, False])
def test_a_quick_result_belongs_to_the_mode_of_its_own_call(quick: Quick, first: bool) -> None:
    x = number(1)
    for inference in (first, first, not first, first, not first, not first):
        with torch.inference_mode(inference):
            (found,) = quick(x)
            assert found.is_inference() == inference
            assert torch.equal(found, number(2))


def test_static_results_of_quick_calls_stay_where_they_are(captured: CapturedGraph, quick: Quick) -> None:
    captured._is_static = True
    (buffer,), form, x = captured._outputs, captured._spare[0], number(5)
    form.static = buffer.data_ptr()  # type: ignore[attr-defined]
    for count in range(1, 4):
        assert quick(x)[0] is buffer
        assert (form.launches, form.moves) == (count, 1)  # type: ignore[attr-defined]


def test_a_move_that_fails_leaves_nothing_to_launch(
    captured: CapturedGraph, quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    form: Any = captured._spare[0]
    x, real = number(3), form.move
    quick(x)

    def refused(addresses: tuple[int, ...]) -> None:
        real(tuple(8 for _ in addresses))
        raise RuntimeError("refused")

    monkeypatch.setattr(form, "move", refused)
    assert torch.equal(quick(x)[0], number(6))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refused"):
            quick(x)
    assert form.launches == 2
    monkeypatch.setattr(form, "move", real)
    assert torch.equal(quick(x)[0], number(6))


@pytest.mark.parametrize("what", ["stream", "device"])
def test_a_quick_call_from_elsewhere_is_made_where_it_belongs(
    captured: CapturedGraph, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    seen: list[object] = []

    def call(tensors: object) -> tuple[Tensor]:
        seen.append(tensors)
        return (number(1),)

    monkeypatch.setattr(captured, "_call", call, raising=False)
    name = {"stream": "_cuda_getCurrentRawStream", "device": "_cuda_getDevice"}[what]
    monkeypatch.setattr(torch._C, name, lambda *_: 8, raising=False)
    x = number(3)
    captured.quick(x)(x)
    assert seen == [(x,)]


@pytest.mark.parametrize(
    "other",
    [torch.zeros(5), torch.zeros(4).double(), torch.zeros(8)[::2]],
    ids=["shape", "dtype", "strides"],
)
def test_a_quick_call_is_for_what_the_graph_can_read(captured: CapturedGraph, other: Tensor) -> None:
    assert captured.quick(other) is captured
    captured._moves = False
    assert captured.quick(number(0)) is captured
