"""Runs of many networks: in processes that are replaced when they die, with logs that a later run resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ampopt.system.environment import environment
from fuzz.outcome import FAULTS

TIMEOUT_S = {"passes": 120.0, "optimize": 180.0, "interrupts": 180.0, "nnsmith": 180.0}
"""From when on a network counts as one that hangs, by the kind of run."""

NETWORKS_A_PROCESS = {"passes": 500, "optimize": 20, "interrupts": 10, "nnsmith": 100}
"""Then a new process takes over, so that what leaks in PyTorch does not add up, and what is loaded once is
loaded, and interrupted, more than once."""

LAST_WORDS = 6000
"""How many characters of what a process has said are kept when it crashes."""

_QUIETLY = {"AMPOPT_CACHE": "", "PYTHONFAULTHANDLER": "1"}


@dataclasses.dataclass(frozen=True)
class Run:
    """What is to be run: which networks, where to log them, in how many processes, for how long at most."""

    kind: str
    seeds: Sequence[int]
    out: Path
    shard: str = "0/1"
    jobs: int = 1
    seconds: float = float("inf")
    device: str = "cpu"


class Worker:
    """A process that judges networks; see `fuzz.worker`."""

    def __init__(self, kind: str, device: str) -> None:
        self.kind, self.judged = kind, 0
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._said = Path(self._folder.name) / "stderr"  # by a fault handler, and what was judged
        ours, theirs = multiprocessing.Pipe()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fuzz.worker", str(theirs.fileno()), kind, device],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **threads, **_QUIETLY, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,  # so that it is killed with all that it has started
            )
        theirs.close()
        self._line: Connection = ours

    def judge(self, seed: int) -> dict[str, Any]:
        """The entry for a network; after a crash or a hang of it the process is over."""
        self.judged += 1
        try:
            self._line.send(seed)
            if self._line.poll(TIMEOUT_S[self.kind]):
                entry: dict[str, Any] = json.loads(self._line.recv())
                if entry["outcome"] in FAULTS and self.kind != "passes":
                    self.close()  # who knows what the fault has left behind
                return entry
        except (EOFError, OSError):
            status = self._process.wait()
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            said = self._said.read_text(errors="replace")
            crash = said.rfind("Fatal Python error")  # its first lines tell more than its list of modules
            trace = said[crash : crash + LAST_WORDS] if crash >= 0 else said[-LAST_WORDS:]
            self.close()
            found = {"outcome": "crash", "reason": how, "stage": "process", "details": {"trace": trace}}
            return {"seed": seed, **found}
        self.close()
        return {
            "seed": seed,
            "outcome": "hang",
            "reason": f"{TIMEOUT_S[self.kind]:.0f} s",
            "stage": "process",
        }

    @property
    def is_over(self) -> bool:
        """Whether another process has to take the next network."""
        return self._line.closed or self.judged >= NETWORKS_A_PROCESS[self.kind]

    def close(self) -> None:
        """Kill the process and everything that it has started."""
        self._line.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()


def entries(out: Path, kind: str = "*") -> Iterator[dict[str, Any]]:
    """Everything in the logs of a folder; a line that was cut off by the end of a process is left out."""
    for path in sorted(out.glob(f"{kind}-*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                yield {"kind": path.name.partition("-")[0], **json.loads(line)}


def header(run: Run) -> dict[str, Any]:
    """Where, when and with what a run was made."""
    named = os.environ.get("FUZZ_COMMIT")  # where the checkout has no .git, or another one's
    return {
        "run": run.kind,
        "commit": named or _git("rev-parse", "--short=10", "HEAD"),
        "changed_files": 0 if named else len((_git("status", "--porcelain") or "").splitlines()),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": environment(torch.device(run.device)),
        "python": platform.python_version(),
        "device": run.device,
    }


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def perform(run: Run) -> int:
    """Judge the seeds that no log in the folder has yet; the number of faults among them."""
    run.out.mkdir(parents=True, exist_ok=True)
    done = {entry["seed"] for entry in entries(run.out, run.kind) if "seed" in entry}
    index, count = map(int, run.shard.split("/"))
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in run.seeds[index::count]:
        if seed not in done:
            waiting.put(seed)
    end, faults, first = time.monotonic() + run.seconds, list[int](), json.dumps(header(run))

    def work(job: int) -> None:
        worker: Worker | None = None
        with (run.out / f"{run.kind}-{index}of{count}-{job:02}.jsonl").open("a") as log:
            print(first, file=log, flush=True)
            try:
                while time.monotonic() < end:
                    with contextlib.suppress(queue.Empty):
                        seed = waiting.get_nowait()
                        if worker is None or worker.is_over:
                            if worker is not None:
                                worker.close()
                            worker = Worker(run.kind, run.device)
                        entry = worker.judge(seed)
                        print(json.dumps(entry), file=log, flush=True)
                        if entry["outcome"] in FAULTS:
                            faults.append(seed)
                            what = f"{entry['outcome']} in {entry['stage']}: {entry['reason']}"
                            print(f"{run.kind} {seed}: {what}", flush=True)
                        continue
                    return
            finally:
                if worker is not None:
                    worker.close()

    threads = [threading.Thread(target=work, args=(job,)) for job in range(run.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(faults)
