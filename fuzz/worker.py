"""A process that judges networks, one seed after the other; it may crash or hang without harm."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from fuzz import interrupts, nnsmith_models, through_optimize, through_passes
from fuzz.network import Spec, draw
from fuzz.outcome import REVERTED, Outcome
from fuzz.shrink import describe, shrink

Check = Callable[[Spec, str], Outcome]

CHECKS: dict[str, Check] = {
    "passes": through_passes.check,
    "optimize": through_optimize.check,
    "interrupts": interrupts.check,
}
"""The oracles, by the name of the kind of run."""

SHRINKING_S = {"passes": 20.0, "optimize": 0.0, "interrupts": 0.0}
"""How long a fault may be made smaller; where one network takes ten seconds, that is done by hand."""


def judge(kind: str, seed: int, device: str) -> dict[str, Any]:
    """The log's entry for one network: what became of it, and where that is a fault, how to see it."""
    if kind == "nnsmith":
        return _judge_nnsmith(seed)
    started, check = time.perf_counter(), CHECKS[kind]
    spec = draw(seed, stateful=kind != "passes")
    try:
        outcome = check(spec, device)
    except Exception as error:  # the harness itself is wrong: that is to be seen, too
        outcome = through_passes.raw(error, "harness")
    entry: dict[str, Any] = {"seed": seed, "outcome": outcome.kind, "reason": outcome.reason}
    if outcome.is_fault:
        small, shown = spec, outcome
        if SHRINKING_S[kind]:
            small, shown = shrink(spec, outcome, lambda s: check(s, device), seconds=SHRINKING_S[kind])
        entry |= {"stage": outcome.stage, "spec": spec.to_json(), "small": small.to_json()}
        entry |= {"network": describe(small), "small_reason": shown.reason, "details": shown.details}
    elif outcome.kind == REVERTED:
        entry |= {"stage": outcome.stage, "spec": spec.to_json(), "details": outcome.details}
    elif kind != "passes":
        entry |= {"stage": outcome.stage, "details": outcome.details}
    return entry | {"seconds": round(time.perf_counter() - started, 3)}


def _judge_nnsmith(seed: int) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        outcome = nnsmith_models.check(seed)
    except Exception as error:  # the harness itself is wrong: that is to be seen, too
        outcome = through_passes.raw(error, "harness")
    entry = {"seed": seed, "outcome": outcome.kind, "reason": outcome.reason}
    if outcome.is_fault or outcome.kind == REVERTED:
        entry |= {"stage": outcome.stage, "network": outcome.details.get("graph"), "details": outcome.details}
    return entry | {"seconds": round(time.perf_counter() - started, 3)}


def main(line: Connection, kind: str, device: str) -> None:
    """Answer seeds with entries until the other side hangs up."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            line.send(json.dumps(judge(kind, line.recv(), device), default=str))


if __name__ == "__main__":
    os.environ["AMPOPT_CACHE"] = ""
    main(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3])
