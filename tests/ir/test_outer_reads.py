"""A model that reads the clock, files or sockets in its calls is more than its graph; libraries read for
themselves."""

from __future__ import annotations

import datetime
import functools
import gc
import importlib.util
import linecache
import logging
import os
import pathlib
import socket
import tempfile
import time
import warnings
from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import CaptureError
from ampopt.ir.capture import capture
from ampopt.ir.model_copy import private_copy
from ampopt.ir.model_state import behaviour_of
from tests.helpers import Model

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")
FILE = pathlib.Path(tempfile.mkdtemp()) / "gain.npy"
PICKLED = FILE.with_suffix(".pt")
PAIR = socket.socketpair()
logger = logging.getLogger("tests.outer_reads")


def setup_module() -> None:
    """Write the files that models read."""
    np.save(FILE, np.ones(1))
    torch.save(torch.ones(1), PICKLED)
    PAIR[0].setblocking(False)


def teardown_module() -> None:
    """Remove them."""
    FILE.unlink()
    PICKLED.unlink()
    FILE.parent.rmdir()
    for each in PAIR:
        each.close()


def reason_of(model: nn.Module) -> str | None:
    with torch.no_grad():
        return behaviour_of(private_copy(model.eval()), (X,), {}, CPU).reason


def of(read: Callable[[], object]) -> nn.Module:
    """A model that answers otherwise where a function, which it calls each time, gives something false."""
    return Model(lambda m, x: m.body(x) * (1 if read() else 2), body=nn.Linear(6, 6))


def received() -> bool:
    """Whether nothing came from a socket."""
    try:
        return not PAIR[0].recv(1)
    except BlockingIOError:
        return True


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda: time.monotonic() < 1e12, "the clock (time.monotonic)"),
        (lambda: monotonic() < 1e12, "the clock (time.monotonic)"),
        (lambda: time.perf_counter_ns() > 0, "the clock (time.perf_counter_ns)"),
        (lambda: time.strftime("%Y") != "1999", "the clock (time.strftime)"),
        (lambda: datetime.datetime.now().year > 1999, "the clock (datetime.now)"),
        (lambda: datetime.date.today().year > 1999, "the clock (date.today)"),
        (lambda: FILE.open("rb").read(1), "files (open)"),
        (lambda: FILE.read_bytes() != b"", "files (open)"),
        (lambda: os.path.getsize(FILE) > 0, "files (stat)"),
        (lambda: os.path.exists(FILE), "files ("),
        (lambda: FILE.exists(), "files ("),
        (lambda: os.listdir(FILE.parent), "files (listdir)"),
        (lambda: np.load(FILE)[0] > 0, "files (open)"),
        (lambda: float(torch.load(PICKLED)) > 0, "files (open)"),
        (received, "a stream (socket.recv)"),
    ],
)
def test_a_read_in_each_call_is_named_with_its_line(read: Callable[[], object], what: str) -> None:
    reason = reason_of(of(read))
    assert reason is not None
    assert reason.startswith(f"it reads {what}")
    assert "test_outer_reads.py:" in reason


def test_what_is_read_by_an_attribute_is_found() -> None:
    model = Model(lambda m, x: m.body(x) * (1 if m.clock() < 1e12 else 2), body=nn.Linear(6, 6))
    model.clock = time.monotonic  # type: ignore[assignment]
    assert str(reason_of(model)).startswith("it reads the clock (time.monotonic)")


class Loading(nn.Module):
    """Reads its gain, and when that was, in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gain = nn.Linear(6, 6), 0.0

    def forward(self, x: Tensor) -> Tensor:
        """The features, with the gain."""
        if not self.gain:
            self.began = time.monotonic()
            self.gain = float(np.load(FILE)[0])
        return self.body(x) * self.gain  # type: ignore[no-any-return]


@functools.lru_cache
def stored() -> float:
    """The gain, which is read once."""
    return float(np.load(FILE)[0])


def warned() -> bool:
    """Whether a warning, which shows a line of the file that it is in, was formatted."""
    linecache.clearcache()
    return "of no matter" in warnings.formatwarning("of no matter", UserWarning, __file__, 1)


def logged() -> bool:
    """Whether a record, which has the time of it, was told."""
    logger.warning("of no matter")
    return True


def imported() -> object:
    """What is found by looking into folders."""
    return importlib.util.find_spec("torch")


@pytest.mark.parametrize("read", [stored, warned, logged, imported])
def test_what_libraries_read_for_themselves_and_what_is_read_once_is_no_obstacle(
    read: Callable[[], object],
) -> None:
    assert reason_of(of(read)) is None


def test_what_the_first_call_reads_is_set() -> None:
    assert reason_of(Loading()) is None


class Seldom(nn.Module):
    """Looks at the clock from its second call on, as far as a buffer counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The features, and the time if there was a call before."""
        self.count += 1
        late = bool(self.count > 3) and time.monotonic() > 1e12
        return self.body(x) * (2 if late else 1)  # type: ignore[no-any-return]


def test_later_calls_are_looked_at_too() -> None:
    assert str(reason_of(Seldom())).startswith("it reads the clock (time.monotonic)")


def test_a_capture_is_refused_and_the_submodule_that_does_not_read_is_captured() -> None:
    model: Any = private_copy(of(lambda: monotonic() < 1e12).eval())
    with pytest.raises(CaptureError, match=r"more than its graph: it reads the clock \(time.monotonic\) at"):
        capture(model, (X,), {}, CPU)
    capture(model.body, (X,), {}, CPU)


def test_what_is_called_as_garbage_is_collected_is_not_the_models() -> None:
    """As Hypothesis does, which measures how long that takes."""
    told = list[float]()

    def tell(phase: str, info: dict[str, int]) -> None:
        told.append(time.time())

    def forward(model: Any, x: Tensor) -> Any:
        kept: list[Any] = [[] for _ in range(5000)]  # more than a collection is made for
        return model.body(x) * (2 if kept else 1)

    gc.callbacks.append(tell)
    try:
        assert reason_of(Model(forward, body=nn.Linear(6, 6))) is None
    finally:
        gc.callbacks.remove(tell)
    assert told, "other calls of the model are not watched"
    assert gc.isenabled()
