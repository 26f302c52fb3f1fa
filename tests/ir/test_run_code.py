"""What only those functions of a library reach that no call runs is no state; what calls read is, however."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir import outside
from ampopt.ir.hidden_state import Outside
from ampopt.ir.model_copy import private_copy
from ampopt.ir.run_code import RunCode
from ampopt.search.part_calls import calls_of_parts

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))

LIBRARY = '''
"""A library, by whose names everything reaches a progress bar's monitor, which notes when it wakes."""
import concurrent.futures
import contextlib
import cProfile
import functools
import queue
import sys
import threading
import torch
from torch import nn

class Monitor:
    def __init__(self):
        self.woken = 0

class Bar:
    monitor = Monitor()

def wake():
    Bar.monitor.woken += 1

MADE = 0

def sets_once(body):
    global MADE
    if MADE == 0:
        MADE = 1
    return MADE

def upload():
    return Bar.monitor.woken

@functools.lru_cache
def shared():
    return made()

def made():
    return Bar.monitor

def logged(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call

@contextlib.contextmanager
def guarded():
    yield

class Config:
    def __init__(self):
        self.scale = 2.0

    def push_to_hub(self):
        return upload()

    @property
    def woken(self):
        return upload()

    @logged
    def last(self):
        return upload()

class Body(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.conv, self.config, self.read = nn.Conv2d(3, 4, 3), Config(), READS[read]

    @guarded()
    def initialize(self):
        return upload()

    def train(self, mode=True):
        if mode:
            self.initialize()
        return super().train(mode)

    def woken_now(self):
        return upload()

    def forward(self, x):
        if self.config.scale > 3:
            return x * upload()
        return self.conv(x) * (self.config.scale + self.read[0](self))

class Net(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.body = Body(read)

    def forward(self, x):
        wake()
        y = self.body(x)
        return y * 2 if y.sum().item() > 1e9 else y

def unseen(body):
    sys.setprofile(None)
    return upload()

def unseen_for_a_while(body):
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        return upload()
    finally:
        sys.setprofile(before)

def unseen_beside_another(body):
    before, own = sys.getprofile(), cProfile.Profile()
    try:
        return own.runcall(upload)
    finally:
        sys.setprofile(before)

pool = concurrent.futures.ThreadPoolExecutor(1)

def in_a_pool(body):
    return pool.submit(upload).result()

def in_a_thread(body):
    found = []
    thread = threading.Thread(target=lambda: found.append(upload()))
    thread.start()
    thread.join()
    return found[0]

def in_a_thread_that_waits(body):
    asked, told = queue.SimpleQueue(), queue.SimpleQueue()
    threading.Thread(target=lambda: told.put(asked.get() + upload())).start()
    asked.put(0)
    return told.get()

def never_called(first=Bar.monitor):
    pass

never_called.monitor = Bar.monitor

READS = {
    "nothing": [lambda body: 0],
    "a global": [lambda body: Bar.monitor.woken],
    "a function": [lambda body: upload()],
    "a method": [lambda body: body.config.push_to_hub()],
    "a method by a name that is computed": [lambda body: getattr(body, "woken_" + "now")()],
    "a property": [lambda body: body.config.woken],
    "a method with a decorator": [lambda body: body.config.last()],
    "a function whose result is cached": [lambda body: shared().woken],
    "in unseen calls": [unseen],
    "in calls that are unseen for a while": [unseen_for_a_while],
    "in calls that another profiler sees": [unseen_beside_another],
    "in a pool": [in_a_pool],
    "in a thread": [in_a_thread],
    "in a thread that waits": [in_a_thread_that_waits],
    "in functions called in C": [lambda body: sum(map(lambda _: upload(), [0]))],
    "an attribute of a function": [lambda body: never_called.monitor.woken],
    "a default of a function": [lambda body: never_called.__defaults__[0].woken],
    "what it sets once": [sets_once],
    "in what is no part of compiled code": [torch.compiler.disable(lambda body: upload())],
}
'''


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The library, as if it was installed."""
    file = tmp_path_factory.mktemp("site") / "a_library.py"
    file.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("a_library", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outside, "_LIBRARIES", (*outside._LIBRARIES, str(Path(file).parent)))
        patch.setitem(sys.modules, "a_library", module)
        spec.loader.exec_module(module)
        yield module


READS = [
    *("a global", "a function", "a method", "a property", "a method with a decorator"),
    *("a function whose result is cached", "in unseen calls", "in what is no part of compiled code"),
    *("in calls that are unseen for a while", "in a pool", "in a thread", "in a thread that waits"),
    *("in calls that another profiler sees", "in functions called in C"),
    *("an attribute of a function", "a default of a function"),
]


def test_a_part_may_reach_what_changes_by_functions_that_no_call_runs(library: ModuleType) -> None:
    net = library.Net("nothing").eval()
    assert calls_of_parts(net, ["body"], (X,), {})["body"].why_not is None


@pytest.mark.parametrize("read", [*READS, "a method by a name that is computed"])
def test_a_part_that_reads_what_changes_is_none(library: ModuleType, read: str) -> None:
    net = library.Net(read).eval()
    net(X)  # what is cached is there
    why_not = calls_of_parts(private_copy(net), ["body"], (X,), {})["body"].why_not
    assert why_not is not None
    assert why_not.endswith("monitor.woken changes before it is called")


def test_a_part_that_sets_what_its_later_calls_leave_is_none(library: ModuleType) -> None:
    why_not = calls_of_parts(library.Net("what it sets once").eval(), ["body"], (X,), {})["body"].why_not
    assert why_not is not None
    assert why_not.endswith("MADE> changes when it is called")


def _change(library: ModuleType, read: str, later: Callable[[Any], object] | None = None) -> str | None:
    """What changes outside of a model as the monitor wakes after a call, and `later` runs."""
    body, run = library.Body(read).eval(), RunCode()
    body(X)
    with run.noted():
        body(X)
    outer = Outside(body, run)
    library.wake()
    if later is not None:
        with run.noted():
            later(body)
    return outer.change()


def test_what_functions_reach_that_did_not_run_is_not_outside_of_a_model(library: ModuleType) -> None:
    assert _change(library, "nothing") is None


@pytest.mark.parametrize("read", READS)
def test_what_a_call_reads_is_outside_of_a_model(library: ModuleType, read: str) -> None:
    found = _change(library, read)
    assert found is not None
    assert "monitor" in found


def test_all_counts_where_other_functions_run_later(library: ModuleType) -> None:
    def otherwise(body: Any) -> None:
        body.config.scale = 4.0
        body(X)

    assert _change(library, "nothing", lambda body: body(X)) is None
    assert _change(library, "nothing", otherwise) is not None


class _Seen:
    """Whatever woke."""

    woken = 0


class Own(nn.Module):
    """A user's own module, with a method that no call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def woken(self) -> int:
        """What may come to be read."""
        return _Seen.woken

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        out: Tensor = self.conv(x)
        return out


class Waking(nn.Module):
    """A model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Own()

    def forward(self, x: Tensor) -> Tensor:
        """Its features."""
        _Seen.woken += 1
        y: Tensor = self.body(x)
        return y


def test_a_user_s_own_functions_all_count() -> None:
    why_not = calls_of_parts(Waking().eval(), ["body"], (X,), {})["body"].why_not
    assert why_not is not None
    assert why_not.endswith("woken changes before it is called")


def test_a_profiler_of_the_user_s_is_told_of_the_calls_and_stays() -> None:
    told = set[str]()

    def profile(frame: Any, event: str, what: Any) -> None:
        told.add(frame.f_code.co_name)

    def run() -> None:
        pass

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        with RunCode().noted():
            run()
        stays = sys.getprofile() is profile
    finally:
        sys.setprofile(before)
    assert stays
    assert "run" in told


def test_a_call_that_imports_or_logs_hides_nothing(library: ModuleType) -> None:
    """Which takes locks, but hands nothing to another thread."""

    def imports(body: object) -> int:
        sys.modules.pop("wave", None)
        importlib.import_module("wave")
        logging.getLogger("a_library").warning("imported")
        return 0

    library.READS["imports"] = [imports]
    assert _change(library, "imports") is None
