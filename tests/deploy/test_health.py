"""Health: every call that was not answered as planned is counted, told, and with strict refused."""

from __future__ import annotations

import copy
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy.health import MOST_REASONS, OTHER_REASONS, Event, Monitor
from ampopt.deploy.new_calls import MOST_RETRIES
from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import AmpoptError, InputError, StrictError, is_passing
from tests.helpers import with_statistics
from tests.support.planted import Planted, module_of

WRONG = Planted("wrong", factor=1.5)


def net() -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))


def image(height: int = 8) -> Tensor:
    return torch.randn(1, 3, height, 8, generator=torch.Generator().manual_seed(0))


def heard(fast: OptimizedModule) -> list[Event]:
    """What is told from now on."""
    events: list[Event] = []
    fast.on_health(events.append)
    return events


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def test_calls_of_programs_are_no_events() -> None:
    fast = module_of(net(), image())
    events = heard(fast)
    for _ in range(3):
        fast(image())
        fast(image().to(memory_format=torch.channels_last))
    assert fast.health.is_good
    assert fast.health.since <= fast.health.since
    assert events == []


def test_a_late_capture_is_told_once_and_a_prepared_one_not() -> None:
    fast = module_of(net(), image())
    events = heard(fast)
    fast.prepare((1, 3, 10, 8))
    for height in (9, 9, 10):
        fast(image(height))
    assert events == [Event("capture", events[0].reason, "float32[1, 3, 9, 8] on cpu")]
    assert (fast.health.late_captures, fast.health.served_by_original) == (1, 0)


def test_every_call_that_the_original_serves_is_counted_with_its_reason() -> None:
    fast = module_of(net(), image(), passes=(WRONG,), max_captures=1)
    events = heard(fast)
    for height in (9, 9, 10, 9):
        fast(image(height))
    assert kinds(events) == ["original"] * 4
    assert sorted(fast.health.reasons.values()) == [1, 3]
    often = next(reason for reason, count in fast.health.reasons.items() if count == 3)
    assert often.startswith("the optimized program is wrong for this call")
    assert fast.health.served_by_original == 4
    assert not fast.health.is_good


@pytest.mark.parametrize("bad", [image().double(), image().to("meta"), image().to_sparse()])
def test_a_refusal_is_counted_and_spends_nothing(bad: Tensor) -> None:
    fast = module_of(net(), image())
    events = heard(fast)
    for _ in range(2):
        with pytest.raises(InputError):
            fast(bad)
    assert kinds(events) == ["refusal"] * 2
    assert fast.health.refusals == 2
    assert (fast._new.captures, len(fast._calls.answers)) == (0, 1)


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "nothing": ((), {}),
    "one too many": ((image(), image()), {}),
    "None": ((None,), {}),
    "an array": ((np.zeros((1, 3, 8, 8), np.float32),), {}),
    "a list": (([image()],), {}),
    "another name": ((), {"z": image()}),
    "too few dimensions": ((torch.zeros(8),), {}),
    "other channels": ((torch.zeros(1, 5, 8, 8),), {}),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_raises_what_the_original_raises_and_leaves_nothing_behind(
    name: str, strict: bool
) -> None:
    model = net()
    fast = module_of(model, image(), strict=strict)
    args, kwargs = CALLS[name]
    with pytest.raises((TypeError, RuntimeError)) as expected:
        model(*args, **kwargs)
    for _ in range(2):
        with pytest.raises(type(expected.value)) as found:
            fast(*args, **kwargs)
        assert str(found.value) == str(expected.value)
    assert (fast._new.captures, len(fast._calls.answers), len(fast._calls.failures)) == (0, 1, 0)
    with pytest.raises(InputError, match="the model fails on the call to prepare: "):
        fast.prepare_call(args, kwargs)


def test_strict_raises_in_place_of_serving_the_original() -> None:
    model = net()
    fast = module_of(model, image(), max_captures=1, strict=True, passes=(WRONG,))
    for height in (9, 10, 9, 10):
        with pytest.raises(StrictError, match=r"float32\[1, 3, \d+, 8\] on cpu, because .*: call prepare"):
            fast(image(height))
    assert (fast.health.refusals, fast.health.served_by_original) == (4, 0)
    assert issubclass(StrictError, AmpoptError)
    fast.strict = False
    assert torch.equal(fast(image(9)), model(image(9)))


def test_strict_lets_late_captures_happen_and_a_copy_is_strict_too() -> None:
    fast = copy.deepcopy(module_of(net(), image(), strict=True))
    assert fast.strict
    fast(image(9))
    assert fast.health.late_captures == 1


def test_where_nothing_was_faster_the_original_is_what_was_planned() -> None:
    model = net()
    fast = module_of(model, image(), serve_original=True, strict=True)
    for height in (8, 9):
        assert torch.equal(fast(image(height)), model(image(height)))
    assert fast.health.chose_original
    assert fast.health.is_good
    assert not module_of(model, image()).health.chose_original
    fast.prepare((1, 3, 10, 8))
    assert not fast._calls.answers


class _Failing:
    """Fails so many times, and then lets the real one do it."""

    def __init__(self, real: Any, error: BaseException, times: int) -> None:
        self.real, self.error, self.left, self.calls = real, error, times, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.left == 0:
            return self.real(*args, **kwargs)
        self.left -= 1
        raise self.error


def wrapped(cause: Exception) -> Exception:
    try:
        raise AmpoptError("the model cannot be captured") from cause
    except AmpoptError as error:
        return error


PASSING = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    OSError(28, "No space left on device"),
    TimeoutError("the lock"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    wrapped(MemoryError()),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_may_pass_is_known(error: Exception) -> None:
    assert is_passing(error)


@pytest.mark.parametrize("error", [ValueError("wrong"), InputError("wrong"), RuntimeError("no kernel")])
def test_what_stays_wrong_is_known(error: Exception) -> None:
    assert not is_passing(error)


@pytest.mark.parametrize("error", [PASSING[0], PASSING[-1]], ids=repr)
def test_what_may_pass_is_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    fast = module_of(model, image(), max_captures=1)
    failing = _Failing(fast._maker.executable, error, MOST_RETRIES - 1)
    monkeypatch.setattr(fast._maker, "executable", failing)
    for _ in range(MOST_RETRIES + 2):
        assert torch.allclose(fast(image(9)), model(image(9)), atol=1e-5)
    assert failing.calls == MOST_RETRIES
    assert fast.health.served_by_original == MOST_RETRIES - 1
    assert fast.health.late_captures == 1
    assert not fast._calls.failures


@pytest.mark.parametrize("error", PASSING[:1])
def test_what_never_passes_is_left_to_the_original(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = module_of(net(), image())
    failing = _Failing(fast._maker.executable, error, 100)
    monkeypatch.setattr(fast._maker, "executable", failing)
    for _ in range(MOST_RETRIES + 3):
        fast(image(9))
    assert failing.calls == MOST_RETRIES
    assert fast.health.served_by_original == MOST_RETRIES + 3
    monkeypatch.undo()
    fast.prepare(image(9))
    fast(image(9))
    assert fast.health.served_by_original == MOST_RETRIES + 3, "prepare is another chance"


def test_what_is_wrong_for_good_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = module_of(net(), image())
    failing = _Failing(fast._maker.executable, RuntimeError("a kernel for this shape does not exist"), 100)
    monkeypatch.setattr(fast._maker, "executable", failing)
    for _ in range(3):
        fast(image(9))
    assert failing.calls == 1


def test_an_interrupted_capture_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = module_of(net(), image(), max_captures=1)
    monkeypatch.setattr(fast._maker, "executable", _Failing(fast._maker.executable, KeyboardInterrupt(), 1))
    with pytest.raises(KeyboardInterrupt):
        fast(image(9))
    fast(image(9))
    assert (fast.health.served_by_original, fast.health.late_captures) == (0, 1)


def test_a_callback_may_fail_call_the_module_and_be_ended(caplog: pytest.LogCaptureFixture) -> None:
    fast = module_of(net(), image(), max_captures=0)
    events: list[Event] = []

    def callback(event: Event) -> None:
        events.append(event)
        with ThreadPoolExecutor(1) as pool:  # another thread: whoever held the lock would wait for ever
            pool.submit(fast, image()).result(timeout=20)
            assert pool.submit(lambda: fast.health.served_by_original).result(timeout=20) == len(events)
        raise ValueError("the supervisor's own mistake")

    stop = fast.on_health(callback)
    later = heard(fast)
    fast(image(9))
    assert len(events) == len(later) == 1
    assert "a callback of on_health failed" in caplog.text
    stop()
    stop()
    fast(image(9))
    assert (len(events), len(later)) == (1, 2)


def test_the_counts_of_many_threads_add_up() -> None:
    fast = module_of(net(), image(), max_captures=0)
    fast(image(9))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fast, [image(9)] * 99))
    assert fast.health.served_by_original == sum(fast.health.reasons.values()) == 100


def test_reasons_are_bounded() -> None:
    monitor = Monitor()
    for number in range(2 * MOST_REASONS):
        monitor.note(Event("original", f"reason {number}", "nothing"))
    reasons = monitor.health().reasons
    assert len(reasons) == MOST_REASONS + 1
    assert reasons[OTHER_REASONS] == MOST_REASONS


def test_the_health_of_two_is_the_sum() -> None:
    one, other = Monitor(chose_original=True), Monitor()
    one.note(Event("refusal", "a", ""))
    for monitor in (one, other):
        monitor.note(Event("original", "b", ""))
    both = one.health() + other.health()
    assert (both.refusals, both.served_by_original, both.reasons) == (1, 2, {"b": 2})
    assert both.since == min(one.health().since, other.health().since)
    assert not both.chose_original


def test_prepare_from_several_threads_makes_each_program_once() -> None:
    fast = module_of(net(), image())
    barrier = threading.Barrier(3)

    def prepare(height: int) -> None:
        barrier.wait(timeout=20)
        with torch.inference_mode():
            fast.prepare((1, 3, height, 8))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(prepare, (9, 9, 10)))
    assert fast._calls.programs == 3
    for height in (8, 9, 10):
        fast(image(height))
    assert fast.health.is_good


def test_a_call_of_another_structure_is_not_judged_by_the_place_of_its_tensors() -> None:
    class Optional(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None, *, rows: Tensor) -> Tensor:
            x = x[rows]
            return x if mask is None else x * mask

    model, x, rows = Optional(), torch.randn(4, 3), torch.tensor([0, 2])
    fast = module_of(Reordered(model), x, rows)
    mask = torch.tensor([True, False, True])
    assert torch.equal(fast(x, mask, rows), model(x, mask, rows=rows))


class Reordered(nn.Module):
    """Two or three positional arguments, the rows last."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        found: Tensor = self.inner(x, *rest[:-1], rows=rest[-1])
        return found


def test_the_log_says_that_it_is_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = module_of(net(), image())
    monkeypatch.setattr(
        fast._maker, "executable", _Failing(fast._maker.executable, MemoryError("none left"), 100)
    )
    with caplog.at_level(logging.WARNING, "ampopt"):
        for _ in range(MOST_RETRIES):
            fast(image(9))
    said = [record.getMessage() for record in caplog.records if record.name == "ampopt"]
    assert [text.endswith("(it is tried again)") for text in said] == [True] * (MOST_RETRIES - 1) + [False]
