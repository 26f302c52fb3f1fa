"""The interrupt oracle: Ctrl-C at a random moment of `optimize`, and what comes of it."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

import ampopt
from ampopt.errors import AmpoptError
from ampopt.ir.capture import capture
from ampopt.ir.model_copy import private_copy
from fuzz.calls import Call, same_memory
from fuzz.judge import Judge
from fuzz.network import Spec, build, make_call
from fuzz.outcome import Outcome, short
from fuzz.pick import Pick
from fuzz.through_optimize import Served, judge_served, optimize
from fuzz.through_passes import raw

BUDGET_S = 3.0
COLD = 0.2
"""The share of networks that are interrupted at their first `optimize`, within `BUDGET_S`: in a new process
libraries are loaded then. Others are optimized once before, to know how long that takes."""


class _Interrupter:
    """Sends SIGINT to this process, or to its group, after some seconds, unless the block has ended."""

    def __init__(self, seconds: float, *, group: bool) -> None:
        self._over, self._lock, self._group = False, threading.Lock(), group
        self._timer = threading.Timer(seconds, self._send)
        self.sent = False

    def _send(self) -> None:
        with self._lock:
            if self._over:
                return
            self.sent = True
            if self._group:
                os.killpg(os.getpgrp(), signal.SIGINT)
            else:
                os.kill(os.getpid(), signal.SIGINT)

    def __enter__(self) -> _Interrupter:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
        self._timer.cancel()
        self._timer.join()


def check(spec: Spec, device: str = "cpu") -> Outcome:
    """What becomes of an `optimize` of a network that is interrupted.

    The signal goes to this process alone or, as a terminal's Ctrl-C does, to its whole group: run it in a
    process group of its own.
    """
    pick = Pick(f"interrupt {spec.seed}")
    model, call = build(spec).to(device), make_call(spec).map(lambda t: t.to(device))
    try:
        judge = Judge(private_copy(model), [call, call])
    except Exception as error:  # whatever it is: it comes from PyTorch
        return Outcome("skipped", f"eager fails: {short(error, 120)}")
    if not judge.repeats():
        return Outcome("skipped", "eager gives another answer each time")
    example, whole = call.map(same_memory), BUDGET_S
    if not pick.maybe(COLD):
        started = time.perf_counter()
        try:
            optimize(model, example, BUDGET_S)
        except Exception as error:  # the optimize oracle looks into that
            return Outcome("skipped", f"optimize fails: {short(error, 120)}")
        whole = time.perf_counter() - started
    seconds = pick.fraction() * whole
    interrupter = _Interrupter(seconds, group=pick.maybe())
    outcome = _interrupted(model, example, judge, pick, interrupter)
    note = {"after_s": round(seconds, 3), "of_s": round(whole, 3)}
    if not outcome.is_fault and not interrupter.sent:
        return Outcome("skipped", "it ended before the signal")
    if not outcome.is_fault and (reason := _cannot_go_on()):
        outcome = Outcome("changed", f"after the interrupt {reason}", "process", outcome.details)
    return dataclasses.replace(outcome, details={**outcome.details, **note})


def _interrupted(
    model: nn.Module, example: Call, judge: Judge, pick: Pick, interrupter: _Interrupter
) -> Outcome:
    served: list[Served] = []
    started = time.perf_counter()
    try:
        with interrupter:
            served.append(optimize(model, example, BUDGET_S))
    except AmpoptError as error:  # `Interrupted` is a KeyboardInterrupt, too
        return Outcome("refused", f"{type(error).__name__}: {short(error, 120)}", "optimize")
    except KeyboardInterrupt as error:
        where = _place(error.__traceback__)
        if where is not None:
            trace = "".join(traceback.format_exception(error))[-3000:]
            return Outcome("raw", "KeyboardInterrupt", where, {"trace": trace})
        if not served:
            return Outcome("skipped", "the signal came between the call's end and this harness")
    except Exception as error:
        return raw(error, "optimize")
    took = round(time.perf_counter() - started, 2)
    outcome = judge_served(served[0], judge, pick, "auto")
    return dataclasses.replace(outcome, details={**outcome.details, "took_s": took})


def _cannot_go_on() -> str | None:
    """Why this process cannot optimize any more; None where it can capture a plain model."""
    try:
        capture(nn.Linear(2, 2).eval(), (torch.ones(1, 2),), {}, torch.device("cpu"))
    except Exception as error:
        return f"nothing can be captured: {short(error, 200)}"
    return None


def _place(trace: TracebackType | None) -> str | None:
    """The innermost function of ampopt in a traceback; None where the interrupt hit the harness alone."""
    home = str(Path(ampopt.__file__).parent)
    frames = [f for f in traceback.extract_tb(trace) if f.filename.startswith(home)]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].name}" if frames else None
