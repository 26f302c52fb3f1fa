"""Frames: tensors on the host go through a model's call as it was captured and come back flat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.measure import frames
from ampopt.measure.frames import frame_call
from tests.support.planted import captured_of

CPU = torch.device("cpu")


class Nested(nn.Module):
    """Takes a list and keywords, and gives a dictionary with a constant in it."""

    def forward(self, pair: list[Tensor], scale: float, *, offset: Tensor) -> dict[str, Any]:
        return {"difference": (pair[0] - pair[1]) * scale, "name": "nested", "sum": [pair[1] + offset]}


def example() -> tuple[list[Tensor], float]:
    return [torch.zeros(2), torch.zeros(2)], 10.0


def frame(*values: float) -> list[Tensor]:
    return [torch.full((2,), value) for value in values]


def test_a_frame_fills_the_tensors_of_the_captured_call_in_order_and_constants_stay() -> None:
    model, captured = captured_of(Nested(), *example(), offset=torch.zeros(2))
    call = frame_call(model, captured, frame(5, 3, 1), CPU)
    assert [t.tolist() for t in call()] == [[20, 20], [4, 4]]


def test_the_model_gets_the_call_as_it_was_captured_with_the_frames_tensors() -> None:
    _, captured = captured_of(Nested(), *example(), offset=torch.zeros(2))
    seen = list[tuple[Any, Any]]()

    def record(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((args, kwargs))
        return torch.ones(1)

    assert [t.tolist() for t in frame_call(record, captured, frame(1, 2, 3), CPU)()] == [[1]]
    (((first, second), scale), kwargs) = seen[0]
    assert [t.tolist() for t in (first, second, kwargs.pop("offset"))] == [[1, 1], [2, 2], [3, 3]]
    assert scale == 10.0
    assert kwargs == {}


def test_every_call_takes_the_whole_frame_again_and_two_functions_have_frames_of_their_own() -> None:
    model, captured = captured_of(Nested(), *example(), offset=torch.zeros(2))
    one = frame_call(model, captured, frame(5, 3, 1), CPU)
    other = frame_call(model, captured, frame(9, 8, 0), CPU)
    found = [[float(t[0]) for t in call()] for call in (one, other, one, other)]
    assert found == [[20, 4], [10, 8], [20, 4], [10, 8]]


def test_a_frame_may_have_another_shape_than_the_example() -> None:
    model, captured = captured_of(nn.ReLU(), torch.randn(1, 3))
    (found,) = frame_call(model, captured, [torch.tensor([[-1.0, 2.0, -3.0, 4.0]])], CPU)()
    assert found.tolist() == [[0, 2, 0, 4]]


def test_what_the_model_raises_reaches_the_caller_and_the_function_works_again() -> None:
    _, captured = captured_of(nn.ReLU(), torch.randn(2))
    failures = [ZeroDivisionError("once")]

    def flaky(x: Tensor) -> Tensor:
        if failures:
            raise failures.pop()
        return x + 1

    call = frame_call(flaky, captured, [torch.ones(2)], CPU)
    with pytest.raises(ZeroDivisionError, match="once"):
        call()
    assert [t.tolist() for t in call()] == [[2, 2]]


class FakeGpu:
    """Makes torch act as if it had a GPU, on a CPU; counts what is page-locked, sent and waited for."""

    device = torch.device("cuda")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.locked, self.events = 0, list[str]()
        empty_like = torch.empty_like
        monkeypatch.setattr(Tensor, "pin_memory", lambda t: self._lock(t.clone()))
        monkeypatch.setattr(Tensor, "to", lambda t, *args, **named: self._send(t, *args, **named))

        def buffer(tensor: Tensor, *, device: str, pin_memory: bool) -> Tensor:
            assert (device, pin_memory) == ("cpu", True)
            return self._lock(empty_like(tensor))

        monkeypatch.setattr(torch, "empty_like", buffer)
        monkeypatch.setattr(frames, "synchronize", self._wait)

    def _lock(self, tensor: Tensor) -> Tensor:
        self.locked += 1
        return tensor

    def _send(self, tensor: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        assert (device, non_blocking) == (self.device, True)
        self.events.append("sent")
        return tensor

    def _wait(self, device: torch.device) -> None:
        assert device == self.device
        self.events.append("waited")


def test_with_a_gpu_both_sides_are_locked_once_and_the_next_call_overwrites_the_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, captured = captured_of(nn.ReLU(), torch.randn(2))
    made = list[Tensor]()

    def counting(x: Tensor) -> Tensor:
        gpu.events.append("ran")
        made.append(x + len(made))
        return made[-1]

    gpu = FakeGpu(monkeypatch)
    call = frame_call(counting, captured, [torch.ones(2)], gpu.device)
    (first,) = call()
    assert first.tolist() == [1, 1]
    (second,) = call()
    assert second is first
    assert first.tolist() == [2, 2]
    assert first is not made[1]
    assert gpu.events == ["sent", "ran", "waited"] * 2
    assert gpu.locked == 2
