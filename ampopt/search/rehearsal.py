"""Rehearsals: a risky pass first runs in another process, so that a crash or hang does no harm here.

A third-party compiler can crash the process, corrupt its CUDA context permanently, or not return in time. The
process cannot recover from this, so the compiler first runs in a sandbox, including capture and replay: a
process that gets the program, and is killed at its time limit. The compiled code stays in the compilers' disk
caches, so that the repetition in this process takes a fraction of the time. Steps before the compilation may
run in this process at the same time.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Pass, Rehearsed, Result
from ampopt.search.worker import Job, TooLongError, Worker
from ampopt.system.cores import usable_cpus

__all__ = ["Sandbox", "TooLongError"]


MANY_CORES = 8
"""From this number of cores on two processes compile at once: each takes one, and measurements another.

A compiler works in Python on one core for 9 to 22 s, and both lanes, or a graph with kernels and the same one
without them, may be worth that.
"""

AMPLE_MEMORY = 8 << 30
"""Free memory in bytes of a GPU on which a second process is no burden: a context takes up to 0.6 GiB."""


class Sandbox:
    """The processes in which passes are rehearsed. `device` is the device of their programs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.workers = [Worker(device) for _ in range(how_many(device))]
        self._begun: list[Job] = []
        """What was begun ahead and not taken up yet, in this order."""

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prepare(self) -> None:
        """Start the processes now, so that they load their libraries during other work.

        Not on a CPU, where one starts on first use: while it loads, a call of a network on two cores takes up
        to 15 times as long, and timings in this process are noise.
        """
        if self.works_beside:
            for worker in self.workers:
                worker.start()

    @property
    def works_beside(self) -> bool:
        """Whether a rehearsal may run beside measurements: not on a CPU, see `prepare`."""
        return _possible() and self.device.type != "cpu"

    def begin(self, step: Pass, program: Program) -> None:
        """Start to rehearse a risky step, in the process that has least to do.

        `apply` takes it up later. It does nothing where that would disturb measurements, where the program
        cannot be sent, or where this was begun already. What was begun on other captures, and was not taken
        up, is given up.
        """
        if not isinstance(step, Engine) or not step.risky or step.why_not(program) is not None:
            return
        if not self.works_beside or self.is_rehearsing(step, program):
            return
        for job in [job for job in self._begun if job.program.examples is not program.examples]:
            self._give_up(job)
        if isinstance(sent := self._freest.send(step, program), Job):
            self._begun.append(sent)

    def give_up(self, program: Program) -> None:
        """Forget what was begun ahead on programs of the lane of this one."""
        for job in [job for job in self._begun if job.goes_with(program)]:
            self._give_up(job)

    @property
    def _freest(self) -> Worker:
        return min(self.workers, key=lambda worker: worker.queue_length)

    def _give_up(self, job: Job) -> None:
        """Forget what was begun ahead; a process is killed only if it works on that."""
        self._begun.remove(job)
        job.worker.end(job)

    def _find(self, step: Pass, program: Program) -> Job | None:
        """What was begun of this step on this program, and was not taken up yet."""
        return next((job for job in self._begun if job.is_of(step, program)), None)

    def is_rehearsing(self, step: Pass, program: Program) -> bool:
        """Whether this step on this program was begun ahead, and was not taken up yet."""
        return self._find(step, program) is not None

    def begun(self, step: Pass, program: Program) -> list[Program]:
        """The programs of a program's lane on which a step was begun ahead and not taken up yet, in order."""
        return [job.program for job in self._begun if job.step == step and job.goes_with(program)]

    def has_made(self, step: Pass, program: Program) -> bool:
        """Whether a step that was begun ahead has ended well on this program, and was not taken up yet."""
        job = self._find(step, program)
        return job is not None and job.worker.has_come(job) and isinstance(job.told, Rehearsed)

    def ahead_s(self, step: Pass, program: Program) -> float:
        """How many seconds ago this step on this program was begun ahead; 0 if it was not, or waits."""
        job = self._find(step, program)
        return 0.0 if job is None or not job.worker.has_begun(job) else time.perf_counter() - job.began

    def apply(self, step: Pass, program: Program, *, seconds: float) -> tuple[Result, str | None]:
        """Apply `step` to `program`; a risky step runs in the sandbox first, then here.

        Raises PassError if it fails in the sandbox or exceeds its time limit. Also returns None, or why no
        rehearsal was possible: the system has no POSIX processes, or the program cannot be loaded in another
        process, for example because its operators are registered in this one only.
        """
        if not isinstance(step, Engine) or not step.risky:
            return step.apply(program), None
        with self.rehearsing(step, program, seconds=seconds) as rehearsed:
            return step.apply_beside(program, rehearsed), rehearsed().why_not

    @contextlib.contextmanager
    def rehearsing(
        self, step: Pass, program: Program, *, seconds: float
    ) -> Iterator[Callable[[], Rehearsed]]:
        """Apply `step` to `program` in the sandbox, and run the result, during the block.

        The block gets a function that waits for the end; see `apply` for what it raises. It can be called
        several times. A rehearsal that has not ended after the block is killed.
        """
        if not _possible():
            yield lambda: Rehearsed("this system has no POSIX processes to rehearse in")
            return
        deadline = time.perf_counter() + seconds
        job = self._find(step, program)
        if job is not None:
            self._begun.remove(job)
        else:
            sent = self._freest.send(step, program)
            if isinstance(sent, str):
                why_not = Rehearsed(sent)
                yield lambda: why_not
                return
            job = sent
        taken = job

        def rehearsed() -> Rehearsed:
            if taken.told is None:
                _load_compiler()
            return taken.worker.wait(taken, deadline, seconds)

        try:
            yield rehearsed
        finally:  # Ctrl-C, too: nothing is to go on over there
            taken.worker.end(taken)

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
        for worker in self.workers:
            worker.close()
        for job in self._begun:
            job.folder.cleanup()
        self._begun = []


def how_many(device: torch.device) -> int:
    """The number of processes that may compile at once for a device: two beside a GPU of a large machine."""
    if device.type != "cuda" or len(usable_cpus()) < MANY_CORES:
        return 1
    return 2 if torch.cuda.mem_get_info(device)[0] >= AMPLE_MEMORY else 1


def _possible() -> bool:
    return os.name == "posix" and bool(sys.executable)


def _load_compiler() -> None:
    """Load inductor here, too, which takes seconds, while the other process compiles."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._inductor.compile_fx")
