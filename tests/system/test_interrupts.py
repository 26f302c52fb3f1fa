"""Ctrl-C at any time: a module that is right, or an error that says that there is none yet."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.errors import AmpoptError, Interrupted
from ampopt.measure.entry import ORIGINAL
from ampopt.search.lane_search import LaneSearch
from ampopt.search.optimizer import Optimizer
from ampopt.search.pair_timer import PairTimer
from ampopt.search.partly_optimized import PartlyOptimizedModule
from ampopt.search.regions import PartwiseOptimizer
from ampopt.system.interrupts import check_interrupted, held, interruptible, was_interrupted, watched
from tests.support import snapshot
from tests.support.planted import NO_ENGINES, Planted, rewriting

FOLDER, WATCH = os.path.dirname(ampopt.__file__), "interrupts.py"
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def wait_for_it() -> None:
    """Until a signal that strikes again a little later has struck."""
    threading.Event().wait(2.0)


def test_one_outside_of_an_interruptible_block_waits_for_the_next() -> None:
    reached = []
    with watched():
        ctrl_c()
        reached.append("after it")
        with pytest.raises(KeyboardInterrupt), interruptible():
            reached.append("never")
    assert reached == ["after it"]


def test_one_in_an_interruptible_block_is_raised_at_once() -> None:
    reached = []
    with watched(), pytest.raises(KeyboardInterrupt), interruptible():  # noqa: PT012
        ctrl_c()
        reached.append("never")
    assert reached == []


def test_one_in_a_held_block_waits_for_its_end() -> None:
    reached = []
    with watched(), pytest.raises(KeyboardInterrupt), interruptible():  # noqa: PT012
        with held():
            ctrl_c()
            check_interrupted()
            reached.append("held")
        check_interrupted()
        reached.append("never")
    assert reached == ["held"]


def test_one_while_a_context_manager_is_left_strikes_after_that() -> None:
    reached = []

    @contextlib.contextmanager
    def switched() -> Iterator[None]:
        yield
        ctrl_c()
        reached.append("put back")

    with watched(), pytest.raises(KeyboardInterrupt), interruptible():  # noqa: PT012
        with switched():
            pass
        wait_for_it()
        reached.append("never")
    assert reached == ["put back"]


class _InFinalizer:
    def __del__(self) -> None:
        ctrl_c()


def test_one_in_a_finalizer_is_not_lost() -> None:
    with watched(), pytest.raises(KeyboardInterrupt), interruptible():  # noqa: PT012
        _InFinalizer()
        wait_for_it()
        pytest.fail("it was lost")


def swallow() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        ctrl_c()


def disguise() -> None:
    try:
        ctrl_c()
    except KeyboardInterrupt as error:
        raise SystemError("error return without exception set") from error


@pytest.mark.parametrize("hide", [swallow, disguise])
def test_one_that_is_swallowed_or_disguised_arrives_all_the_same(hide: Callable[[], None]) -> None:
    with watched(), pytest.raises(KeyboardInterrupt), interruptible():
        hide()


def test_an_error_that_was_made_of_one_is_recognized_without_signals() -> None:
    error = RuntimeError("from C++")
    error.__cause__ = KeyboardInterrupt()
    assert was_interrupted(error)
    assert not was_interrupted(RuntimeError("from C++"))
    unrelated = RuntimeError("raised by what handles one")
    unrelated.__context__ = KeyboardInterrupt()
    assert not was_interrupted(unrelated)


def test_the_handler_is_put_back_and_one_of_the_programs_own_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    with watched():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    told: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: told.append(number))
    try:
        with watched(), interruptible():
            ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == [signal.SIGINT]


def test_other_threads_are_not_watched() -> None:
    inside: list[bool] = []

    def work() -> None:
        with watched(), held():
            inside.append(True)

    with watched(), pytest.raises(KeyboardInterrupt), interruptible():  # noqa: PT012
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        inside.append(False)
        ctrl_c()  # the thread's blocks have not closed this one
        pytest.fail("it was held back")
    assert inside == [True, False]


def test_what_leaves_a_watched_block_is_ours_and_pythons() -> None:
    with pytest.raises(Interrupted, match="nothing was tried yet") as caught, watched(), interruptible():
        ctrl_c()
    assert isinstance(caught.value, AmpoptError)
    assert isinstance(caught.value, KeyboardInterrupt)


_SERVING = {Optimizer._serve.__code__, PartlyOptimizedModule.__init__.__code__}
"""What makes the result, the last of which in a call of `optimize` is its own."""


class _Striking:
    """Sends Ctrl-C at some of the calls of ampopt's functions, counted while it watches for that.

    A tracing function is called when a function is, and a profiling one at every return and in C, too.
    `served_at` is the number of the call that makes what is served: there is nothing to interrupt any more.
    """

    def __init__(self, *at: int) -> None:
        self.at, self.calls, self.served_at = at, 0, math.inf
        self._is_watched: bool | None = None
        """None after a call of what may have changed it."""

    def __enter__(self) -> _Striking:
        sys.settrace(self)
        return self

    def __exit__(self, *details: object) -> None:
        sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(FOLDER):
            return
        if name.endswith(WATCH):
            self._is_watched = None
            return
        if self._is_watched is None:
            self._is_watched = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        if self._is_watched:
            self.calls += 1
            if frame.f_code in _SERVING:
                self.served_at = self.calls
            if self.calls in self.at:
                ctrl_c()


@functools.cache
def calls_of(make: Callable[[], nn.Module]) -> int:
    """The calls of ampopt's functions in one `optimize`; TorchDynamo's first work in a process takes more."""
    for _ in range(2):
        with _Striking() as whole:
            optimize(make(), X)
    return whole.calls


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


class Branching(nn.Module):
    """No single graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = tiny(), tiny()

    def forward(self, x: Tensor) -> Tensor:
        """The second part is for positive sums only."""
        y: Tensor = self.first(x)
        return self.second(y) if y.sum() > -1 else y


@pytest.fixture
def short(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of two passes, and a budget that the clock does not spend."""
    planted = rewriting((Planted("same"), Planted("wrong", factor=2.0)))
    monkeypatch.setattr("ampopt.search.options.PIPELINE", planted)


def optimize(model: nn.Module, example: Tensor) -> Any:
    return ampopt.optimize(
        model, example, precision="fp32", exclude=NO_ENGINES, progress=False, budget_s=600.0, cache=False
    )


# Where it strikes while a generator is closed, Python swallows it and says so; it is then raised again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("make", "presses", "rounds"),
    [
        (tiny, 1, 20),
        (Branching, 1, 8),
        *((make, presses, 4) for make in (tiny, Branching) for presses in (2, 3)),
    ],
)
def test_wherever_it_strikes_there_is_a_right_module_or_an_error_of_ours(
    make: Callable[[], nn.Module], presses: int, rounds: int
) -> None:
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        expected = model(X)
    calls = calls_of(make)
    before, outcomes = snapshot.of_torch(), set()
    for number in range(rounds):
        first = 1 + number * (calls - 1) // rounds
        at = [first + 10 * press for press in range(presses)]
        striking = _Striking(*at)
        try:
            with striking:
                fast = optimize(model, X)
        except Interrupted:
            outcomes.add("error")
        else:
            with torch.no_grad():
                assert torch.allclose(fast(X), expected, atol=1e-5), at
            outcomes.add("module")
            said = [note for note in fast.report.notes if "interrupted" in note]
            has_struck = striking.calls >= first  # a busy machine takes fewer samples, and so fewer calls
            assert said or not has_struck or first >= striking.served_at, at
        assert snapshot.differences(before, snapshot.of_torch()) == [], at
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert outcomes == {"error", "module"}


def interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, times: int = 1) -> None:
    """Let the first calls of a function be interrupted; the later ones do what they did."""
    whole, left = getattr(owner, name), [times]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("place", ["prepare_call", "capture", "Optimizer"])
def test_before_there_is_anything_it_is_an_error(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_once(monkeypatch, importlib.import_module("ampopt.api"), place)
    with pytest.raises(Interrupted, match="nothing was tried yet"):
        optimize(tiny(), X)


@pytest.mark.usefixtures("short")
def test_in_the_last_comparison_it_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_once(monkeypatch, Optimizer, "_summarize")
    report = optimize(tiny(), X).report
    assert "interrupted in the last comparison" in report.notes
    assert report.verified


@pytest.mark.usefixtures("short")
def test_twice_in_the_last_comparison_it_gives_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_once(monkeypatch, Optimizer, "_summarize", times=2)
    report = optimize(tiny(), X).report
    assert report.chosen == ORIGINAL
    assert report.lanes == {}
    assert "the original answers every call" in str(report)


@pytest.mark.usefixtures("short")
def test_twice_while_the_module_is_made_it_gives_the_original(
    all_kept: contextlib.AbstractContextManager[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    with all_kept:
        interrupt_once(monkeypatch, Optimizer, "_module", times=2)
        fast = optimize(model, X)
    assert fast.report.chosen == ORIGINAL
    with torch.no_grad():
        assert torch.equal(fast(X), model(X))


@pytest.mark.usefixtures("short")
def test_in_one_region_it_ends_the_work_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_once(monkeypatch, LaneSearch, "rewrite")
    report = optimize(Branching(), X).report
    assert list(report.regions) == ["first"]
    assert "interrupted: this is the best so far" in report.notes


@pytest.mark.usefixtures("short")
def test_while_regions_are_compared_the_original_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_once(monkeypatch, PartwiseOptimizer, "_compare")
    model = Branching()
    fast = optimize(model, X)
    assert fast.report.chosen == ORIGINAL
    assert "the original runs: the last comparison was interrupted" in fast.report.notes
    with torch.no_grad():
        assert torch.equal(fast(X), model(X))


@pytest.mark.usefixtures("short")
def test_compare_tells_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = PairTimer.time, []

    def interrupted(self: PairTimer, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            ctrl_c()
        whole(self, *args)

    monkeypatch.setattr(PairTimer, "time", interrupted)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    found = ampopt.compare(
        model, torch.randn(1, 3, 8, 8), precision="fp32", exclude=NO_ENGINES, progress=False
    )
    timed = {(row.name, row.mode) for row in found.rows if row.latency is not None}
    assert ("same", "cumulative") in timed
    reasons = {row.reason for row in found.rows if (row.name, row.mode) not in timed}
    assert {reason for reason in reasons if not reason.startswith("nothing to do")} == {
        "not tried: interrupted"
    }
    assert not [note for note in found.notes if "budget_s" in note]
    assert len(calls) == 2


@pytest.mark.usefixtures("short")
def test_compare_has_nothing_to_tell_before_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_once(monkeypatch, importlib.import_module("ampopt.comparison"), "capture")
    with pytest.raises(Interrupted):
        ampopt.compare(tiny(), X, progress=False)
