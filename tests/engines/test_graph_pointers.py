"""Addresses in a graph's nodes: every kind of node is read, and every address moves, with its offset."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.engines.graph_pointers import Operands, ReadyGraph
from ampopt.engines.quick_call import MOST_OUTPUTS, Answer, bind, plain
from ampopt.system.native import CompilerError
from tests.support.compiler import needs_compiler
from tests.support.fake_driver import (
    CONTEXT,
    GRAPH,
    KEPT,
    READY,
    STREAM,
    FakeDriver,
    copying,
    filling,
    kernel,
    of,
    packed,
    words,
)


@pytest.fixture
def tensor() -> Tensor:
    return torch.zeros(16)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver([])
    monkeypatch.setattr("ampopt.system.cuda_driver.driver", lambda: fake)
    monkeypatch.setattr("ampopt.engines.graph_pointers.driver", lambda: fake)
    yield fake
    gc.collect()  # while there still is a driver to destroy graphs with
    KEPT.clear()


def captured() -> Any:
    """A graph that PyTorch has captured."""
    return SimpleNamespace(raw_cuda_graph=lambda: GRAPH)


def read(inputs: Sequence[Tensor] = (), outputs: Sequence[Tensor] = ()) -> ReadyGraph:
    """Such a graph, made ready to run."""
    return ReadyGraph(captured(), Operands(captured(), inputs, outputs))


def nodes(ready: ReadyGraph) -> list[int]:
    """How many nodes use each input and output."""
    return [len(use.nodes) for use in ready._uses]


def test_addresses_in_every_kind_of_node_move_with_their_offsets(driver: FakeDriver, tensor: Tensor) -> None:
    here, there = tensor.data_ptr(), 0x7000_0000_0000
    driver.nodes += [
        (0, kernel(driver, of(here), b"\1\2\3\4", of(5, here + 8, 6))),
        (0, packed(of(7, here + 60))),
        (1, copying(here, 99)),
        (2, filling(here + 16)),
        (5, None),
        (0, kernel(driver, of(here), by_handle=True)),
    ]
    ready = read([tensor])
    assert (ready.addresses, nodes(ready)) == ((here,), [5])
    ready.move((there,))
    assert ready.addresses == (there,)
    assert driver.set[1] == of(there) + b"\1\2\3\4" + of(5, there + 8, 6)
    assert driver.set[2] == of(7, there + 60)
    assert (words(driver.set[3])[6], words(driver.set[3])[17]) == (there, 99)
    assert words(driver.set[4]) == [there + 16, 0, 0, 0, 0]
    assert words(driver.set[6]) == [there]
    ready.move((here,))
    assert driver.set[1] == of(here) + b"\1\2\3\4" + of(5, here + 8, 6)


def test_what_lies_beside_a_tensor_is_not_its_own(driver: FakeDriver, tensor: Tensor) -> None:
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    driver.nodes += [(0, kernel(driver, of(start - 1, end, 0))), (0, kernel(driver, b"ab"))]
    ready = read([tensor, torch.empty(0)])
    assert nodes(ready) == [0, 0]
    ready.move((1, 2))
    assert driver.set == {}


def test_a_result_is_what_the_last_node_writes_in_its_memory(driver: FakeDriver, tensor: Tensor) -> None:
    here, other = tensor.data_ptr(), torch.zeros(16)
    driver.nodes += [
        (0, kernel(driver, of(other.data_ptr(), here))),
        (0, kernel(driver, of(here, 77))),
        (0, kernel(driver, of(77, here))),
        (0, kernel(driver, of(77, 78))),
    ]
    ready = read([other], [tensor])
    assert nodes(ready) == [1, 1]
    ready.move((other.data_ptr(), 1 << 40))
    assert {node: words(data) for node, data in driver.set.items()} == {3: [77, 1 << 40]}


def test_a_launch_finds_the_context_and_a_graph_is_destroyed_in_it(
    driver: FakeDriver, tensor: Tensor
) -> None:
    ready = read([tensor])
    ready.launch(STREAM)
    driver.contexts[:] = [0xAA]
    ready.launch(STREAM)  # another one is current
    assert driver.launched == [CONTEXT, 0xAA, CONTEXT]
    assert driver.contexts == [CONTEXT]  # as `move` wants it
    driver.contexts[:] = [0xAA]
    gc.collect()
    assert driver.destroyed == []
    del ready
    gc.collect()
    assert (driver.contexts, driver.destroyed) == ([0xAA], [READY])


def test_two_tensors_in_one_node_move_apart(driver: FakeDriver, tensor: Tensor) -> None:
    other = torch.zeros(4)
    driver.nodes += [(0, kernel(driver, of(tensor.data_ptr(), other.data_ptr())))]
    ready = read([tensor, other])
    ready.move((1 << 40, 1 << 41))
    assert words(driver.set[1]) == [1 << 40, 1 << 41]
    ready.move((1 << 42, 1 << 41))
    assert words(driver.set[1]) == [1 << 42, 1 << 41]


def test_instances_of_one_graph_move_apart(driver: FakeDriver, tensor: Tensor) -> None:
    other = torch.zeros(4)
    driver.nodes += [(0, kernel(driver, of(tensor.data_ptr(), other.data_ptr())))]
    operands = Operands(captured(), [tensor], [other])
    first, second = (ReadyGraph(captured(), operands) for _ in range(2))
    first.move((1 << 40, 1 << 41))
    second.move((tensor.data_ptr(), 1 << 42))
    assert words(driver.set[1]) == [tensor.data_ptr(), 1 << 42]
    first.move((1 << 40, 1 << 43))
    assert words(driver.set[1]) == [1 << 40, 1 << 43]


def test_a_move_that_is_refused_is_not_taken_for_done(driver: FakeDriver, tensor: Tensor) -> None:
    driver.nodes += [(0, kernel(driver, of(tensor.data_ptr())))]
    ready = read([tensor])
    driver.refuses = True
    with pytest.raises(RuntimeError, match="refuses, with status 700"):
        ready.move((1 << 40,))
    driver.refuses = False
    driver.set.clear()
    ready.move((tensor.data_ptr(),))  # nobody knows where it was
    assert words(driver.set[1]) == [tensor.data_ptr()]


def test_addresses_that_have_not_changed_are_not_sent(driver: FakeDriver, tensor: Tensor) -> None:
    driver.nodes += [(0, kernel(driver, of(tensor.data_ptr())))]
    read([tensor]).move((tensor.data_ptr(),))
    assert driver.set == {}


def test_nodes_whose_operands_are_unknown_are_refused(driver: FakeDriver) -> None:
    driver.nodes += [(4, None)]
    with pytest.raises(RuntimeError, match="node of type 4"):
        read()


def test_a_thread_without_cuda_cannot_read_nodes(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (0, 0))
    with pytest.raises(RuntimeError, match="has not used CUDA yet"):
        read()


def test_a_function_that_cpp_is_to_call_and_that_is_not_there_is_a_refusal(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "cuGetProcAddress", lambda *_: (0, 0, 1))
    with pytest.raises(RuntimeError, match="driver has no cuGraphLaunch"):
        ReadyGraph(captured())


@needs_compiler
@pytest.mark.parametrize("kind", ["kernel", "packed", "copy", "fill"])
def test_cpp_moves_and_launches_what_is_in_the_table(driver: FakeDriver, tensor: Tensor, kind: str) -> None:
    x, made = torch.zeros(4), list[Tensor]()
    here, start = tensor.data_ptr(), x.data_ptr()
    driver.nodes += [(0, kernel(driver, of(start + 8, 4)))]
    driver.nodes += {
        "kernel": [(0, kernel(driver, of(3), of(start, here + 8)))],
        "packed": [(0, packed(of(start, here + 8)))],
        "copy": [(1, copying(start, here + 8))],
        "fill": [(2, filling(here + 8))],
    }[kind]
    operands = Operands(captured(), [x], [tensor])
    ready, other = (ReadyGraph(captured(), operands) for _ in range(2))
    form = SimpleNamespace(outputs=(tensor,), inference=False, table=ctypes.addressof(ready.table))

    def fresh() -> Tensor:
        made.append(torch.zeros(16))
        return made[-1]

    answer = make_answer(form, {(start,): form}, fresh)
    for count in range(1, 4):
        other.move((1 << 40, 1 << 41))  # another instance writes into the same parameters
        assert answer(x)[0] is (tensor, *made)[count - 1]
        assert driver.launched == [CONTEXT] * count
        there = made[-1].data_ptr()
        assert ready.addresses == (start, there)
        assert there + 8 in words(driver.set[2])
        assert 1 << 40 not in words(driver.set[2])
        assert form.outputs == (made[-1],)
    ready.move((start, here))
    assert here + 8 in words(driver.set[2])


@needs_compiler
def test_cpp_takes_a_refusal_for_not_done(driver: FakeDriver, tensor: Tensor) -> None:
    x = torch.zeros(4)
    driver.nodes += [(0, kernel(driver, of(x.data_ptr(), tensor.data_ptr())))]
    ready = read([x], [tensor])
    form = SimpleNamespace(outputs=(tensor,), inference=False, table=ctypes.addressof(ready.table))
    answer = make_answer(form, {(x.data_ptr(),): form}, lambda: torch.zeros(16))
    driver.refuses = True
    assert answer(x)[0] is tensor
    assert (form.outputs, ready.addresses) == (None, (x.data_ptr(), 0))
    assert answer(x) == ["the other way"]


class _Graph:
    """A captured graph whose whole calls can be told from the short ones."""

    raw_stream = STREAM

    def __call__(self, tensor: Tensor) -> tuple[str]:
        return ("the other way",)


def make_answer(form: Any, forms: dict[tuple[int, ...], Any], fresh: Callable[[], Tensor]) -> Answer:
    """What `CapturedGraph` binds, around a form."""
    lock, graph, make = threading.Lock(), _Graph(), bind()
    assert make is not None
    parts = (torch.is_tensor, list, lock.acquire, lock.release, graph)
    now = (lambda index: STREAM, lambda: 0, 0, torch.is_inference_mode_enabled)
    return make((*parts, forms, (fresh,), *now))


@needs_compiler
def test_cpp_is_given_as_much_as_it_takes() -> None:
    make = bind()
    assert make is not None
    with pytest.raises(TypeError, match="a tuple of 11"):
        make(())
    with pytest.raises(TypeError, match="a tuple of 11"):
        make([0] * 11)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too many outputs"):
        make((*[None] * 6, (None,) * (MOST_OUTPUTS + 1), *[None] * 4))
    make((*[None] * 6, (None,) * MOST_OUTPUTS, *[None] * 4))


def test_without_a_compiler_calls_go_through_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object, **__: object) -> object:
        raise CompilerError("there is no C++ compiler")

    monkeypatch.setattr("ampopt.engines.quick_call.library", missing)
    with caplog.at_level("INFO", "ampopt"):
        assert bind.__wrapped__() is None
    assert "through Python" in caplog.text
    assert "there is no C++ compiler" in caplog.text
    answer = plain(lambda tensor: (tensor, 1))(torch.is_tensor, list)  # type: ignore[arg-type, return-value]
    assert answer("nothing") is NotImplemented
    assert answer(x := torch.zeros(1)) == [x, 1]
