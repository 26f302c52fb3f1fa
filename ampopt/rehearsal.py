"""Rehearsals: a risky pass is tried in another process first, which alone suffers when it crashes or hangs.

A foreign compiler can bring the process down, corrupt its CUDA context for good, or not return in time.
None of that can be undone from inside, so it first does its work, captured and replayed, on a stage of its
own: a process that gets the program, and is killed when its time is over. What it compiles there lies in
the compilers' disk caches afterwards, so that doing it again here takes a fraction of the time.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from types import TracebackType

import torch

from ampopt.cuda_graphs import ReplayedProgram
from ampopt.errors import AmpoptError, PassError
from ampopt.measure import synchronize
from ampopt.program import Program
from ampopt.transform import Pass


class Stage:
    """A process to rehearse in: begun when first needed, replaced after a failure, killed at the end.

    `device` is where the programs run that will be rehearsed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prepare(self) -> None:
        """Begin the process now: it loads its libraries while there is other work to do here."""
        if _possible():
            self._begin()

    def rehearse(self, step: Pass, program: Program, *, seconds: float) -> None:
        """Apply `step` to `program` over there and run the outcome; PassError where that fails.

        Nothing happens where a rehearsal is impossible: on systems without POSIX processes, and for programs
        that another process cannot load, such as those that call operators registered in this one only.
        """
        if not _possible():
            return
        try:
            parcel = pickle.dumps((torch.get_num_threads(), step, program))
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
            return
        try:
            answer = self._ask(parcel, seconds)
        except BaseException:
            self.close()
            raise
        if answer is not None:
            self.close()  # whatever failed there may have broken that process's CUDA context
            raise PassError(f"it failed in a process of its own: {answer}")

    def _ask(self, parcel: bytes, seconds: float) -> str | None:
        """What went wrong over there; None where nothing did."""
        line = self._begin()
        try:
            line.send_bytes(parcel)
            if not line.poll(max(seconds, 0.0)):
                raise PassError(f"it took longer than the {seconds:.0f} s that were left of the budget")
            answer: str | None = json.loads(line.recv_bytes())
        except (EOFError, OSError) as error:
            raise PassError(f"it brought down a process of its own ({self._how_it_ended()})") from error
        return answer

    def _begin(self) -> Connection:
        if self._line is None:
            ours, theirs = multiprocessing.Pipe()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ampopt.rehearsal", str(theirs.fileno()), str(self.device)],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
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
        status = self._process.wait()
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def close(self) -> None:
        """Kill the process and everything that it has started."""
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = self._line = None


def _possible() -> bool:
    return os.name == "posix" and bool(sys.executable)


def _warm_up(device: torch.device) -> None:
    """Compile something small, so that the compiler is loaded when the first program comes."""
    with contextlib.suppress(Exception):
        torch.compile(torch.relu, options={"freezing": True})(torch.ones(8, device=device))


def _perform(step: Pass, program: Program) -> None:
    """Everything that the pass manager will do with the outcome."""
    program = step.apply(program).program
    program.run(*program.examples)
    if program.device.type == "cuda":
        with contextlib.suppress(
            AmpoptError
        ):  # that it cannot be captured is found out, and told, over there
            ReplayedProgram(program).replay()
    synchronize(program.device)


def _main(line: Connection) -> None:
    """Answer requests until the other side hangs up."""
    while True:
        try:
            parcel = line.recv_bytes()
        except EOFError:
            return
        answer: str | None = None
        try:
            threads, step, program = pickle.loads(parcel)  # it comes from our own parent
        except Exception:
            line.send_bytes(json.dumps(None).encode())  # no rehearsal is possible; see `Stage.rehearse`
            continue
        try:
            torch.set_num_threads(threads)
            _perform(step, program)
        except Exception as error:
            first = str(error).strip().splitlines()
            answer = f"{type(error).__name__}: {first[0] if first else ''}"
        line.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    _warm_up(torch.device(sys.argv[2]))
    _main(Connection(int(sys.argv[1])))
