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
from tests.support.rewritten import rewritten

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


@dataclasses.dataclass(frozen=True)
class InHalves(Risky):
    """It is rehearsed as two programs, of which the second one has other examples, each as a whole."""

    is_whole: bool = False

    def divided(self, program: Program, count: int) -> list[Program]:
        """See the class."""
        return [program, program.replace(examples=(2 * X,))] if count > 1 else [program]

    def undivided(self) -> InHalves:
        """See the class."""
        return dataclasses.replace(self, is_whole=True)

    def send(self, program: Program) -> dict[str, object] | None:
        """See the class."""
        return {"example": program.examples[0]} if self.is_whole else None


@dataclasses.dataclass(frozen=True)
class Uneven(InHalves):
    """The second half takes longer than the first one."""

    def expected_seconds(self, program: Program) -> float:
        """See the class."""
        return 7.0 if torch.equal(program.examples[0], 2 * X) else 3.0


@dataclasses.dataclass(frozen=True)
class RiskyOnCuda(Risky):
    """One whose kernels could leave a GPU unusable."""

    risky = False
    risky_on_cuda = True


@dataclasses.dataclass(frozen=True)
class Sending(Risky):
    """Sends a tensor back."""

    def send(self, program: Program) -> dict[str, object] | None:
        """See the class."""
        return {"weight": torch.ones(2)}


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
