"""Fresh processes without the seconds that PyTorch takes to load: forked from one that has only loaded it."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

LOADED = ["torch", "ampopt.ir.settings", "tests.support.snapshot"]
"""What the process that is forked has loaded; it has done nothing else."""

_CONTEXT = multiprocessing.get_context("forkserver")


def fresh_process(target: Callable[..., object], *arguments: object) -> BaseProcess:
    """One that calls `target`, and that is started."""
    _CONTEXT.set_forkserver_preload(LOADED)
    process = _CONTEXT.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


class _Child:
    """What `subprocess.Popen` says of a process, for one that was forked."""

    stdin = None

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._process, self.pid, self.kill = process, process.pid, process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("", timeout or 0.0)
        return self._process.exitcode


def _run(
    module: str, rest: Sequence[str], line: Connection, ready: Connection, environ: Mapping[str, str]
) -> None:
    os.setsid()
    ready.close()
    os.environ.update(environ)
    for number in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    sys.argv = [module, str(os.dup(line.fileno())), *rest]
    line.close()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _start(module: str, number: str, *rest: str, cores: int, pass_fds: Sequence[int]) -> _Child:
    assert pass_fds == [int(number)]
    line, (ours, theirs) = Connection(os.dup(int(number))), multiprocessing.Pipe()
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(cores)}
    process = fresh_process(_run, module, rest, line, theirs, environ)
    theirs.close()
    line.close()
    with pytest.raises(EOFError):  # it has a session of its own now, and can be killed with its children
        ours.recv_bytes()
    return _Child(process)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that rehearse are forked; how they start elsewhere, other tests show."""
    start: Any = _start
    monkeypatch.setattr("ampopt.search.worker.start_child", start)
