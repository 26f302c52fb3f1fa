"""Lets inductor compile the C++ kernels of a graph together: nearly all of their time goes into headers.

A kernel of inductor is a library of its own. Its compiler reads the headers of PyTorch's vectors for 1.8 s,
or takes 0.5 s to load them precompiled, and 0.1 s for the kernel: RAFT has 47 kernels, which take two cores
23 s one by one and 9.5 s in four files. The flags are inductor's: kernels compute what they would.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ampopt.system.atomic import also_named, replacing

logger = logging.getLogger("ampopt")

EACH = 3000
"""What a kernel costs beside the characters of its source, in such characters."""

MOST = 16
"""Kernels in one file: what a compiler that is stopped has not finished is lost."""

_INCLUDED = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)
_DEFINED = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(?!PY_SSIZE_T_CLEAN\b)(\w+)", re.MULTILINE)
_MODULE = "PyMODINIT_FUNC PyInit_kernel(void)"

_PART = """
#define kernel kernel_{number}
#define PyInit_kernel PyInit_kernel_{number}
namespace part_{number} {{
{source}
}}
#undef PyInit_kernel
#undef kernel
{forgotten}
"""
"""Nothing of a kernel, its macros included, is known to the next one."""

_MODULES = """
#include <cstring>

static PyObject* module_of(PyObject* spec, PyModuleDef*) {{
    PyObject* origin = PyObject_GetAttrString(spec, "origin");
    const char* path = origin == nullptr ? nullptr : PyUnicode_AsUTF8(origin);
    PyObject* made = nullptr;
    if (path != nullptr) {{
        const char* slash = std::strrchr(path, '/');
        const char* name = slash == nullptr ? path : slash + 1;
        {choices}PyErr_Format(PyExc_ImportError, "there is no kernel of %s here", name);
    }}
    Py_XDECREF(origin);
    return made;
}}

static PyModuleDef_Slot slots[] = {{{{Py_mod_create, reinterpret_cast<void*>(module_of)}}, {{0, nullptr}}}};
static PyModuleDef modules = {{PyModuleDef_HEAD_INIT, "kernel", nullptr, 0, nullptr, slots}};

PyMODINIT_FUNC PyInit_kernel(void) {{ return PyModuleDef_Init(&modules); }}
"""
"""One library under the names of many: Python tells it by which of them it is imported."""

_CHOICE = (
    'if (std::strcmp(name, "{name}") == 0) made = part_{number}::PyInit_kernel_{number}(); else\n        '
)

Task = Callable[[], object]


class _Kernel:
    """A kernel that inductor wants to have compiled: its source, its library, and the command for that."""

    def __init__(self, task: Task, builder: Any) -> None:
        """`task` compiles it alone; `builder` is inductor's `CppBuilder` of it."""
        self.task, self.library = task, Path(builder.get_target_file_path())
        self.file = self.library.with_suffix(".cpp")
        self.source = self.file.read_text(encoding="utf-8")
        self._command = str(builder.get_command_line())

    @property
    def is_plain(self) -> bool:
        """Whether it is a module of Python that includes headers as others do, and has no macros before."""
        told = self._command.split()
        is_known = str(self.file) in told and str(self.library) in told
        *_, last = (0, *(found.end() for found in _INCLUDED.finditer(self.source)))
        return is_known and self.source.count(_MODULE) == 1 and not _DEFINED.search(self.source[:last])

    def part(self, number: int) -> str:
        """Its source as one of several."""
        forgotten = "\n".join(f"#undef {name}" for name in dict.fromkeys(_DEFINED.findall(self.source)))
        return _PART.format(number=number, source=_INCLUDED.sub("", self.source), forgotten=forgotten)

    def command(self, file: Path, library: Path) -> list[str]:
        """The command that makes a library of another file, with the same flags."""
        places = {str(self.file): str(file), str(self.library): str(library)}
        return [places.get(word, word) for word in shlex.split(self._command)]

    @property
    def flags(self) -> tuple[str, ...]:
        """What the commands of kernels that go together have in common."""
        return tuple(self.command(Path("file"), Path("library")))


class _Batch:
    """The kernels that were asked for since the last ones were compiled."""

    def __init__(self) -> None:
        self._kernels: list[_Kernel] = []

    def add(self, kernel: _Kernel) -> _Batch:
        """It is compiled with the others when the first of them is wanted."""
        self._kernels.append(kernel)
        return self

    def result(self, timeout: float | None = None) -> None:
        """Compile what waits: together, and what fails alone. Inductor tells why a kernel cannot be.

        An interruption ends it, though compilers that run go on.
        """
        kernels, self._kernels = self._kernels, []
        from torch._inductor.async_compile import get_compile_threads  # it takes seconds to load

        count = get_compile_threads()
        shares = [share for alike in _alike(kernels) for share in _shared(alike, count)]
        pool = ThreadPoolExecutor(count)
        try:
            left = [kernel for failed in pool.map(_compiled, shares) for kernel in failed]
            list(pool.map(_compile_alone, left))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_batch: ContextVar[_Batch | None] = ContextVar("batch", default=None)


@contextlib.contextmanager
def merged_kernels() -> Iterator[None]:
    """During the block inductor compiles the kernels of each graph together, in this thread's compilations.

    Only on POSIX systems, where a file may have several names.
    """
    if os.name != "posix":
        yield
        return
    _take_over()
    before = _batch.set(_Batch())
    try:
        yield
    finally:
        _batch.reset(before)


@functools.cache
def _take_over() -> None:
    """From now on kernels come to `_submit`, which gives those outside of blocks to inductor's threads."""
    from torch._inductor.async_compile import AsyncCompile  # it takes seconds to load

    own: Any = AsyncCompile
    own.submit = staticmethod(functools.partial(_submit, own.submit))


def _submit(inductors: Callable[[Task], Any], task: Task) -> Any:
    """A kernel for the batch of this thread; anything else goes to inductor."""
    if (batch := _batch.get()) is not None and isinstance(task, functools.partial):
        with contextlib.suppress(Exception):  # inductor's builders are not a public interface
            _, [builder] = task.args
            if (kernel := _Kernel(task, builder)).is_plain:
                return batch.add(kernel)
    return inductors(task)


def _alike(kernels: Sequence[_Kernel]) -> list[list[_Kernel]]:
    """Kernels whose commands differ in their files only."""
    found: dict[tuple[str, ...], list[_Kernel]] = {}
    for kernel in kernels:
        found.setdefault(kernel.flags, []).append(kernel)
    return list(found.values())


def _shared(kernels: Sequence[_Kernel], count: int) -> list[list[_Kernel]]:
    """Kernels in so many shares that take about as long, in more if they are many, the longest first."""
    count = max(count, math.ceil(len(kernels) / MOST))
    shares: list[tuple[int, list[_Kernel]]] = [(0, []) for _ in range(count)]
    for kernel in sorted(kernels, key=lambda kernel: len(kernel.source), reverse=True):
        least = min(range(count), key=lambda number: shares[number][0])
        size, share = shares[least]
        shares[least] = size + EACH + len(kernel.source), [*share, kernel]
    return [share for _, share in shares if share]


def merged(kernels: Sequence[_Kernel]) -> str:
    """The source of one library for all: each is in a namespace of its own, behind the headers of all."""
    headers = dict.fromkeys(line for kernel in kernels for line in _INCLUDED.findall(kernel.source))
    parts = [kernel.part(number) for number, kernel in enumerate(kernels)]
    choices = "".join(
        _CHOICE.format(name=kernel.library.name, number=number) for number, kernel in enumerate(kernels)
    )
    return "\n".join(["#define PY_SSIZE_T_CLEAN", *headers, *parts, _MODULES.format(choices=choices)])


def _compiled(kernels: Sequence[_Kernel]) -> Sequence[_Kernel]:
    """Compile a share; those of it that are to be compiled alone."""
    if len(kernels) > 1:
        try:
            _compile_together(kernels)
        except (OSError, subprocess.SubprocessError) as error:
            logger.debug("ampopt: kernels are compiled one by one", exc_info=error)
            return kernels
    else:
        _compile_alone(*kernels)
    return []


def _compile_alone(kernel: _Kernel) -> None:
    with contextlib.suppress(Exception):  # inductor compiles it once more when it loads it, and tells
        kernel.task()


def _compile_together(kernels: Sequence[_Kernel]) -> None:
    """Compile kernels as one library, which gets the names of theirs, each in one step.

    Where a file may have one name only, they are copies. Raises OSError and SubprocessError.
    """
    with tempfile.TemporaryDirectory(prefix="ampopt-") as folder:
        file, library = Path(folder, "merged.cpp"), Path(folder, "merged.so")
        file.write_text(merged(kernels), encoding="utf-8")
        subprocess.run(kernels[0].command(file, library), cwd=folder, check=True, capture_output=True)
        first, *others = kernels
        _copy(library, first.library)
        try:
            also_named(first.library, *(other.library for other in others))
        except OSError:
            for other in others:
                _copy(library, other.library)


def _copy(library: Path, to: Path) -> None:
    with replacing(to) as made:
        shutil.copyfile(library, made)
