"""What a pass says of itself before it is tried. The search plans by it, and goes on where a pass fails to.

A trial asks the pass itself, so that what fails in it is a row of the report; a warning tells of an estimate,
which nothing else may ask for.
"""

from __future__ import annotations

import functools
import logging

from ampopt.errors import first_line
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Pass
from ampopt.system.interrupts import check_interrupted

logger = logging.getLogger("ampopt")


def why_not(step: Pass, program: Program) -> str | None:
    """`Pass.why_not`, or what failed in it."""
    try:
        return step.why_not(program)
    except (Exception, SystemExit) as error:
        return _told(step, error)


def expected_s(step: Pass, program: Program) -> float:
    """`Pass.expected_seconds`; 0 where it fails: applying it has a time limit all the same."""
    try:
        return step.expected_seconds(program)
    except (Exception, SystemExit) as error:
        _told(step, error)
        return 0.0


def divided(step: Engine, program: Program, count: int) -> list[Program]:
    """`Engine.divided`; the program itself where that fails."""
    try:
        return list(step.divided(program, count))
    except (Exception, SystemExit) as error:
        _told(step, error)
        return [program]


def _told(step: Pass, error: BaseException) -> str:
    check_interrupted(error)
    _warn(step.name, reason := first_line(error))
    return reason


@functools.cache
def _warn(name: str, reason: str) -> None:
    """Once: a search asks for estimates again and again."""
    logger.warning("ampopt: what %s says of itself failed, the search goes on without: %s", name, reason)
