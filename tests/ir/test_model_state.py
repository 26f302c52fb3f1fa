"""What a model remembers: found wherever it is kept, named, and lifted where it lies in a buffer."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import CaptureError
from ampopt.ir.capture import capture
from ampopt.ir.model_copy import private_copy, working_copy
from ampopt.ir.model_differences import differences
from tests.helpers import Model
from tests.support.planted import captured_of

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
GLOBALS: dict[str, Any] = {}


class Memory:
    """An object with a tensor, of a class with slots."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = torch.zeros(())


class Keeping(nn.Module):
    """A convolution, and all kinds of places to remember something in."""

    shared = torch.zeros(())

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 3, 3, padding=1), function
        self.inner = nn.Identity()
        self.inner.h = torch.zeros(())
        self.h, self.largest, self.peak = torch.zeros(1, 3, 8, 8), torch.zeros(()), torch.zeros(())
        self.frames: list[Tensor] = []
        self.last: dict[str, Any] = {"y": 0.0}
        self.window: collections.deque[Tensor] = collections.deque(maxlen=2)
        self.memory, self.numbers = Memory(), itertools.cycle([1.0, 2.0, 3.0])
        self.array, self.calls, self.previous = np.zeros(1), 0, None
        self.generator = random.Random(0)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(self, x, self.conv(x))
        return out


def _attribute(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.h = y + 0.5 * m.h
    return m.h  # type: ignore[no-any-return]


def _in_place(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.h.mul_(0.5).add_(y.detach())
    return m.h + 1  # type: ignore[no-any-return]


def _of_a_submodule(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.inner.h = m.inner.h * 0.9 + y.mean()
    return y + m.inner.h  # type: ignore[no-any-return]


def _list(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.frames.append(y)
    return sum(m.frames) / len(m.frames)  # type: ignore[no-any-return]


def _dict(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.last["y"] = y + 0.1 * m.last["y"]
    return m.last["y"]  # type: ignore[no-any-return]


def _deque(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.window.append(y)
    return torch.stack(list(m.window)).mean(0)


def _object(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.memory.value = m.memory.value + y.mean()
    return y * m.memory.value  # type: ignore[no-any-return]


def _iterator(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return y * next(m.numbers)  # type: ignore[no-any-return]


def _array(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.array += 1.0
    return y * float(m.array[0])


def _first_frame(m: Any, x: Tensor, y: Tensor) -> Tensor:
    if m.previous is None:
        m.previous = y
    return y - m.previous  # type: ignore[no-any-return]


def _largest_so_far(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.largest = torch.maximum(m.largest, y.max())
    return y / m.largest  # type: ignore[no-any-return]


def _rarely_read(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.calls += 1
    return y if m.calls < 100 else y * 0


def _rarely_large(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.peak = torch.maximum(m.peak, y.max())
    return torch.where(m.peak > 1e6, 0 * y, y)


LIFTED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "attribute": (_attribute, ("h",)),
    "in place": (_in_place, ("h",)),
    "of a submodule": (_of_a_submodule, ("inner.h",)),
    "dict": (_dict, ("last['y']",)),
    "deque": (_deque, ("window[0]", "window[1]")),
    "first frame": (_first_frame, ("previous",)),
    "largest so far": (_largest_so_far, ("largest",)),
    "rarely large": (_rarely_large, ("peak",)),
}
REFUSED = {
    "frames": _list,
    "memory": _object,
    "numbers": _iterator,
    "array": _array,
    "calls": _rarely_read,
}
FUNCTIONS = [*(function for function, _ in LIFTED.values()), *REFUSED.values()]


@pytest.mark.parametrize("name", LIFTED)
def test_a_state_of_tensors_becomes_inputs_and_outputs_wherever_it_lies(name: str) -> None:
    function, places = LIFTED[name]
    _, captured = captured_of(Keeping(function).eval(), X)
    assert captured.state == places
    assert captured.lifted is not None
    assert captured.lifted.from_start is (name not in ("dict", "deque", "first frame"))
    twin, state = private_copy(captured.lifted.model), captured.initial_state
    for seed in range(10):
        x = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed))
        out, *left = captured.program.run(x, *state)
        state = tuple(left)
        assert torch.allclose(out, twin(x), atol=1e-5)
        for ours, theirs in zip(state, captured.lifted.read(twin), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_is_more_than_tensors_is_found_and_its_attribute_named(name: str) -> None:
    model = Keeping(REFUSED[name]).eval()
    with pytest.raises(CaptureError, match=f"it changes its attribute {name}.*, and reads it"):
        captured_of(model, X)


class Private:
    """An object whose class keeps a tensor in a slot of a private name."""

    __slots__ = ("__value",)

    def __init__(self) -> None:
        self.__value = torch.zeros(())

    def follow(self, y: Tensor) -> Tensor:
        """An exponential average."""
        self.__value = 0.5 * self.__value + y.mean()
        return self.__value


def test_attributes_are_called_as_the_user_calls_them() -> None:
    model = Keeping(lambda m, _, y: y * m.memory.follow(y)).eval()
    model.memory = Private()  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"its attribute memory\._Private__value when it is called"):
        captured_of(model, X)
    for name in ("array", "numbers"):
        with pytest.raises(CaptureError, match=f"its attribute {name} when it is called"):
            captured_of(Keeping(REFUSED[name]).eval(), X)


SEVERAL: dict[str, Callable[[], Any]] = {
    "array": lambda: np.zeros(1),
    "iterator": lambda: itertools.count(),
    "generator": lambda: random.Random(0),
}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", SEVERAL)
def test_the_last_of_several_of_a_kind_is_seen(kind: str, count: int) -> None:
    """Comparing the first ones made parts that were gone when those of the next had their addresses."""

    def changes(m: Any, x: Tensor, y: Tensor) -> Tensor:
        last = m.several[-1]
        if kind == "array":
            last += 1
        number = last[0] if kind == "array" else next(last) if kind == "iterator" else last.random()
        return y * 0 if number > 1e9 else y

    model = Keeping(changes).eval()
    model.several = [SEVERAL[kind]() for _ in range(count)]  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=rf"its attribute several\[{count - 1}\] when it is called"):
        captured_of(model, X)


def _class_attribute(m: Any, x: Tensor, y: Tensor) -> Tensor:
    Keeping.shared = Keeping.shared + 1
    return y * Keeping.shared


def _global(m: Any, x: Tensor, y: Tensor) -> Tensor:
    GLOBALS["largest"] = max(GLOBALS.get("largest", 0.0), float(x.abs().max()))
    return y / GLOBALS["largest"]  # type: ignore[no-any-return]


def _random(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return y * random.random()


def _own_generator(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return y * m.generator.random()  # type: ignore[no-any-return]


def _numpy(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return y + float(np.random.rand())


@pytest.mark.parametrize("function", [_class_attribute, _global, _random, _own_generator, _numpy])
def test_what_answers_equal_inputs_otherwise_is_found(function: Any) -> None:
    with pytest.raises(
        CaptureError, match=r"equal inputs get other answers|cannot capture|attribute (generator|Keeping)"
    ):
        captured_of(Keeping(function).eval(), X)


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (lambda y: (each for each in [y]), "generator"),
        (lambda y: {"a": y, "b": iter([y])}, "list_iterator"),
        (lambda y: (y, Memory()), "Memory"),
    ],
)
def test_a_result_that_cannot_be_compared_is_named_and_no_state(result: Any, kind: str) -> None:
    message = f"its result holds a value of type {kind}, which cannot be compared$"
    with pytest.raises(CaptureError, match=message):
        captured_of(Keeping(lambda m, x, y: result(y)).eval(), X)


def _stores_a_feature(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.h = y
    return y.relu()


def _makes_a_table(m: Any, x: Tensor, y: Tensor) -> Tensor:
    if m.table is None:
        m.table = torch.arange(8.0)
    return y + m.table  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [_stores_a_feature, _makes_a_table])
def test_what_is_written_before_it_is_read_and_what_never_changes_is_no_state(function: Any) -> None:
    model = Keeping(function).eval()
    original, captured = captured_of(model, X)
    assert torch.equal(captured.program.run(X)[0], private_copy(model)(X))
    assert differences(model, original) == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_capture_leaves_the_model_that_it_is_given_as_it_was(function: Any) -> None:
    original = private_copy(Keeping(function))
    pristine = private_copy(original)
    with contextlib.suppress(CaptureError):
        capture(original, (X,), {}, X.device)
    assert differences(pristine, original) == []


def test_a_working_copy_shares_parameters_and_nothing_else() -> None:
    model: Any = Keeping(_attribute)
    model.register_buffer("seen", torch.zeros(1))
    copied: Any = working_copy(model)
    assert all(a is b for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    copied(X)
    copied.seen.add_(1)
    copied.frames.append(X)
    assert float(model.seen) == 0.0
    assert not model.frames
    assert not model.h.any()


def _lifted(m: Any, x: Tensor) -> Tensor:
    m.h = m.conv(x) + 0.5 * m.h
    m.count += 1
    out: Tensor = m.h * m.count
    return out


def test_state_in_buffers_becomes_inputs_and_outputs() -> None:
    model = Model(
        _lifted, conv=nn.Conv2d(3, 3, 3, padding=1), h=torch.zeros(1, 3, 8, 8), count=torch.zeros(())
    ).eval()
    original, captured = captured_of(model, X)
    assert captured.state == ("h", "count")
    eager, state = private_copy(model), captured.initial_state
    for _ in range(3):
        out, *left = captured.program.run(X, *state)
        state = tuple(left)
        assert torch.allclose(out, eager(X))
        assert torch.allclose(state[0], eager.get_buffer("h"))
    assert float(original.get_buffer("count")) == 0.0


def _grows(m: Any, x: Tensor) -> Tensor:
    m.h = torch.cat([m.h, m.conv(x).mean()[None]])
    return m.conv(x) + m.h.mean()  # type: ignore[no-any-return]


def _shares(m: Any, x: Tensor) -> Tensor:
    m.h.add_(1)
    out: Tensor = m.conv(x) + m.view
    return out


def test_buffers_that_cannot_be_lifted_are_refused_by_name() -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    with pytest.raises(CaptureError, match=r"buffer h from torch.float32 \[1\] to"):
        captured_of(Model(_grows, conv=conv, h=torch.zeros(1)).eval(), X)
    buffer = torch.zeros(2, 8)
    with pytest.raises(CaptureError, match="buffer h, also the memory of view"):
        captured_of(Model(_shares, conv=conv, h=buffer, view=buffer[0]).eval(), X)


@pytest.mark.parametrize("made", [lambda y: str(y.sum()), repr], ids=["text of a sum", "text of a tensor"])
def test_what_is_no_tensor_and_depends_on_the_inputs_values_is_no_constant(made: Any) -> None:
    model = Model(lambda m, x: (m.linear(x), made(x), "word"), linear=nn.Linear(3, 3))
    with pytest.raises(CaptureError, match="its result holds what is no tensor and depends"):
        captured_of(model, torch.randn(2, 3))
