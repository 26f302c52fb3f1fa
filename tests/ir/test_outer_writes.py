"""A model that writes what others wait for, or starts a thread, is no graph; what it tells is a note."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import csv
import io
import json
import logging
import mmap
import multiprocessing
import os
import pathlib
import pickle
import pprint
import queue
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import CaptureError
from ampopt.ir.capture import capture
from ampopt.ir.model_copy import private_copy
from ampopt.ir.model_state import Behaviour, behaviour_of
from tests.helpers import Model
from tests.support.planted import optimize

pytestmark = pytest.mark.filterwarnings("ignore:of no matter")
X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")
FOLDER = pathlib.Path(tempfile.mkdtemp())
TEXT, BYTES = FOLDER.joinpath("text").open("w"), FOLDER.joinpath("bytes").open("wb")
PAIR, PIPE = socket.socketpair(), os.pipe()
ENDS = multiprocessing.Pipe()
QUEUE, SIMPLE = queue.Queue[int](), queue.SimpleQueue[int]()
MEMORY, DATABASE = mmap.mmap(-1, 4096), sqlite3.connect(":memory:")
POOL = concurrent.futures.ThreadPoolExecutor(1)
logger, into_file = logging.getLogger("tests.outer_writes"), logging.getLogger("tests.outer_writes.file")


class Handler(logging.Handler):
    """Writes records to a file, in code that is no library's."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one."""
        TEXT.write(record.getMessage())


into_file.addHandler(Handler())
into_file.addHandler(logging.FileHandler(FOLDER / "log"))


def teardown_module() -> None:
    """Close what is open."""
    for handler in into_file.handlers:
        handler.close()
    for each in (TEXT, BYTES, *PAIR, *ENDS, MEMORY, DATABASE):
        each.close()
    for end in PIPE:
        os.close(end)
    POOL.shutdown()


def behaviour(model: nn.Module) -> Behaviour:
    with torch.no_grad():
        return behaviour_of(private_copy(model.eval()), (X,), {}, CPU)


def beside(does: Callable[[], object]) -> nn.Module:
    """A model that calls a function for what it does."""

    def forward(model: Any, x: Tensor) -> Any:
        does()
        return model.body(x)

    return Model(forward, body=nn.Linear(6, 6))


def in_thread() -> None:
    """Wait for a thread."""
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def in_process() -> None:
    """Wait for a process."""
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()


async def nothing() -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("does", "what"),
    [
        (lambda: TEXT.write("x"), "writes to a stream (TextIOWrapper.write)"),
        (lambda: TEXT.writelines(["x"]), "writes to a stream (TextIOWrapper.writelines)"),
        (lambda: BYTES.write(b"x"), "writes to a stream (BufferedWriter.write)"),
        (lambda: print("x", file=TEXT), "writes to a stream (print)"),
        (lambda: print(X, file=TEXT), "writes to a stream (print)"),
        (lambda: json.dump([1], TEXT), "writes to a stream (TextIOWrapper.write)"),
        (lambda: csv.writer(TEXT).writerow([1]), "writes a table (writer.writerow)"),
        (lambda: pickle.dump(1, BYTES), "writes an object (pickle.dump)"),
        (lambda: np.ones(1).tofile(BYTES), "writes to files (tofile)"),
        (lambda: np.save(FOLDER / "a.npy", np.ones(1)), "writes to "),
        (lambda: torch.save(1, FOLDER / "a.pt"), "writes to files (torch.save)"),
        (lambda: FOLDER.joinpath("b").write_text("x"), "writes to a stream (TextIOWrapper.write)"),
        (lambda: FOLDER.joinpath("c").unlink(missing_ok=True), "writes to files (os.unlink)"),
        (lambda: os.write(PIPE[1], b"x"), "writes to files (os.write)"),
        (lambda: PAIR[0].send(b"x"), "writes to a stream (socket.send)"),
        (lambda: PAIR[0].sendall(b"x"), "writes to a stream (socket.sendall)"),
        (lambda: ENDS[0].send(1), "writes to files (os.write)"),
        (lambda: MEMORY.write(b""), "writes to a stream (mmap.write)"),
        (lambda: QUEUE.put(1), "puts into a queue"),
        (lambda: SIMPLE.put(1), "writes to a stream (SimpleQueue.put)"),
        (lambda: DATABASE.execute("select 1"), "asks a database (Connection.execute)"),
        (lambda: os.kill(os.getpid(), 0), "sends a signal (os.kill)"),
        (in_thread, "starts a thread"),
        (in_process, "starts a process"),
        (lambda: subprocess.run([sys.executable, "-S", "-c", ""], check=True), "starts a process"),
        (lambda: POOL.submit(int).result(), "gives work to another thread"),
        (lambda: asyncio.run(nothing()), "runs an event loop (asyncio)"),
    ],
)
def test_what_others_wait_for_is_named_with_its_line(does: Callable[[], object], what: str) -> None:
    found = behaviour(beside(does))
    assert found.reason is not None
    assert found.reason.startswith(f"it {what}")
    assert "test_outer_writes.py:" in found.reason


def tell_debug() -> None:
    """Log below the level."""
    logger.debug("of no matter")


def show_stack() -> None:
    """Print where this is."""
    traceback.print_stack(limit=1)


@pytest.mark.parametrize(
    ("does", "how"),
    [
        (lambda: print("of no matter"), "prints"),
        (lambda: print("of no matter", X, end="", file=sys.stderr), "prints"),
        (lambda: sys.stdout.write("of no matter"), "prints"),
        (lambda: sys.stdout.writelines(["of no matter"]), "prints"),
        (lambda: sys.stdout.buffer.write(b""), "prints"),
        (lambda: pprint.pprint("of no matter"), "prints"),
        (show_stack, "prints"),
        (lambda: logger.warning("of no matter"), "logs"),
        (lambda: into_file.warning("of no matter"), "logs"),
        (lambda: logging.warning("of no matter"), "logs"),
        (lambda: warnings.warn("of no matter", stacklevel=1), "warns"),
    ],
)
def test_what_is_told_is_no_obstacle_and_is_noted_with_its_line(does: Callable[[], object], how: str) -> None:
    found = behaviour(beside(does))
    assert found.reason is None
    assert str(found.told).startswith(f"forward {how} at test_outer_writes.py:")
    assert str(found.told).endswith('": a program does not')
    assert str(found.told).count(" at ") == 1


def test_every_place_is_told_once_and_the_first_few_are_named() -> None:
    def does() -> None:
        for _ in range(2):
            print("of no matter")
            logger.warning("of no matter")
        print("of no matter")
        warnings.warn("of no matter", stacklevel=1)
        print("of no matter")

    told = str(behaviour(beside(does)).told)
    assert told.startswith("forward prints at ")
    assert ", logs at " in told
    assert told.endswith('", and in 2 more places: a program does not')


def warn_in_library() -> Tensor:
    """Call an operator of PyTorch's that warns."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        return nn.functional.mse_loss(torch.ones(2), torch.ones(1))


def tell_in_memory() -> None:
    """Write to a text in memory."""
    text = io.StringIO()
    text.write("of no matter")


@pytest.mark.parametrize("does", [tell_debug, warn_in_library, tell_in_memory, lambda: None])
def test_what_reaches_nobody_and_what_pytorch_tells_is_nothing(does: Callable[[], object]) -> None:
    assert behaviour(beside(does)) == Behaviour(None)


class Once(nn.Module):
    """Prints, and starts a thread, in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.began = nn.Linear(6, 6), False

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        if not self.began:
            print("of no matter")
            in_thread()
            self.began = True
        return self.body(x)  # type: ignore[no-any-return]


def test_what_the_first_call_does_is_done() -> None:
    found = behaviour(Once())
    assert (found.reason, found.told) == (None, None)


class Computing(nn.Module):
    """Computes in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """The features, positive ones."""
        out = list[Tensor]()
        thread = threading.Thread(target=lambda: out.append(self.body(x).relu()))
        thread.start()
        thread.join()
        return out[0]


@pytest.mark.parametrize("model", [Computing(), beside(lambda: TEXT.write("x"))])
def test_a_capture_is_refused_and_the_submodule_is_captured(model: Any) -> None:
    model = private_copy(model.eval())
    with pytest.raises(CaptureError, match=r"more than its graph: it (starts a thread|writes to a stream)"):
        capture(model, (X,), {}, CPU)
    capture(model.body, (X,), {}, CPU)


def test_a_print_that_fails_is_the_models_affair() -> None:
    def does() -> None:
        with contextlib.suppress(ValueError):
            print("x", file=closed)
        print("of no matter")

    closed = FOLDER.joinpath("d").open("w")
    closed.close()
    assert str(behaviour(beside(does)).reason).startswith("it writes to a stream (print)")


@pytest.mark.usefixtures("quick")
def test_a_report_says_what_a_program_does_not_repeat() -> None:
    fast = optimize(beside(lambda: print("of no matter")).eval(), X, precision="fp32")
    notes = [note for note in fast.report.notes if note.startswith("forward prints at test_outer_writes.py:")]
    assert len(notes) == 1


@pytest.mark.usefixtures("quick")
def test_what_a_model_writes_is_written_in_every_call_of_its_optimized_form() -> None:
    fast = optimize(beside(lambda: BYTES.write(b"x")).eval(), X, precision="fp32")
    assert fast.report.notes[0].startswith("not one graph: Model is more than its graph: it writes to a ")
    before = BYTES.tell()
    fast(X)
    fast(X)
    assert BYTES.tell() == before + 2


@pytest.mark.usefixtures("quick")
def test_a_note_says_which_submodule_tells() -> None:
    def forward(model: Any, x: Tensor) -> Any:
        y = model.inner(x)
        return y if y.sum() > 0 else -y

    inner = beside(lambda: print("of no matter"))
    fast = optimize(Model(forward, inner=inner).eval(), X, precision="fp32")
    told = "submodule inner: forward prints at test_outer_writes.py:"
    assert any(note.startswith(told) for note in fast.report.notes)
    assert any(note.startswith(told.partition(": ")[2]) for note in fast.report.regions["inner"].notes)
