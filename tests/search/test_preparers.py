"""Work ahead of a pass in other processes: it is shared, it ends with its pass, and it may fail."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from ampopt.ir.program import Program
from ampopt.search.preparers import Preparers
from tests.support.planted import Planted, captured_of

CPU = torch.device("cpu")
X = torch.ones(1, 3)


def note(file: Path, seconds: float = 0.0) -> None:
    """What a process does for the pass below."""
    file.write_text(str(os.getpid()))
    time.sleep(seconds)


@dataclasses.dataclass(frozen=True)
class Prepared(Planted):
    """Has one thing to prepare for each process: a file with its number."""

    folder: str = ""
    lasts_s: float = 0.0

    def preparations(self, program: Program, count: int) -> Sequence[Callable[[], object]]:
        """See the class."""
        files = [Path(self.folder, str(place)) for place in range(count)]
        return [functools.partial(note, file, self.lasts_s) for file in files]


class Unprepared(Planted):
    """Fails before it can say what there is to prepare."""

    def preparations(self, program: Program, count: int) -> Sequence[Callable[[], object]]:
        """See the class."""
        raise ValueError("no such graph")


@pytest.fixture
def program() -> Program:
    return captured_of(nn.Linear(3, 2), X)[1].program


def wait_for(*files: Path) -> list[int]:
    """The process numbers in the files, which are there within a minute."""
    deadline = time.perf_counter() + 60
    while not all(file.exists() and file.read_text() for file in files) and time.perf_counter() < deadline:
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def has_ended(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    return False


def test_each_process_does_a_share(program: Program, tmp_path: Path) -> None:
    preparers = Preparers(CPU, 2)
    preparers.begin(Prepared("one", folder=str(tmp_path)), program)
    numbers = wait_for(tmp_path / "0", tmp_path / "1")
    assert len({*numbers, os.getpid()}) == 3
    preparers.close()


def test_the_pass_that_is_applied_ends_the_work_for_it_and_no_other(program: Program, tmp_path: Path) -> None:
    preparers = Preparers(CPU, 1)
    preparers.begin(Prepared("one", folder=str(tmp_path), lasts_s=600.0), program)
    [number] = wait_for(tmp_path / "0")
    preparers.end_for(Planted("two"))
    assert not has_ended(number)
    preparers.end_for(Prepared("one"))
    ended = os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT)  # it would sleep for ten minutes
    assert ended is not None
    assert ended.si_status == signal.SIGKILL
    preparers.close()
    assert has_ended(number)


def test_busy_processes_take_nothing_else(program: Program, tmp_path: Path) -> None:
    preparers = Preparers(CPU, 1)
    preparers.begin(Prepared("one", folder=str(tmp_path), lasts_s=600.0), program)
    other = tmp_path / "other"
    other.mkdir()
    preparers.begin(Prepared("two", folder=str(other)), program)
    wait_for(tmp_path / "0")
    preparers.close()
    assert list(other.iterdir()) == []


def test_what_cannot_be_prepared_is_the_business_of_its_trial(program: Program) -> None:
    preparers = Preparers(CPU, 1)
    preparers.begin(Unprepared("fails"), program)
    preparers.begin(Planted("has nothing to prepare"), program)
    preparers.close()


def test_without_processes_nothing_is_asked_for(program: Program) -> None:
    preparers = Preparers(CPU, 0)
    preparers.start()
    preparers.begin(Unprepared("fails"), program)
    preparers.close()
