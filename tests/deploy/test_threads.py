"""Several threads optimize, capture, call and train at once, and none of them notices the others."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.ir.capturing import capturing
from ampopt.passes import PIPELINE, FoldConvBn
from ampopt.system import turns
from ampopt.system.turns import Turn, this_thread, working_for
from tests.helpers import with_statistics
from tests.support import snapshot
from tests.support.planted import module_of

ALL_BUT_ONE = tuple({step.name for step in PIPELINE} - {"fold-conv-bn"})


def net(channels: int = 4, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, channels, 3, padding=1)
    return with_statistics(nn.Sequential(conv, nn.BatchNorm2d(channels), activation()))


def image(height: int = 8, width: int = 8) -> Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(height))


def close(actual: Any, expected: Tensor) -> bool:
    return type(actual) is Tensor and torch.allclose(actual, expected, atol=1e-5)


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    """What ampopt has logged with these words in it."""
    logged = [record.getMessage() for record in caplog.records if record.name == "ampopt"]
    return [message for message in logged if words in message]


@contextlib.contextmanager
def meanwhile(*works: Callable[[], None]) -> Iterator[None]:
    """Do each of these over and over, in a thread of its own, while the block lasts; fail where one fails."""
    over, failures, rounds = threading.Event(), list[BaseException](), [0] * len(works)

    def repeat(number: int) -> None:
        try:
            while not over.is_set():
                works[number]()
                rounds[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    for failure in failures:
        raise failure
    assert all(rounds), "one of them did nothing meanwhile"


class _Branched(nn.Module):
    """A network to be trained: modules within modules, a gradient for each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(6, 7), nn.Sequential(nn.Linear(7, 3), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x).relu())  # type: ignore[no-any-return]


class Trained:
    """A network whose gradients in one step after another are those of the same steps made alone before."""

    def __init__(self, steps: int = 5) -> None:
        self._begin, self._x = _Branched(), torch.ones(2, 6)
        self._steps = steps
        self._expected = self._gradients()

    def _gradients(self) -> list[Tensor]:
        model, found = copy.deepcopy(self._begin), list[Tensor]()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(self._steps):
            optimizer.zero_grad()
            model(self._x).square().sum().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
        return found

    def step(self) -> None:
        """The same steps again."""
        found = self._gradients()
        assert len(found) == len(self._expected)
        assert all(map(torch.equal, found, self._expected))


def _serve_new_shapes(shapes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """New shapes of three models in eight threads, beside served calls, training, prints and warnings."""
    models = [net(4), net(6, nn.GELU), net(5, nn.SiLU)]
    most = {"max_shapes": shapes, "max_captures": shapes}
    fasts = [module_of(m, image(), passes=(FoldConvBn(),), **most) for m in models]
    sizes = itertools.islice(itertools.product(range(9, 99), range(9, 12), range(3)), shapes)
    calls = [(number, image(height, width)) for height, width, number in sizes]
    answers = [models[number](x) for number, x in calls]
    known, training = [m(image()) for m in models], Trained()
    lines, warned = itertools.count(), list[str]()

    def serve() -> None:
        for fast, answer in zip(fasts, known, strict=True):
            assert close(fast(image()), answer)

    def speak() -> None:
        number = next(lines)
        print(f"line {number}")
        warnings.warn(f"line {number}", stacklevel=1)
        time.sleep(0.001)

    def show(message: Warning | str, *rest: object, **named: object) -> None:
        warned.append(str(message))

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("always")
        patch.setattr(warnings, "showwarning", show)
        with (
            snapshot.unchanged(),
            meanwhile(serve, training.step, speak),
            ThreadPoolExecutor(8) as pool,
        ):
            got = list(pool.map(lambda call: fasts[call[0]](call[1]), calls))
    assert all(map(close, got, answers))
    expected = [f"line {number}" for number in range(next(lines))]
    assert capsys.readouterr().out.splitlines() == expected
    assert warned == expected


def test_new_shapes_in_several_threads_are_served_and_disturb_nobody(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    _serve_new_shapes(9, capsys)
    assert len(said(caplog, "captured and verified a program")) == 9
    assert not said(caplog, "the original model answers")


@pytest.mark.slow
def test_thirty_new_shapes_of_three_models_in_eight_threads_are_served_and_disturb_nobody(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    _serve_new_shapes(30, capsys)
    assert len(said(caplog, "captured and verified a program")) == 30
    assert not said(caplog, "the original model answers")


def test_calls_that_the_original_answers_are_right_while_another_shape_is_captured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`torch.export` puts fake weights into the model that it exports."""
    model, refused = net(), image(5, 5)
    fast = module_of(model, image(), max_captures=0)
    answer = model(refused)
    assert close(fast(refused), answer)
    assert said(caplog, "the original model answers")
    fast._new.max_captures = 12

    def serve() -> None:
        assert close(fast(refused), answer)

    with meanwhile(serve, serve):
        for height in range(9, 15):
            assert close(fast(image(height)), model(image(height)))
    assert len(said(caplog, "captured and verified a program")) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_four_concurrent_calls_of_optimize_all_get_one_graph() -> None:
    models, streams = [net(channels) for channels in (3, 4, 5, 6)], (sys.stdout, sys.stderr)

    def optimize(model: nn.Module) -> Any:
        return ampopt.optimize(model, image(), exclude=ALL_BUT_ONE, precision="fp32", progress=False)

    with snapshot.unchanged(), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(optimize, models))
    assert (sys.stdout, sys.stderr) == streams
    for model, fast in zip(models, found, strict=True):
        assert isinstance(fast, ampopt.OptimizedModule)
        assert not [note for note in fast.report.notes if "not one graph" in note]
        assert close(fast(image()), model(image()))


@pytest.mark.parametrize(
    ("first", "second"), [("optimize", "optimize"), ("optimize", "compare"), ("compare", "optimize")]
)
def test_a_second_call_waits_for_the_first(first: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, leave, inside = threading.Event(), threading.Event(), list[str]()

    def prepare_call(model: nn.Module, *rest: object) -> None:
        inside.append("in")
        begun.set()
        leave.wait(timeout=20)
        inside.append("out")
        raise ZeroDivisionError

    for module in ("comparison", "api"):
        monkeypatch.setattr(f"ampopt.{module}.prepare_call", prepare_call)

    def call(name: str) -> None:
        with pytest.raises(ZeroDivisionError):
            getattr(ampopt, name)(nn.ReLU(), image())

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(call, first)
        begun.wait(timeout=20)
        two = pool.submit(call, second)
        time.sleep(0.1)  # it would be inside by now
        assert inside == ["in"]
        leave.set()
        one.result(timeout=20)
        two.result(timeout=20)
    assert inside == ["in", "out", "in", "out"]


def test_served_calls_do_not_wait_for_a_capture_and_new_shapes_do() -> None:
    model = net()
    fast, new = module_of(model, image()), image(9)
    with ThreadPoolExecutor(2) as pool:
        with capturing():
            assert close(pool.submit(fast, image()).result(timeout=20), model(image()))
            waiting = pool.submit(fast, new)
            assert not waiting.done()
        assert close(waiting.result(timeout=60), model(new))


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signal can be sent to a thread")
def test_ctrl_c_ends_the_waiting_and_the_turn_can_be_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "optimizing", Turn())  # not this process's own: a failure would block it
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with turns.optimizing.taken():
            held.set()
            leave.wait(timeout=20)

    def interrupted() -> None:
        with turns.optimizing.taken():
            raise AssertionError("the turn was another's")

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(timeout=20)
    here = threading.get_ident()
    threading.Timer(0.2, lambda: signal.pthread_kill(here, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert thread.is_alive()
    leave.set()
    thread.join()
    with turns.optimizing.taken():
        assert turns.optimizing._holder == here


def test_a_turn_is_taken_again_by_its_thread_and_given_on_once() -> None:
    turn, order = Turn(), list[str]()

    def other() -> None:
        with turn.taken():
            order.append("other")

    with ThreadPoolExecutor(1) as pool:
        with turn.taken():
            with turn.taken():
                waiting = pool.submit(other)
            time.sleep(0.05)
            order.append("first")
        waiting.result(timeout=10)
    assert order == ["first", "other"]


def test_a_thread_that_works_for_others_has_their_turns_and_no_longer() -> None:
    turn = Turn()

    def take() -> None:
        with turn.taken():
            pass

    def work_for(me: tuple[int, ...], then: Callable[[], object]) -> None:
        with working_for(me):
            then()

    with ThreadPoolExecutor(1) as near, ThreadPoolExecutor(1) as far:

        def pass_on() -> None:
            far.submit(work_for, this_thread(), take).result(timeout=10)

        with turn.taken():
            near.submit(work_for, this_thread(), take).result(timeout=10)
            near.submit(work_for, this_thread(), pass_on).result(timeout=10)
            later = near.submit(take)
            time.sleep(0.05)
            assert not later.done()
        later.result(timeout=10)


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ampopt")
