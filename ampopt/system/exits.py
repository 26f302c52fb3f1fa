"""Exits of the user's code, such as `sys.exit` in a model: errors of the call, not the end of the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ampopt.errors import InputError


@contextlib.contextmanager
def exits_refused() -> Iterator[None]:
    """Raise InputError where the block ends with SystemExit. Also a decorator for functions."""
    try:
        yield
    except SystemExit as error:
        raise InputError(
            f"the model, or a function that was given with it, ends Python when it is called "
            f"(SystemExit: {error}): it has to raise an error, or to return"
        ) from error
