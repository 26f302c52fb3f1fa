"""A time that is only measured and told is no obstacle to a graph; one that decides anything is."""

from __future__ import annotations

import datetime
import linecache
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.model_copy import private_copy
from ampopt.ir.model_state import behaviour_of
from tests.helpers import Model

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")
logger = logging.getLogger("tests.told_times")

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="places of instructions are not known")


def reason_of(function: Callable[..., Tensor]) -> str | None:
    model = Model(function, body=nn.Linear(6, 6)).eval()
    with torch.no_grad():
        return behaviour_of(private_copy(model), (X,), {}, CPU).reason


def in_an_attribute(m: Any, x: Tensor) -> Tensor:
    began = time.perf_counter()
    y: Tensor = m.body(x)
    m.ms = 1e3 * (time.perf_counter() - began)
    return y


def in_a_log(m: Any, x: Tensor) -> Tensor:
    began = datetime.datetime.now()
    y: Tensor = m.body(x)
    took = (datetime.datetime.now() - began).total_seconds()
    logger.debug("%.3f s for %s", took, x.shape)
    return y


def in_a_text(m: Any, x: Tensor) -> Tensor:
    began = time.perf_counter()
    y: Tensor = m.body(x)
    if logger.isEnabledFor(logging.DEBUG):
        print(f"{x.shape}: {round(time.perf_counter() - began, 3)} s")
    return y


def told_by_an_attribute(m: Any, x: Tensor) -> Tensor:
    m.began = time.perf_counter()
    y: Tensor = m.body(x)
    m.ms = time.perf_counter() - m.began
    logger.debug("%s", m.ms)
    return y


@pytest.mark.parametrize("function", [in_an_attribute, in_a_log, in_a_text, told_by_an_attribute])
def test_a_time_that_is_told_is_no_obstacle(function: Callable[..., Tensor]) -> None:
    assert reason_of(function) is None


def in_a_branch(m: Any, x: Tensor) -> Tensor:
    began = time.perf_counter()
    y: Tensor = m.body(x)
    took = time.perf_counter() - began
    if took > 1e9:
        return y * 2
    return y


def in_a_branch_later(m: Any, x: Tensor) -> Tensor:
    m.began = time.monotonic()
    y: Tensor = m.body(x)
    return late(m, y)


def late(m: Any, y: Tensor) -> Tensor:
    return y * 2 if m.began > 1e12 else y


def in_a_branch_by_name(m: Any, x: Tensor) -> Tensor:
    m.began = time.monotonic()
    return of_name(m, m.body(x))


def of_name(m: Any, y: Tensor) -> Tensor:
    return y * 2 if getattr(m, "began", 0) > 1e12 else y


def in_the_result(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.body(x)
    return y + time.monotonic() * 1e-20


def as_an_argument(m: Any, x: Tensor) -> Tensor:
    now = time.monotonic()
    logger.debug("%s", now)
    return scaled(m.body(x), now)


def scaled(y: Tensor, at: float) -> Tensor:
    return y * 2 if at > 1e12 else y


def by_a_function_inside(m: Any, x: Tensor) -> Tensor:
    now = time.monotonic()

    def gain() -> int:
        return 2 if now > 1e12 else 1

    y: Tensor = m.body(x) * gain()
    return y


def with_a_tensor(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.body(x)
    y += 1e-20 * time.monotonic()
    return y


def in_a_loop(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.body(x)
    for _ in range(int(time.monotonic() > 1e12)):
        y = y * 2
    return y


def in_a_handler(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.body(x)
    try:
        raise ValueError
    except ValueError:
        y = y * 2 if time.monotonic() > 1e12 else y
    return y


def in_an_assertion(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.body(x)
    assert time.monotonic() < 1e12
    return y


def told_and_read_by_another(m: Any, x: Tensor) -> Tensor:
    began = time.monotonic()
    logger.debug("%s", began)
    return late_now(m.body(x))


def late_now(y: Tensor) -> Tensor:
    return y * 2 if time.monotonic() > 1e12 else y


@pytest.mark.parametrize(
    "function",
    [
        *(in_a_branch, in_a_branch_later, in_a_branch_by_name, in_the_result, as_an_argument, in_a_loop),
        *(by_a_function_inside, with_a_tensor, in_a_handler, in_an_assertion, told_and_read_by_another),
        lambda m, x: m.body(x) * (2 if time.monotonic() > 1e12 else 1),
    ],
)
def test_a_time_that_decides_is_one(function: Callable[..., Tensor]) -> None:
    reason = reason_of(function)
    assert reason is not None
    assert reason.startswith("it reads the clock")


class Measuring(nn.Module):
    """Whether it is late is decided where the time is set."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.is_late = nn.Linear(6, 6), False

    @property
    def began(self) -> float:
        """When the last call began."""
        return 0.0

    @began.setter
    def began(self, at: float) -> None:
        self.is_late = at > 1e12

    def forward(self, x: Tensor) -> Tensor:
        """The features, doubled late."""
        self.began = time.monotonic()
        return self.body(x) * (2 if self.is_late else 1)  # type: ignore[no-any-return]


def test_a_setter_may_decide() -> None:
    with torch.no_grad():
        reason = behaviour_of(private_copy(Measuring().eval()), (X,), {}, CPU).reason
    assert str(reason).startswith("it reads the clock")


def test_a_source_that_is_another_by_now_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    code = in_an_attribute.__code__
    lines = linecache.getlines(code.co_filename)
    changed = [*lines[: code.co_firstlineno], "    pass\n", *lines[code.co_firstlineno :]]
    monkeypatch.setitem(linecache.cache, code.co_filename, (1, None, changed, code.co_filename))
    assert str(reason_of(in_an_attribute)).startswith("it reads the clock")
