"""Refuses what the methods of another package's passes may not answer, and says what they may."""

from __future__ import annotations

import functools
import math
import numbers
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

from ampopt.errors import PassError


class Allowed(NamedTuple):
    """What an answer may be: whether it `fits`, and in words."""

    fits: Callable[[Any], bool]
    words: str

    def check(self, said: str, given: object) -> None:
        """Raise PassError, which begins with what was `said` of it, for what does not fit."""
        if not self.fits(given):
            raise PassError(f"{said} {reprlib.repr(given)}: let it return {self.words}")


def with_answer_checked(name: str, method: Any, allowed: Allowed) -> Callable[..., Any]:
    """A method of a pass that raises PassError where its answer is not allowed.

    The search would end, or a report could not be written, far from the pass that is the reason.
    """

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        bound = method.__get__(self) if hasattr(method, "__get__") else method
        given = bound(*args, **options)
        allowed.check(f"the pass's {name} returned", given)
        return given

    return checked


def is_list_of(kind: Any, *texts: str) -> Callable[[Any], bool]:
    """Whether something is a tuple or list of a kind, these attributes of which are texts."""
    return lambda given: (
        isinstance(given, (tuple, list))
        and all(isinstance(each, kind) for each in given)
        and all(isinstance(getattr(each, text), str) for each in given for text in texts)
    )


def is_text(given: Any) -> bool:
    """Whether something is a text that says something."""
    return isinstance(given, str) and bool(given.strip())


def is_time(given: Any) -> bool:
    """Whether something is a finite number of seconds, 0 or more."""
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    return is_number and math.isfinite(given) and given >= 0
