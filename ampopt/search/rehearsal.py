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
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ampopt.engines.graph_capture import ReplayedProgram
from ampopt.errors import AmpoptError, PassError, first_line
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Pass, Rehearsed, Result
from ampopt.kernels.cudnn_shapes import know_shapes
from ampopt.kernels.fused_conv import fused_conv
from ampopt.measure.clocks import synchronize
from ampopt.system.inductor_cache import inductor_folder

PROGRAM, SENT_BACK = "program.pickle", "sent.pt"
"""The files of a rehearsal, in a folder of its own."""


class TooLongError(PassError):
    """A rehearsal was stopped at its time limit."""


class Sandbox:
    """A process for rehearsals: started on first use, replaced after a failure, killed at the end.

    `device` is the device of the rehearsed programs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self._ahead: _Ahead | None = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prepare(self) -> None:
        """Start the process now, so that it loads its libraries during other work.

        Not on a CPU, where it starts on first use: while it loads, a call of a network on two cores takes up
        to 15 times as long, and timings in this process are noise.
        """
        if self.works_beside:
            self._begin()

    @property
    def works_beside(self) -> bool:
        """Whether a rehearsal may run beside measurements: not on a CPU, see `prepare`."""
        return _possible() and self.device.type != "cpu"

    def begin(self, step: Pass, program: Program) -> None:
        """Start to rehearse a risky step; `apply` takes it up later.

        Does nothing where that would disturb measurements, where the program cannot be sent, or where this
        was begun already. Another step that was begun, and was not taken up, is given up.
        """
        if not isinstance(step, Engine) or not step.risky or step.why_not(program) is not None:
            return
        if not self.works_beside or self.is_rehearsing(step, program):
            return
        if self._ahead is not None:
            self._give_up_ahead(self._ahead)
        stack = contextlib.ExitStack()
        sent = stack.enter_context(self._sent(step, program, seconds=math.inf))
        if isinstance(sent, _Answer):
            self._ahead = _Ahead(step, program, sent, stack)
        else:
            stack.close()

    def _give_up_ahead(self, ahead: _Ahead) -> None:
        """Forget what was begun ahead; its process is killed only if it still works on that."""
        if ahead.answer.has_come:
            with contextlib.suppress(PassError):
                ahead.answer.get()
        self._ahead = None
        ahead.stack.close()

    def is_rehearsing(self, step: Pass, program: Program) -> bool:
        """Whether this step on this program was begun ahead, and was not taken up yet."""
        return self._ahead is not None and self._ahead.is_of(step, program)

    def ahead_s(self, step: Pass, program: Program) -> float:
        """How many seconds ago this step on this program was begun ahead; 0 if it was not."""
        if self._ahead is None or not self._ahead.is_of(step, program):
            return 0.0
        return time.perf_counter() - self._ahead.began

    @property
    def is_ready(self) -> bool:
        """Whether what was begun ahead has ended, well or not."""
        return self._ahead is not None and self._ahead.answer.has_come

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
        if (ahead := self._ahead) is not None:
            ahead.answer.until(time.perf_counter() + seconds)
            if ahead.is_of(step, program):
                self._ahead = None
                with ahead.stack:
                    yield ahead.answer.get
                return
            began = time.perf_counter()
            with contextlib.suppress(PassError):  # that one's failure is told when it is taken up
                ahead.answer.get()
            seconds -= time.perf_counter() - began
            if not ahead.answer.is_good:
                self.close()
        with self._sent(step, program, seconds=seconds) as sent:
            yield sent.get if isinstance(sent, _Answer) else lambda: Rehearsed(sent)

    @contextlib.contextmanager
    def _sent(self, step: Pass, program: Program, *, seconds: float) -> Iterator[_Answer | str]:
        """The answer to a step and a program that were sent, or why they cannot be."""
        with tempfile.TemporaryDirectory(prefix="ampopt-", ignore_cleanup_errors=True) as folder:
            parcel = Path(folder, PROGRAM)
            try:
                with parcel.open("wb") as file:
                    pickle.dump((torch.get_num_threads(), step, program), file)
            except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
                yield f"the program cannot be sent to another process: {first_line(error)}"
                return
            back = Path(folder, SENT_BACK)
            answer = _Answer(self._send(str(parcel)), seconds, self._how_it_ended, back, self.device)
            try:
                yield answer
            finally:  # Ctrl-C, too: nothing is to go on over there
                if not answer.is_good:
                    self.close()  # whatever failed there may have broken that process's CUDA context

    def has_answered(self) -> bool:
        """Whether the answer of the rehearsal that was begun last is there, or its process has ended."""
        return self._line is None or self._line.poll(0)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the process and its children during the block, so that they take no time from timings here."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _send(self, parcel: str) -> Connection:
        line = self._begin()
        with contextlib.suppress(OSError):  # it has ended: its answer will say so
            line.send_bytes(parcel.encode())  # short: it never waits for the other side, which may hang
        return line

    def _begin(self) -> Connection:
        if self._line is None:
            ours, theirs = multiprocessing.Pipe()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ampopt.search.rehearsal", str(theirs.fileno()), str(self.device)],
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    "TORCHINDUCTOR_CACHE_DIR": str(inductor_folder()),  # not a default of its own
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us
            )
            theirs.close()
            self._line = ours
        return self._line

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            status = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "it hung up"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def close(self) -> None:
        """Kill the process and all its child processes."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stack.close()
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process = self._line = None


class _Answer:
    """What a rehearsal comes to: waited for once, told as often as asked for."""

    def __init__(
        self,
        line: Connection,
        seconds: float,
        how_it_ended: Callable[[], str],
        back: Path,
        device: torch.device,
    ) -> None:
        """`back`: the file that the other process sends back, if any, for this device."""
        self._line, self._how_it_ended, self._back, self._device = line, how_it_ended, back, device
        self._told: Rehearsed | PassError | None = None
        self.until(time.perf_counter() + seconds)

    def until(self, deadline: float) -> None:
        """Wait no longer than until a time on `time.perf_counter`'s clock."""
        self._deadline, self._seconds = deadline, deadline - time.perf_counter()

    @property
    def has_come(self) -> bool:
        """Whether `get` would not wait."""
        try:
            return self._told is not None or self._line.poll(0)
        except (EOFError, OSError):
            return True

    @property
    def is_good(self) -> bool:
        """Whether it came, and nothing failed."""
        return isinstance(self._told, Rehearsed)

    def get(self) -> Rehearsed:
        """What came of it; PassError where it failed."""
        if self._told is None:
            try:
                self._told = self._wait()
            except PassError as error:
                self._told = error
        if isinstance(self._told, PassError):
            raise self._told
        return self._told

    def _wait(self) -> Rehearsed:
        _load_compiler()
        try:
            left = max(self._deadline - time.perf_counter(), 0.0)
            if not self._line.poll(left if math.isfinite(left) else None):
                raise TooLongError(
                    f"it took longer than the {self._seconds:.0f} s that were left of the budget"
                )
            answer: dict[str, str] = json.loads(self._line.recv_bytes())
        except (EOFError, OSError) as error:
            raise PassError(f"it brought down a process of its own ({self._how_it_ended()})") from error
        if (reason := answer.get("failed")) is not None:
            raise PassError(f"it failed in a process of its own: {reason}")
        return Rehearsed(answer.get("unloadable"), self._received())

    def _received(self) -> dict[str, Any] | None:
        """What was sent back; None where that is nothing, or is incomplete: a full disk costs only time."""
        try:
            sent: dict[str, Any] = torch.load(self._back, map_location=self._device)
        except (OSError, RuntimeError, pickle.UnpicklingError):
            return None
        return sent


@dataclasses.dataclass(frozen=True)
class _Ahead:
    """A rehearsal that was begun before its trial; closing `stack` ends it."""

    step: Pass
    program: Program
    answer: _Answer
    stack: contextlib.ExitStack
    began: float = dataclasses.field(default_factory=time.perf_counter)

    def is_of(self, step: Pass, program: Program) -> bool:
        """Whether it is of this step, on a program made from the same capture in the same way."""
        mine = self.program
        same = mine.lane == program.lane and mine.recipe == program.recipe
        return same and mine.examples is program.examples and self.step == step


def _possible() -> bool:
    return os.name == "posix" and bool(sys.executable)


def _load_compiler() -> None:
    """Load inductor here, too, which takes seconds, while the other process compiles."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._inductor.compile_fx")


def _warm_up(device: torch.device) -> None:
    """Compile something small, so that the compiler is loaded when the first program comes.

    Where that fails, so will the first program, and then the reason is told.
    """
    with contextlib.suppress(Exception), torch.no_grad():
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


def _answer(parcel: str) -> dict[str, str]:
    """Do what was asked for: nothing to say, or `failed` or `unloadable` with the reason."""
    try:
        with open(parcel, "rb") as file:
            threads, step, program = pickle.load(file)  # it comes from our own parent
    except Exception as error:
        return {"unloadable": f"another process cannot load the program: {first_line(error)}"}
    try:
        torch.set_num_threads(threads)
        sent = _perform(step, program)
    except Exception as error:
        return {"failed": first_line(error)}
    if sent is not None:
        with contextlib.suppress(OSError, RuntimeError):  # a full disk: nothing is received
            torch.save(sent, Path(parcel).with_name(SENT_BACK))
    return {}


def _main(line: Connection) -> None:
    """Answer requests until the other side hangs up."""
    with contextlib.suppress(EOFError):
        while True:
            line.send_bytes(json.dumps(_answer(line.recv_bytes().decode())).encode())


if __name__ == "__main__":
    know_shapes()
    fused_conv()  # programs that come may call it
    if not sys.argv[2].startswith("cpu"):  # where the first program is waiting
        _warm_up(torch.device(sys.argv[2]))
    _main(Connection(int(sys.argv[1])))
