"""Which functions of libraries run in calls of a model: what only the others reach is no matter of these.

By the names in its code a model of a library reaches most of that: a config can be uploaded, which downloads
a template, and shows how far it is, by a thread that notes when it wakes. No forward reads that.
"""

from __future__ import annotations

import _lsprof
import _thread
import contextlib
import importlib
import queue
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from ampopt.ir import asked
from ampopt.ir.asked import is_profiled, watching_calls
from ampopt.ir.outside import Code, is_installed
from ampopt.ir.parts import is_foreign, walk

_OF_UNSEEN = frozenset({"torch._dynamo.eval_frame", "torch.autograd", "concurrent.futures.thread", "queue"})
"""The modules whose code calls what is not seen to run: inside of what is compiled, or in another thread.

Autograd has a thread for each GPU, in which it calls a user's own backward functions.
"""

_OF_OTHERS = (_thread.LockType, queue.SimpleQueue, _lsprof.Profiler)
"""The classes written in C by whose methods one thread waits for another, or another profiler begins."""

_OF_IMPORTS = importlib._bootstrap.__name__
"""The module that keeps threads from importing another one twice, which it does by locks."""

_SETTERS = (sys.setprofile, getattr(sys, "_setprofileallthreads", None))
"""What ends that calls are seen; it may be put back."""


def _hands_over(frame: FrameType, what: Any) -> bool:
    """Whether a call of a function written in C leads to code that is not seen."""
    if issubclass(type(getattr(what, "__self__", None)), _OF_OTHERS):
        return frame.f_globals.get("__name__") != _OF_IMPORTS
    return what in _SETTERS and frame.f_globals.get("__name__") != asked.__name__


class RunCode:
    """Tells the functions of libraries that have run in some calls from those that have not.

    Correct because what a call does is decided by its arguments and by what the functions that it runs reach.
    As long as all of that is what it was, the functions that run are those that ran, and what others reach is
    neither read nor written. What has run before, and has left its results in a cache, counts with all that
    it may have run. A user's own functions all count; so do all where it is not seen what runs.
    """

    def __init__(self) -> None:
        self._all, self._counted = is_profiled(), frozenset[CodeType]()
        self._noted, self._is_seen = dict[int, CodeType](), True
        """The first: by identity, as the hash of a code object takes all of its bytes."""
        self._passed_over = set[CodeType]()
        self._no_librarys = dict[str, bool]()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Within the block, note what this thread runs; who was told of its calls is told of them, too."""
        before, ran = sys.getprofile(), self._noted

        def watch(frame: FrameType, event: Any, what: Any) -> None:
            if event == "call":
                if id(frame.f_code) not in ran:
                    ran[id(frame.f_code)] = frame.f_code
                    self._is_seen &= str(frame.f_globals.get("__name__")) not in _OF_UNSEEN
            elif event == "c_call" and _hands_over(frame, what):
                self._is_seen = False
            if before is not None:
                before(frame, event, what)

        with watching_calls(watch):
            try:
                yield
            finally:
                self._is_seen &= sys.getprofile() is watch  # else the model's own code has set another

    @property
    def _ran(self) -> set[CodeType]:
        return {*self._noted.values()}

    def counts(self, function: FunctionType) -> bool:
        """Whether what a function reaches matters, as far as `learn` has told."""
        if self._all or self._are_no_librarys(function) or function.__code__ in self._counted:
            return True
        self._passed_over.add(function.__code__)
        return False

    def _are_no_librarys(self, function: FunctionType) -> bool:
        """Whether the functions of a function's module count whether they run or not."""
        name = str(function.__module__)
        if name not in self._no_librarys:
            self._no_librarys[name] = is_foreign(function) or not is_installed(sys.modules.get(name))
        return self._no_librarys[name]

    def learn(self) -> bool:
        """Let functions count that were noted to run; returns whether one of them was passed over before."""
        is_hidden = not (self._is_seen or self._all)
        is_more = is_hidden or not (self._ran & self._passed_over <= self._counted)
        self._all |= is_hidden
        self._counted |= self._ran if is_more else frozenset()
        return is_more

    def code_of(self, model: nn.Module) -> Code:
        """What calls of a model may run, as far as names, and what was noted, tell; functions there count."""
        self._counted |= self._ran
        while True:
            code = Code(model, self.counts)
            if not (self._count_cached(code.cached) or self.learn()):
                return code

    def _count_cached(self, functions: Iterable[object]) -> bool:
        """Let functions count whose results are cached, and what these may have run; whether any did not."""
        below = (part for _, part in walk([*functions]) if isinstance(part, FunctionType))
        new = {function.__code__ for function in below} - self._counted
        self._counted |= new
        return bool(new)
