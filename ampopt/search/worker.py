"""A process of our own that applies passes, one after another, and answers what came of each.

What crashes or hangs there does no harm here: the process is killed, and what waited in it gets a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.serialization import default_restore_location

from ampopt.engines.graph_capture import ReplayedProgram
from ampopt.errors import AmpoptError, PassError, first_line
from ampopt.ir.pickled import write_pickle
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Pass, Rehearsed
from ampopt.kernels.cudnn_shapes import know_shapes
from ampopt.kernels.own_operators import register
from ampopt.measure.clocks import synchronize
from ampopt.system.children import start_child
from ampopt.system.interrupts import check_interrupted

PROGRAM, SENT_BACK = "program.pickle", "sent.pt"
"""The files of a job, in a folder of its own."""


class TooLongError(PassError):
    """A job was stopped at its time limit."""


@dataclasses.dataclass(eq=False)
class Job:
    """A pass and a program that were sent to a worker, and what came of them.

    `began`: when the worker could begin with it, on `time.perf_counter`'s clock. `worker`: which has it.
    """

    step: Pass
    program: Program
    folder: tempfile.TemporaryDirectory[str]
    began: float
    worker: Worker
    told: Rehearsed | PassError | None = None


class Worker:
    """A process that takes jobs in turn: started on first use, replaced where it ends, killed at the end.

    `device` is the device of the programs, `cores` the number of processes that may compile kernels for it.
    """

    def __init__(self, device: torch.device, cores: int) -> None:
        self.device, self._cores = device, cores
        self._jobs: deque[Job] = deque()
        """Those that were sent and are not answered yet."""
        self.process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None

    def send(self, step: Pass, program: Program) -> Job | str:
        """The job, which the process does after those before it; or why the program cannot be sent."""
        with contextlib.ExitStack() as undo:
            try:
                folder = tempfile.TemporaryDirectory(prefix="ampopt-", ignore_cleanup_errors=True)
                undo.callback(folder.cleanup)
                with Path(folder.name, PROGRAM).open("wb") as file:
                    write_pickle((torch.get_num_threads(), step, program), file)
                job = Job(step, program, folder, time.perf_counter(), self)
                self._give(job)
            except Exception as error:  # what pickle cannot take, a full disk, no process or memory left
                check_interrupted(error)
                return f"the program cannot be sent to another process: {first_line(error)}"
            undo.pop_all()
            return job

    def _give(self, job: Job) -> None:
        line, job.began = self.start(), time.perf_counter()
        with contextlib.suppress(OSError):  # it has ended: its answer will say so
            line.send_bytes(job.folder.name.encode())  # short: it never waits for the other side
        self._jobs.append(job)

    def has_come(self, job: Job) -> bool:
        """Whether `wait` would not wait."""
        while job.told is None and job in self._jobs and self._receive(0.0):
            pass
        return job.told is not None

    @property
    def queue_length(self) -> int:
        """The number of jobs that are not answered yet."""
        while self._jobs and self._receive(0.0):
            pass
        return len(self._jobs)

    def has_begun(self, job: Job) -> bool:
        """Whether the process has come to a job: those before it are answered."""
        return self.has_come(job) or (bool(self._jobs) and self._jobs[0] is job)

    def wait(self, job: Job, deadline: float, seconds: float) -> Rehearsed:
        """What came of a job, waited for until a time on `time.perf_counter`'s clock.

        Raises PassError where it failed, and TooLongError, which names the `seconds`, where it takes longer.
        """
        while job.told is None:
            if not self._receive(max(deadline - time.perf_counter(), 0.0)):
                self.end(job)
                job.told = TooLongError(
                    f"it took longer than the {seconds:.0f} s that were left of the budget"
                )
        if isinstance(job.told, PassError):
            raise job.told
        return job.told

    def _receive(self, seconds: float) -> bool:
        """Take the next answer, the end of the process being one; False if none comes in time."""
        assert self._line is not None
        try:
            if not self._line.poll(seconds if math.isfinite(seconds) else None):
                return False
            answer: dict[str, str] = json.loads(self._line.recv_bytes())
        except (EOFError, OSError) as error:
            job = self._jobs.popleft()
            job.told = PassError(f"it brought down a process of its own ({self._how_it_ended()})")
            job.told.__cause__ = error
            self._start_anew()
            return True
        job = self._jobs.popleft()
        if self._jobs:
            self._jobs[0].began = time.perf_counter()
        if (reason := answer.get("failed")) is not None:
            job.told = PassError(f"it failed in a process of its own: {reason}")
            if "broken" in answer:
                self._start_anew()
        elif job.told is None:
            job.told = Rehearsed(answer.get("unloadable"), (self._received(job),))
        return True

    def _start_anew(self) -> None:
        """Kill the process, and give what it has not answered to another one."""
        waiting = list(self._jobs)
        self.close()
        for job in waiting:
            try:
                self._give(job)
            except OSError as error:  # no memory or no process left
                job.told = PassError(f"no process could be started for it: {first_line(error)}")

    def _received(self, job: Job) -> dict[str, Any] | None:
        """What was sent back; None where that is nothing, or is incomplete: a full disk costs only time."""
        try:
            file = Path(job.folder.name, SENT_BACK)
            sent: dict[str, Any] = torch.load(file, map_location=self.restored)
        except (OSError, RuntimeError, pickle.UnpicklingError):
            return None
        return sent

    def restored(self, storage: Any, place: str) -> Any:
        """The memory of what was sent, on the device as here; what was on the CPU there stays on it."""
        return default_restore_location(storage, place if place == "cpu" else str(self.device))

    def end(self, job: Job) -> None:
        """Forget a job: a process that works on it is killed, one that has not come to it passes it by."""
        if not self.has_come(job) and self.has_begun(job):
            self._jobs.popleft()
            self._start_anew()
        job.folder.cleanup()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the process and its children during the block, so that they take no time from timings here."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def start(self) -> Connection:
        """Start the process, if there is none, or if it has ended while it had nothing to do."""
        if self.process is not None and not self._jobs and self.process.poll() is not None:
            self.close()
        if self._line is None:
            ours, theirs = multiprocessing.Pipe()
            numbers = [theirs.fileno()]
            self.process = start_child(
                __name__, str(numbers[0]), str(self.device), cores=self._cores, pass_fds=numbers
            )
            theirs.close()
            self._line = ours
        return self._line

    def _how_it_ended(self) -> str:
        assert self.process is not None
        try:
            status = self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "it hung up"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def kill(self) -> None:
        """Kill the process and all its child processes, and do not wait for their end."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and all its child processes, and forget what it has not answered."""
        if self._line is not None:
            self._line.close()
        if self.process is not None:
            self.kill()
            self.process.wait()
        self.process = self._line = None
        self._jobs.clear()


def _load_inductor(device: torch.device, line: Connection) -> None:
    """Load inductor, and start the processes in which it compiles, before the first program comes.

    If none is there then, something small is compiled, so that nothing is left to be loaded. Where any of it
    fails, so will the first program, and then the reason is told.
    """
    with contextlib.suppress(Exception), torch.no_grad():
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.compile_fx import compile_fx  # noqa: F401 - it is loaded while those start

        AsyncCompile.use_process_pool()
        if not line.poll(0):
            small = torch.fx.symbolic_trace(torch.nn.ReLU())
            example = torch.ones(8, device=device)
            torch._inductor.compile(small, [example], options={"freezing": True})(example)


def _perform(step: Engine, program: Program) -> dict[str, Any] | None:
    """Everything that the pass manager will do with the outcome; what is to be sent back."""
    program = step.apply(program).program
    program.run(*program.examples)
    if program.device.type == "cuda":
        with contextlib.suppress(AmpoptError):  # the pass manager finds out, and tells, that it has no graph
            ReplayedProgram(program).replay()
    synchronize(program.device)
    return step.send(program)


def _answer(folder: Path) -> dict[str, str]:
    """Do what was asked for: nothing to say, or `failed` or `unloadable` with the reason.

    `broken` says what does not work in this process since a failure.
    """
    try:
        with (folder / PROGRAM).open("rb") as file:
            threads, step, program = pickle.load(file)  # it comes from our own parent
    except Exception as error:
        return {"unloadable": f"another process cannot load the program: {first_line(error)}"}
    try:
        torch.set_num_threads(threads)
        sent = _perform(step, program)
    except Exception as error:
        return {"failed": first_line(error)} | _broken(program)
    if sent is not None:
        with contextlib.suppress(OSError, RuntimeError):  # a full disk: nothing is received
            torch.save(sent, folder / SENT_BACK)
    return {}


def _broken(program: Program) -> dict[str, str]:
    """Whether a failure has left a CUDA context in which nothing more can be computed or captured."""
    if program.device.type != "cuda":
        return {}
    try:
        ones = torch.ones(8, device=program.device)
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            twos = ones + ones
        graph.replay()
        return {} if bool((twos == 2).all()) else {"broken": "a CUDA graph gives wrong values"}
    except Exception as error:
        return {"broken": first_line(error)}


def _main(line: Connection) -> None:
    """Answer requests until the other side hangs up.

    Garbage is collected between them only, among what they made: looking for it takes a tenth of a
    compiler's time.
    """
    gc.disable()
    gc.freeze()
    with contextlib.suppress(EOFError):
        while True:
            line.send_bytes(json.dumps(_answer(Path(line.recv_bytes().decode()))).encode())
            gc.collect()


if __name__ == "__main__":
    know_shapes()
    register()  # programs that come may call them
    _device, _line = torch.device(sys.argv[2]), Connection(int(sys.argv[1]))
    if _device.type != "cpu":  # where the first program is waiting
        _load_inductor(_device, _line)
    _main(_line)
