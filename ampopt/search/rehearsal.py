"""Rehearsals: a risky pass first runs in another process, so that a crash or hang does no harm here.

A third-party compiler can crash the process, corrupt its CUDA context permanently, or not return in time. The
process cannot recover from this, so the compiler first runs in a sandbox, including capture and replay: a
process that gets the program, and is killed at its time limit. The compiled code stays in the compilers' disk
caches, so that the repetition in this process takes a fraction of the time. Steps before the compilation may
run in this process at the same time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Pass, Rehearsed, Result, outcome
from ampopt.kernels.fused_conv import is_available, load_ahead
from ampopt.search.estimates import divided, expected_s, why_not
from ampopt.search.preparers import Preparers
from ampopt.search.worker import Job, TooLongError, Worker
from ampopt.system.cores import usable_cpus

__all__ = ["Sandbox", "TooLongError"]


MOST_PROCESSES = 4
"""Processes that compile at once."""

CORES_EACH = 4
"""Cores for each of them. A compiler works in Python on one, and gives kernels to processes of its own."""

MOST_TO_PREPARE, CORES_TO_PREPARE = 2, 8
"""Processes that prepare a pass at once, beside several that compile, and cores for the threads of each."""

MEMORY_EACH = 4 << 30
"""Free memory in bytes of the GPU for each of them: a context takes up to 0.6 GiB, beside the weights."""


@dataclasses.dataclass(eq=False)
class _Rehearsal:
    """A step on a program, as jobs of processes that may work on them at once."""

    step: Engine
    program: Program
    jobs: list[Job]
    count: int
    """For how many processes the program was divided."""

    def is_of(self, step: Pass, program: Program) -> bool:
        """Whether it is this step, on a program made from the same capture in the same way."""
        return self.goes_with(program) and self.program.recipe == program.recipe and self.step == step

    def goes_with(self, program: Program) -> bool:
        """Whether both programs are of the same lane of the same capture."""
        return self.program.lane == program.lane and self.program.examples is program.examples

    @property
    def is_working(self) -> bool:
        """Whether a process has not answered yet."""
        return not all(job.worker.has_come(job) for job in self.jobs)

    @property
    def has_ended_well(self) -> bool:
        """Whether all of it is made."""
        return all(job.worker.has_come(job) and isinstance(job.told, Rehearsed) for job in self.jobs)

    def wait(self, deadline: float, seconds: float) -> Rehearsed:
        """What came of it, see `Worker.wait`."""
        told = [job.worker.wait(job, deadline, seconds) for job in self.jobs]
        why_not = next((each.why_not for each in told if each.why_not is not None), None)
        return Rehearsed(why_not, tuple(sent for each in told for sent in each.sent), self.count)

    def end(self) -> None:
        """Forget it, see `Worker.end`."""
        for job in self.jobs:
            job.worker.end(job)


class Sandbox:
    """The processes in which passes are rehearsed. `device` is the device of their programs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        count, cores = how_many(device), len(usable_cpus())
        self.workers = [Worker(device, cores // count) for _ in range(count)]
        self._preparers = Preparers(device, min(cores // CORES_TO_PREPARE, MOST_TO_PREPARE) * (count > 1))
        self._begun: list[_Rehearsal] = []
        """What was begun ahead and not taken up yet, in this order."""

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prepare(self) -> None:
        """Start the processes now, so that they load their libraries during other work, as Triton does here.

        Not on a CPU, where one starts on first use: while it loads, a call of a network on two cores takes up
        to 15 times as long, and timings in this process are noise.
        """
        if self.works_beside:
            for worker in self.workers:
                worker.start()
            self._preparers.start()
            if self.device.type == "cuda" and is_available():
                threading.Thread(target=load_ahead, args=(self.device,), daemon=True).start()

    @property
    def works_beside(self) -> bool:
        """Whether a rehearsal may run beside measurements: not on a CPU, see `prepare`."""
        return _possible() and self.device.type != "cpu"

    def begin(self, step: Pass, program: Program) -> None:
        """Start to rehearse a risky step, in the process that has least to do, or to prepare another one.

        `apply` takes it up later. It does nothing where that would disturb measurements, where the program
        cannot be sent, or where this was begun already. What was begun on other captures, and was not taken
        up, is given up.
        """
        if not self.works_beside or why_not(step, program) is not None:
            return
        if not isinstance(step, Engine):
            self._preparers.begin(step, program)
            return
        if not step.risky or self.is_rehearsing(step, program):
            return
        for begun in [each for each in self._begun if each.program.examples is not program.examples]:
            self._give_up(begun)
        if isinstance(sent := self._send(step, program), _Rehearsal):
            self._begun.append(sent)

    def _send(self, step: Engine, program: Program) -> _Rehearsal | str:
        """Give a step to the processes, in pieces if it has any; or why the program cannot be sent."""
        rehearsal, whole = _Rehearsal(step, program, [], len(self.workers)), step.undivided()
        for piece in divided(step, program, rehearsal.count):
            freest = min(self.workers, key=lambda worker: worker.queue_length)
            if isinstance(sent := freest.send(whole, piece), str):
                rehearsal.end()
                return sent
            rehearsal.jobs.append(sent)
        return rehearsal

    def give_up(self, program: Program) -> None:
        """Forget what was begun ahead on programs of the lane of this one."""
        for begun in [each for each in self._begun if each.goes_with(program)]:
            self._give_up(begun)

    def _give_up(self, begun: _Rehearsal) -> None:
        """Forget what was begun ahead; a process is killed only if it works on that."""
        self._begun.remove(begun)
        begun.end()

    def _find(self, step: Pass, program: Program) -> _Rehearsal | None:
        """What was begun of this step on this program, and was not taken up yet."""
        return next((each for each in self._begun if each.is_of(step, program)), None)

    def is_rehearsing(self, step: Pass, program: Program) -> bool:
        """Whether this step on this program was begun ahead, and was not taken up yet."""
        return self._find(step, program) is not None

    def begun(self, step: Pass, program: Program) -> list[Program]:
        """The programs of a program's lane on which a step was begun ahead and not taken up yet, in order."""
        return [each.program for each in self._begun if each.step == step and each.goes_with(program)]

    def has_made(self, step: Pass, program: Program) -> bool:
        """Whether a step that was begun ahead has ended well on this program, and was not taken up yet."""
        found = self._find(step, program)
        return found is not None and found.has_ended_well

    def is_working(self, step: Pass, program: Program) -> bool:
        """Whether processes still work on a step that was begun ahead, or come to it after others."""
        found = self._find(step, program)
        return found is not None and found.is_working

    def expected_s(self, step: Pass, program: Program) -> float:
        """About how many seconds a step takes: one begun ahead in pieces, as many as the longest of them."""
        if not self.is_rehearsing(step, program) or not isinstance(step, Engine):
            return expected_s(step, program)
        return max(expected_s(step, piece) for piece in divided(step, program, len(self.workers)))

    def ahead_s(self, step: Pass, program: Program) -> float:
        """How many seconds ago this step on this program was begun ahead; 0 if it was not, or waits."""
        found = self._find(step, program)
        if found is None or not all(job.worker.has_begun(job) for job in found.jobs):
            return 0.0
        return time.perf_counter() - max(job.began for job in found.jobs)

    def apply(self, step: Pass, program: Program, *, seconds: float) -> tuple[Result, str | None]:
        """Apply `step` to `program`; a risky step runs in the sandbox first, then here.

        Raises PassError if it fails in the sandbox or exceeds its time limit. Also returns None, or why no
        rehearsal was possible: the system has no POSIX processes, or the program cannot be loaded in another
        process, for example because its operators are registered in this one only.
        """
        step = self._preparers.end_for(step)
        if not isinstance(step, Engine) or not self._is_risky(step):
            return outcome(program, step.apply), None
        if (begun := self._find(step, program)) is not None:
            program = begun.program  # which has been divided
        with self.rehearsing(step, program, seconds=seconds) as rehearsed:
            result = outcome(program, lambda given: step.apply_beside(given, rehearsed))
            return result, rehearsed().why_not

    def _is_risky(self, step: Engine) -> bool:
        return step.risky or (step.risky_on_cuda and self.device.type == "cuda")

    @contextlib.contextmanager
    def rehearsing(
        self, step: Engine, program: Program, *, seconds: float
    ) -> Iterator[Callable[[], Rehearsed]]:
        """Apply `step` to `program` in the sandbox, and run the result, during the block.

        The block gets a function that waits for the end; see `apply` for what it raises. It can be called
        several times. A rehearsal that has not ended after the block is killed.
        """
        if not _possible():
            yield lambda: Rehearsed("this system has no POSIX processes to rehearse in")
            return
        deadline = time.perf_counter() + seconds
        rehearsal = self._find(step, program)
        if rehearsal is not None:
            self._begun.remove(rehearsal)
        else:
            sent = self._send(step, program)
            if isinstance(sent, str):
                why_not = Rehearsed(sent)
                yield lambda: why_not
                return
            rehearsal = sent
        taken = rehearsal
        told: list[Rehearsed] = []

        def rehearsed() -> Rehearsed:
            if not taken.has_ended_well:
                _load_compiler()
            if not told:
                told.append(taken.wait(deadline, seconds))
            return told[0]

        try:
            yield rehearsed
        finally:  # Ctrl-C, too: nothing is to go on over there
            taken.end()

    def has_answered(self) -> bool:
        """Whether nothing is being rehearsed: the last one has ended, well or not."""
        return not any(worker.queue_length for worker in self.workers)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the processes and their children during the block: they take no time from timings here."""
        with contextlib.ExitStack() as stack:
            for worker in self.workers:
                stack.enter_context(worker.paused())
            yield

    def close(self) -> None:
        """Kill the processes and all their child processes."""
        self._preparers.close()
        for worker in self.workers:
            worker.kill()  # all of them, before any is waited for
        for worker in self.workers:
            worker.close()
        for begun in self._begun:
            begun.end()
        self._begun = []


def how_many(device: torch.device) -> int:
    """The number of processes that may compile at once for a device: one, or more beside a GPU."""
    if device.type != "cuda":
        return 1
    room = min(len(usable_cpus()) // CORES_EACH, torch.cuda.mem_get_info(device)[0] // MEMORY_EACH)
    return max(1, min(room, MOST_PROCESSES))


def _possible() -> bool:
    return os.name == "posix" and bool(sys.executable)


def _load_compiler() -> None:
    """Load inductor here, too, which takes seconds, while the other process compiles."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._inductor.compile_fx")
