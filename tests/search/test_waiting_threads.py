"""A search in one thread where PyTorch's threads wait for each other on a busy machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import ampopt
from ampopt.measure.headline import Load
from ampopt.search import waiting_threads
from ampopt.search.waiting_threads import fewer_threads_if_they_wait

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def load_of(average: float | None) -> Callable[[], Load | None]:
    return lambda: None if average is None else Load(average, 2)


def by_threads(several_s: float, one_s: float) -> Callable[..., float]:
    """The seconds of a call by PyTorch's threads."""
    return lambda *_: one_s if torch.get_num_threads() == 1 else several_s


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("device", "average", "several_s", "one_s", "waits"),
    [
        ("cpu", 8.0, 0.3, 0.09, True),
        ("cpu", 8.0, 0.3, 0.11, False),  # as two threads may be faster
        ("cpu", 8.0, 0.04, 0.001, False),  # which is no slow call
        ("cpu", 2.0, 0.3, 0.1, False),
        ("cpu", None, 0.3, 0.1, False),
        ("cuda", 8.0, 0.3, 0.1, False),
    ],
)
def test_threads_that_wait_are_one_within_the_block(
    device: str, average: float | None, several_s: float, one_s: float, waits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(waiting_threads, "load_now", load_of(average))
    again = by_threads(several_s, one_s)
    with fewer_threads_if_they_wait(again(), torch.device(device), again) as (call_s, told):
        assert torch.get_num_threads() == (1 if waits else 2)
        assert call_s == (one_s if waits else several_s)
        assert (told is not None) is waits
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("quota", "within"), [(1.5, 1), (2.0, 2)])
def test_threads_beyond_a_quota_are_left_out(
    quota: float, within: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_threads, "load_now", load_of(0.0))
    monkeypatch.setattr(waiting_threads, "cpu_quota", lambda: quota)
    monkeypatch.setattr(waiting_threads, "threads_within_quota", lambda threads: min(threads, int(quota)))
    again = by_threads(0.3, 0.09)
    with fewer_threads_if_they_wait(again(), CPU, again) as (_, told):
        assert torch.get_num_threads() == within
        assert (told or "").startswith(
            "a control group gives this process 1.5 CPUs' time, and" * (within == 1)
        )
        assert (told is None) is (within == 2)


@pytest.mark.usefixtures("two_threads")
def test_the_threads_are_as_before_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_threads, "load_now", load_of(8.0))

    def fail() -> float:
        assert torch.get_num_threads() == 1
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"), fewer_threads_if_they_wait(0.3, CPU, fail):
        pass
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("of", ["optimize", "compare"])
def test_a_search_among_other_work_is_made_in_one_thread_and_says_so(
    of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_threads, "load_now", load_of(8.0))
    for module in ("api", "comparison"):
        monkeypatch.setattr(f"ampopt.{module}.seconds_of_a_call", by_threads(0.9, 1e-4))
    monkeypatch.setattr("ampopt.api.CALLS_FOR_ONE_PASS", 5000)  # so that a call may be slow, and is measured
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), torch.randn(1, 3, 8, 8)
    passes = ("fold-conv-bn",)
    if of == "optimize":
        fast = ampopt.optimize(model, x, precision="fp32", passes=passes, budget_s=10, progress=False)
        notes, facts = fast.report.notes, fast.report.environment
        torch.testing.assert_close(fast(x), model(x))
    else:
        found = ampopt.compare(model, x, precision="fp32", passes=passes, budget_s=10, progress=False)
        notes, facts = list(found.notes), found.environment
    assert notes[0].startswith(
        "the machine is busy (load average 8.0 on 2 cores), and PyTorch's 2 threads wait for each other: "
        "a call takes 0.9 s, and 0.0001 s in one thread."
    )
    assert facts["threads"] == "1"
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_no_time_of_a_call_is_told_that_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_threads, "load_now", load_of(8.0))
    monkeypatch.setattr(waiting_threads, "SLOW_CALL_S", 0.0)
    monkeypatch.setattr("ampopt.system.budget.MARGIN_S", 0.0)  # its time is over before a measurement
    monkeypatch.setattr("ampopt.api.seconds_of_a_call", by_threads(0.9, 1e-6))
    fast = ampopt.optimize(nn.Linear(3, 3).eval(), torch.randn(1, 3), budget_s=1e-3, progress=False)
    assert not any("wait for each other" in note for note in fast.report.notes)
    assert fast.report.environment["threads"] == "2"
