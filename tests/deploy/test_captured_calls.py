"""What a call of a captured graph does around its launch; forms of the graph are Python objects here."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.engines.cuda_graphs import FORMS, CapturedGraph, _Form
from ampopt.engines.quick_call import MOST_OUTPUTS
from tests.support.compiler import needs_compiler
from tests.support.fake_form import FakeForm


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr("ampopt.engines.cuda_graphs.ALIGNED", 16)


@pytest.fixture
def captured() -> CapturedGraph:
    """As after a capture."""
    graph: Any = CapturedGraph.__new__(CapturedGraph)
    graph._lock, graph._is_static, graph._moves = threading.Lock(), False, True
    graph._inputs, graph._outputs = [torch.zeros(4)], (torch.zeros(4),)
    graph._strides, graph._index, graph.raw_stream = [(1,)], 0, 7
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


Quick = Callable[[Tensor], tuple[Tensor, ...]]


def made_quick(captured: CapturedGraph) -> Quick:
    return captured.quick(number(0))(torch.is_tensor, tuple)


@pytest.fixture(params=[pytest.param("C++", marks=needs_compiler), "Python"])
def quick(captured: CapturedGraph, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Quick:
    if request.param == "Python":
        monkeypatch.setattr("ampopt.engines.cuda_graphs.bind", lambda: None)
    return made_quick(captured)


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


@pytest.fixture
def whole(captured: CapturedGraph, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """The tensors of all calls that go the general way."""
    seen: list[tuple[Tensor, ...]] = []
    real = captured._call

    def call(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        seen.append((*tensors,))
        return real(tensors)

    monkeypatch.setattr(captured, "_call", call, raising=False)
    return seen


@needs_compiler
def test_a_quick_call_like_earlier_ones_does_without_the_rest(
    captured: CapturedGraph, whole: list[tuple[Tensor, ...]]
) -> None:
    quick, forms = made_quick(captured), list(captured._spare)
    x, y = number(3), number(4)
    found = [quick(each)[0] for each in (x, x, x, y, y, x)]
    assert [each[0].item() for each in found] == [6, 6, 6, 8, 8, 6]
    assert len({each.data_ptr() for each in found}) == 6
    assert whole == [(x,), (y,)]
    first: Any = forms[0]
    assert first.moves == 5, "two general moves, and then the result's address alone"
    assert torch.equal(captured(x)[0], number(6))


@needs_compiler
def test_general_and_quick_calls_know_of_each_others_moves(captured: CapturedGraph) -> None:
    quick, x, form = made_quick(captured), number(3), captured._spare[0]
    for _ in range(3):
        assert torch.equal(captured(x)[0], number(6))
        assert torch.equal(quick(x)[0], number(6))
        (prepared,) = captured._forms[x.data_ptr(),].outputs or ()
        expected = (x.data_ptr(), prepared.data_ptr())
        state: Any = form
        assert state.addresses == tuple(state.written) == tuple(state.used) == expected


@needs_compiler
def test_only_what_is_recognized_is_answered(captured: CapturedGraph) -> None:
    x, kept = number(3), list[object]()

    def restore(flat: tuple[Tensor, ...]) -> dict[str, Tensor]:
        kept.append(flat)
        return {"result": flat[0]}

    answer = captured.quick(x)(lambda thing: thing is x, restore)
    for _ in range(3):
        assert torch.equal(answer(x)["result"], number(6))
        assert answer(number(4)) is NotImplemented
        assert answer("nothing") is NotImplemented
    assert len(kept) == 3


@needs_compiler
def test_what_recognizing_and_restoring_raise_comes_through_and_the_lock_is_free(
    captured: CapturedGraph,
) -> None:
    def fails(_: object) -> bool:
        raise ValueError("as it was")

    x = number(3)
    for make in ((fails, tuple), (torch.is_tensor, fails)):
        answer = captured.quick(x)(*make)
        for _ in range(3):
            with pytest.raises(ValueError, match="as it was"):
                answer(x)
    assert not captured._lock.locked()
    assert torch.equal(captured(x)[0], number(6))


@needs_compiler
def test_a_launch_that_is_refused_goes_the_general_way(
    captured: CapturedGraph, whole: list[tuple[Tensor, ...]]
) -> None:
    quick, x, form = made_quick(captured), number(3), captured._spare[0]
    quick(x)
    form.status = 201  # type: ignore[attr-defined]
    assert torch.equal(quick(x)[0], number(6))
    form.status = 0  # type: ignore[attr-defined]
    assert torch.equal(quick(x)[0], number(6))
    assert len(whole) == 2


@needs_compiler
@pytest.mark.parametrize("what", ["no memory", "a refusal"])
def test_what_a_quick_call_cannot_prepare_the_next_one_does(
    captured: CapturedGraph, whole: list[tuple[Tensor, ...]], what: str
) -> None:
    full = list[object]()

    def fresh() -> Tensor:
        if full:
            raise torch.OutOfMemoryError("full")
        return torch.zeros(4)

    captured._fresh = [fresh]
    quick, x, form = made_quick(captured), number(3), captured._spare[0]
    quick(x)
    real = form.launch

    def launch(stream: int) -> None:
        real(stream)
        if what == "no memory":
            full.append(1)
        else:
            form.status = 700  # type: ignore[attr-defined]

    form.launch = launch  # type: ignore[method-assign]
    assert torch.equal(quick(x)[0], number(6))
    assert captured._forms[x.data_ptr(),].outputs is None
    assert len(whole) == 1
    form.launch = real  # type: ignore[method-assign]
    if what == "no memory":
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            quick(x)
        full.clear()
    form.status = 0  # type: ignore[attr-defined]
    assert torch.equal(quick(x)[0], number(6))
    assert len(whole) == (3 if what == "no memory" else 2)
    assert torch.equal(quick(x)[0], number(6))


@needs_compiler
def test_quick_calls_leave_no_references_behind(captured: CapturedGraph) -> None:
    quick, x = made_quick(captured), number(3)
    quick(x)

    def counts() -> list[int]:
        (prepared,) = captured._forms[x.data_ptr(),].outputs or ()
        kept = (x, captured, captured._forms[x.data_ptr(),], prepared, captured._fresh[0])
        return [sys.getrefcount(each) for each in kept]

    before = counts()
    for _ in range(50):
        (result,) = quick(x)
    assert counts() == before
    assert sys.getrefcount(result) == 2
    assert [quick("nothing") for _ in range(50)] == [NotImplemented] * 50  # type: ignore[arg-type]
    assert counts() == before


@needs_compiler
def test_threads_get_their_own_results_of_quick_calls(captured: CapturedGraph) -> None:
    quick, inputs = made_quick(captured), [number(value) for value in range(3)]

    def several(place: int) -> bool:
        return all(torch.equal(quick(inputs[place])[0], 2 * inputs[place]) for _ in range(200))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(several, range(3)))


@pytest.mark.parametrize("first", [True, False])
def test_a_quick_result_belongs_to_the_mode_of_its_own_call(quick: Quick, first: bool) -> None:
    x = number(1)
    for inference in (first, first, not first, first, not first, not first):
        with torch.inference_mode(inference):
            (found,) = quick(x)
            assert found.is_inference() == inference
            assert torch.equal(found, number(2))


def test_static_results_of_quick_calls_stay_where_they_are(captured: CapturedGraph) -> None:
    captured._is_static = True
    quick = made_quick(captured)
    (buffer,), form, x = captured._outputs, captured._spare[0], number(5)
    form.static = buffer.data_ptr()  # type: ignore[attr-defined]
    for count in range(1, 4):
        assert quick(x)[0] is buffer
        assert (form.launches, form.moves) == (count, 1)  # type: ignore[attr-defined]


def test_a_move_that_fails_leaves_nothing_to_launch(
    captured: CapturedGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    form: Any = captured._spare[0]
    x, real = number(3), form.move
    captured(x)

    def refused(addresses: tuple[int, ...]) -> None:
        real(tuple(8 for _ in addresses))
        raise RuntimeError("refused")

    monkeypatch.setattr(form, "move", refused)
    assert torch.equal(captured(x)[0], number(6))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refused"):
            captured(x)
    assert form.launches == 2
    monkeypatch.setattr(form, "move", real)
    assert torch.equal(captured(x)[0], number(6))


@needs_compiler
@pytest.mark.parametrize("what", ["stream", "device"])
def test_a_quick_call_from_elsewhere_is_made_where_it_belongs(
    captured: CapturedGraph, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    seen: list[object] = []
    x = number(3)
    captured(x)

    def call(tensors: object) -> tuple[Tensor]:
        seen.append(tensors)
        return (number(1),)

    monkeypatch.setattr(captured, "_call", call, raising=False)
    made_quick(captured)(x)
    assert seen == []
    name = {"stream": "_cuda_getCurrentRawStream", "device": "_cuda_getDevice"}[what]
    monkeypatch.setattr(torch._C, name, lambda *_: 8, raising=False)
    made_quick(captured)(x)
    assert seen == [(x,)]


@needs_compiler
@pytest.mark.parametrize(
    "other",
    [torch.zeros(5), torch.zeros(4).double(), torch.zeros(8)[::2]],
    ids=["shape", "dtype", "strides"],
)
def test_a_quick_call_is_for_what_the_graph_can_read(captured: CapturedGraph, other: Tensor) -> None:
    assert captured.quick(number(0)) == captured._quick
    assert captured.quick(other) != captured._quick
    captured._moves = False
    assert captured.quick(number(0)) != captured._quick


def test_a_graph_of_several_inputs_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_it() -> None:
        raise AssertionError("nobody would use it")

    monkeypatch.setattr("ampopt.engines.cuda_graphs.bind", compile_it)
    ready: Any = FakeForm()
    assert _Form(ready, (16, 32)).table == 0
    with pytest.raises(AssertionError, match="nobody would use it"):
        _Form(ready, (16,))


@needs_compiler
def test_more_results_than_there_is_room_for_go_the_general_way(captured: CapturedGraph) -> None:
    captured._outputs = (torch.zeros(4),) * (MOST_OUTPUTS + 1)
    assert captured.quick(number(0)) != captured._quick
