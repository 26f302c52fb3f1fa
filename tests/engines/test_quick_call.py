"""The shortest way to an answer: in C++ for a captured graph, through Python elsewhere."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
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
    STREAM,
    FakeDriver,
    captured,
    copying,
    filling,
    kernel,
    of,
    packed,
    words,
)


def test_python_answers_what_is_recognized_and_nothing_else() -> None:
    asked: list[object] = []

    def same(thing: object) -> bool:
        asked.append(thing)
        return isinstance(thing, Tensor) and thing.dim() == 1

    answer = plain(lambda tensor: (tensor + 1, tensor))(same, lambda outputs: {"sum": outputs[0]})
    assert answer(torch.ones(2))["sum"].tolist() == [2, 2]
    for other in (torch.ones(2, 2), "nothing", None):
        assert answer(other) is NotImplemented
    assert len(asked) == 4


def test_an_error_of_the_program_is_not_taken_for_another_kind_of_call() -> None:
    def fail(tensor: Tensor) -> tuple[Tensor, ...]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        plain(fail)(torch.is_tensor, list)(torch.ones(1))


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
    ready = ReadyGraph(captured(), Operands(captured(), [x], [tensor]))
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


@needs_compiler
def test_it_is_compiled_once() -> None:
    assert bind() is bind() is not None


def test_a_library_that_does_not_load_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "quick_call.so"
    file.write_bytes(b"no library")
    monkeypatch.setattr("ampopt.engines.quick_call.library", lambda *_, **__: file)
    with caplog.at_level("INFO", "ampopt"):
        assert bind.__wrapped__() is None
    assert "through Python, a few microseconds longer: ImportError: " in caplog.text
