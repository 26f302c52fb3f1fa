"""What a model's code does beside its results: what it reads of the world, writes, starts and tells.

What counts is what it does in a call after its first; what the first call does is done when the model is
captured: a table that it loads is set as all that first calls set.

Not seen is what other threads do, and functions that C code calls, not Python: a `partial` of a clock.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FrameType
from typing import Any

from ampopt.ir.asked import watching_calls
from ampopt.ir.outer_reads import what_is_read
from ampopt.ir.outer_writes import READS, TELLING, WRITES, Deed, done_by_function, done_in_python
from ampopt.ir.place_in_code import place_of_line
from ampopt.system.quiet import is_muted, quiet

_FOR_THEMSELVES = frozenset(
    {"importlib", "_frozen_importlib", "_frozen_importlib_external", "linecache"}
    | {"inspect", "cProfile", "profile", "pstats", "torch"}
)
"""Packages whose deeds are their own affair: the files that an import looks at."""

_FOR_OTHERS = frozenset({*sys.stdlib_module_names, "numpy"})
"""Packages that read and write for whoever calls them: `Path.read_text`, `np.load`; of PyTorch's,
`torch.load` does."""

_AT_ONCE = 3
"""Number of places that are named where a model tells something."""


class OuterWorld:
    """What is noted in some calls of a model."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}
        self._told: dict[str, None] = {}
        self._printing: list[FrameType] = []
        """Calls of `print` that have reached no `write` in Python yet."""

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Within the block, note what the code of this thread does; what it prints is dropped.

        No garbage is collected meanwhile: what is called then, by whomever, is called from the model's lines.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            with quiet(), watching_calls(self._watch):
                yield
        finally:
            self._printing.clear()
            if collects:
                gc.enable()

    @property
    def reason(self) -> str | None:
        """Why the model is not one graph: the first deed that a graph has not; None if there is none."""
        return min(self._found, key=lambda each: self._found[each], default=None)

    @property
    def told(self) -> str | None:
        """What the model tells whoever looks, which a graph does not repeat; None if it tells nothing."""
        if not self._told:
            return None
        places, more = list(self._told)[:_AT_ONCE], len(self._told) - _AT_ONCE
        rest = f", and in {more} more places" if more > 0 else ""
        return f"forward {', '.join(places)}{rest}: a program does not"

    def _watch(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "c_call" and isinstance(what, BuiltinFunctionType):
            self._called(frame, what)
        elif event == "call":
            self._called_in_python(frame)
        elif what is print and self._printing and self._printing[-1] is frame:  # it has returned
            self._printing.pop()
            if is_muted(sys.stdout):
                self._note(frame, (WRITES, "writes to a stream (print)"))

    def _called(self, frame: FrameType, function: BuiltinFunctionType) -> None:
        if function is print:
            self._printing.append(frame)
        elif function.__module__ == "_warnings" and function.__name__.startswith("warn"):
            self._tell(frame, "warns")
        elif (deed := done_by_function(function)) is not None:
            if _is_standard(function.__self__):
                self._tell(frame, "prints")
            else:
                self._note(frame, deed)
        elif (read := what_is_read(function)) is not None:
            self._note(frame, (READS, f"reads {read}"))

    def _called_in_python(self, frame: FrameType) -> None:
        caller, module = frame.f_back, str(frame.f_globals.get("__name__"))
        name = frame.f_code.co_name
        is_printed = name == "__call__" and module == "ampopt.system.quiet"
        if (is_printed or name == "write") and self._printing and self._printing[-1] is caller:
            self._printing.pop()
        if is_printed:
            self._tell(caller, "prints")
        elif name == "handle" and module == "logging":
            self._tell(frame, "logs")
        elif (deed := done_in_python(frame)) is not None:
            self._note(frame, deed)

    def _note(self, frame: FrameType, deed: Deed) -> None:
        """Note a deed, if a model's code does it; what a package writes that tells is told."""
        kind, does = deed
        doer, tells = _doer(frame)
        if doer is not None and tells is None:
            self._found.setdefault(f"it {does}{_at(doer)}", kind)
        elif doer is not None and kind == WRITES:
            self._told[f"{tells}{_at(doer)}"] = None

    def _tell(self, frame: FrameType | None, how: str) -> None:
        doer, tells = _doer(frame)
        if doer is not None:
            self._told[f"{tells or how}{_at(doer)}"] = None


def _at(frame: FrameType) -> str:
    place = place_of_line(frame.f_code.co_filename, frame.f_lineno)
    return f" at {place}" if place else ""


def _is_standard(stream: object) -> bool:
    """Whether it is a standard stream, or what that writes to."""
    for each in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        buffer = getattr(each, "buffer", None)
        if any(stream is part for part in (each, buffer, getattr(buffer, "raw", None)) if part is not None):
            return True
    return False


def _doer(frame: FrameType | None) -> tuple[FrameType | None, str | None]:
    """The innermost call of a model's code that something is done for; None if a library does it for itself.

    Also how that code tells something by it, if it calls a package for that; what handlers and formatters of
    `logging` do is told by whom they are called for.
    """
    doer: FrameType | None = None
    tells: str | None = None
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        root = name.partition(".")[0]
        if root == "ampopt":
            break
        if root in TELLING and (doer is None or root in sys.stdlib_module_names):
            doer, tells = None, TELLING[root]
        elif doer is None and root in _FOR_THEMSELVES and name != "torch.serialization":
            break
        elif doer is None and root not in _FOR_OTHERS and name != "torch.serialization":
            doer = frame
        frame = frame.f_back
    return doer, tells
