"""Names arguments in texts as the caller writes them: `budget_s=60`, or `--budget 60` on the command line.

A text names them where it is made, and is not rewritten later: it may quote a path, a line of the user's code
or another error, where only its author knows what is an argument of ampopt's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_SAME = (
    *("batches", "cache", "device", "dynamic", "engine", "exclude", "force", "hz", "io", "loss", "nan"),
    *("optimized", "optimizer", "part", "passes", "policy", "precision", "provider", "seconds", "step"),
    *("target", "tolerance", "trace", "train"),
)

OPTIONS = {
    **{name: f"--{name}" for name in _SAME},
    "budget_s": "--budget",
    "deadline_ms": "--deadline-ms",
    "verify_key": "--verify-key",
}
"""The options of the command line by the arguments that they give."""

_are_options: ContextVar[bool] = ContextVar("arguments are named as options", default=False)


@contextlib.contextmanager
def in_options() -> Iterator[None]:
    """Name arguments as options in the texts that this thread makes during the block."""
    before = _are_options.set(True)
    try:
        yield
    finally:
        _are_options.reset(before)


def argument(name: str, *value: object) -> str:
    """An argument, with its value if one is given: `budget_s=60`; within `in_options` its option.

    Without a value write `tolerance=` where the name alone reads as a word. As options True and False are
    `--cache` and `--no-cache`, and a list is one option for each value. What no option gives is as in Python.
    """
    option = OPTIONS.get(name.removesuffix("=")) if _are_options.get() else None
    if option is None or not value:
        return option or (f"{name}={value[0]!r}" if value else name)
    (only,) = value
    if isinstance(only, bool):
        return option if only else option.replace("--", "--no-")
    values = only if isinstance(only, (list, tuple)) else [only]
    return " ".join(f"{option} {f'{each:g}' if isinstance(each, float) else each}" for each in values)
