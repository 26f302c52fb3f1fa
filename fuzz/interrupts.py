"""The interrupt oracle: Ctrl-C at a random moment of `optimize`, and what comes of it."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from types import TracebackType

from ampopt.capture import private_copy
from ampopt.errors import AmpoptError
from fuzz.calls import same_memory
from fuzz.judge import Judge
from fuzz.network import Spec, build, make_call
from fuzz.outcome import Outcome, short
from fuzz.pick import Pick
from fuzz.through_optimize import Served, judge_served, optimize
from fuzz.through_passes import raw

BUDGET_S = 3.0
LATEST = 1.2
"""The last moment, as a multiple of the time budget; the last comparison ends about then."""


class _Interrupter:
    """Sends SIGINT to this process after some seconds, unless the block has ended before.

    The first one ends a quick `optimize`, too: signals that come after its end are this harness's own.
    """

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
    seconds, served = pick.fraction() * LATEST * BUDGET_S, list[Served]()
    interrupter, example = _Interrupter(seconds, group=pick.maybe()), call.map(same_memory)
    started, note = time.perf_counter(), {"after_s": round(seconds, 3)}
    try:
        with interrupter:
            served.append(optimize(model, example, BUDGET_S))
    except KeyboardInterrupt as error:
        where = _place(error.__traceback__)
        if where is not None:
            trace = "".join(traceback.format_exception(error))[-3000:]
            return Outcome("raw", "KeyboardInterrupt", where, {**note, "trace": trace})
        if not served:
            return Outcome("skipped", "the signal came between the call's end and this harness")
    except AmpoptError as error:
        return Outcome("refused", f"{type(error).__name__}: {short(error, 120)}", "optimize", note)
    except Exception as error:
        return raw(error, "optimize")
    took = round(time.perf_counter() - started, 2)
    outcome = judge_served(served[0], judge, pick, "auto")
    details = {**outcome.details, **note, "sent": interrupter.sent, "took_s": took}
    return Outcome(outcome.kind, outcome.reason, outcome.stage, details)


def _place(trace: TracebackType | None) -> str | None:
    """The innermost function of ampopt in a traceback; None where the interrupt hit the harness alone."""
    frames = [f for f in traceback.extract_tb(trace) if "/ampopt/" in f.filename or "/passes/" in f.filename]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].name}" if frames else None
