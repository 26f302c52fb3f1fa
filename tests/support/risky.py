"""Engines that do what goes wrong in a process of its own, and how a test has them rehearsed there."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ampopt.ir.graph import aten
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Pass, Rehearsed, Result
from ampopt.search.rehearsal import Sandbox
from tests.support.planted import rewritten

X = torch.ones(1, 3)
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Risky(Engine):
    """Negates the output twice; in any process but `home` it does what `elsewhere` says before that."""

    risky = True

    elsewhere: str = "nothing"
    home: int = 0
    note: str = ""

    def apply(self, program: Program) -> Result:
        """See the class."""
        if self.note:
            Path(self.note).write_text(f"{os.getpid()} {torch.get_num_threads()}")
        if os.getpid() != self.home:
            if self.elsewhere == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.elsewhere == "exit":
                os._exit(3)
            if self.elsewhere == "hang":
                time.sleep(600)
            if self.elsewhere == "raise":
                raise ValueError("no such kernel\nand much more")
        return Result(rewritten(rewritten(program, aten.neg.default), aten.neg.default), 1)


@dataclasses.dataclass(frozen=True)
class Waiting(Risky):
    """In another process it waits for the note, which it writes at home before it asks how that one does."""

    def apply(self, program: Program) -> Result:
        """See the class."""
        while not Path(self.note).exists():
            time.sleep(0.01)
        return super().apply(program)

    def apply_beside(self, program: Program, rehearsed: Callable[[], Rehearsed]) -> Result:
        """See the class."""
        Path(self.note).touch()
        return super().apply_beside(program, rehearsed)


def made(sandbox: Sandbox, step: Pass, program: Program) -> bool:
    """Whether a step that was begun ahead ends well within a minute."""
    deadline = time.perf_counter() + 60
    while not sandbox.has_made(step, program) and time.perf_counter() < deadline:
        time.sleep(0.05)
    return sandbox.has_made(step, program)


def rehearse(sandbox: Sandbox, step: Engine, program: Program, *, seconds: float) -> str | None:
    """Why a step was not rehearsed; None: it was. Its failure is raised."""
    with sandbox.rehearsing(step, program, seconds=seconds) as rehearsed:
        return rehearsed().why_not
