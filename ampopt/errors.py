"""The errors that ampopt raises; each message says what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any


class AmpoptError(Exception):
    """Base class of every error that ampopt raises on purpose."""


class InputError(AmpoptError):
    """An argument, an example input or a call does not fit the model."""


class UncopyableError(InputError):
    """The model cannot be copied, or a copy of it would still reach the model."""


class KindError(InputError):
    """A call depends on what calls of another kind leave in the model, and their program leaves out."""


class CaptureError(AmpoptError):
    """The model, or one submodule of it, cannot be turned into one graph."""


class LackError(CaptureError):
    """The machine lacks what a capture needs: memory, room, rights; of the model it says nothing."""


class TooLargeError(LackError):
    """What is lacking is memory or depth of calls, so that a part of the model may do with what there is."""


class PassError(AmpoptError):
    """A pass cannot do what was asked of it on this program or on this machine."""


class VerificationError(AmpoptError):
    """No verified result could be produced."""


class StrictError(AmpoptError):
    """A module with `strict` set has no program for a call: only the original could answer."""


class PassedOnError(AmpoptError):
    """A call of a part of a model is for the part's own code; the message says why."""


class Interrupted(AmpoptError, KeyboardInterrupt):  # noqa: N818
    """Ctrl-C was pressed before there was a result; both an `AmpoptError` and a `KeyboardInterrupt`."""


class ExportError(AmpoptError):
    """The model cannot be exported, or what was exported does not give the model's outputs."""


class BundleError(AmpoptError):
    """A bundle is damaged, was not made by ampopt, or fails its self-test or manifest on this machine."""


class MissingExtraError(AmpoptError):
    """An optional package is not installed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: run  pip install 'ampopt[{extra}]'")


def need(package: str, extra: str) -> Any:
    """Import a module of an optional package. Raises MissingExtraError if it is not installed."""
    root = package.partition(".")[0]
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != root:
            raise
        raise MissingExtraError(root, extra) from e


def require(package: str, extra: str) -> None:
    """Raise MissingExtraError if a package of an extra is not installed; it is not imported."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(package, extra)


def first_line(error: BaseException) -> str:
    """The error's type and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".removesuffix(": ")


def says(error: BaseException) -> str:
    """What an error says, with its type where its message alone is no sentence: `SystemExit: 5`."""
    is_bare = isinstance(error, (SystemExit, KeyError)) or not str(error).strip()
    return first_line(error) if is_bare else str(error)


def reason_of(error: BaseException) -> str:
    """Why something was not done, for a report: an error of ampopt's says it in words."""
    return str(error) if isinstance(error, AmpoptError) else first_line(error)


def not_a_graph(error: CaptureError) -> str:
    """That a model is not one graph, for a report, if that is what a capture has failed for."""
    return str(error) if isinstance(error, LackError) else f"not one graph: {error}"


def near(wrong: Iterable[str], known: Iterable[str]) -> str:
    """The known names that are like wrong ones, to end an error with; empty if none is."""
    names = list(known)
    found = list(dict.fromkeys(name for each in wrong for name in difflib.get_close_matches(each, names)))
    return f"; near it {'is' if len(found) == 1 else 'are'} {', '.join(found)}" if found else ""


_MEMORY = (
    *("out of memory", "can't allocate memory", "Cannot allocate memory", "Failed to allocate"),
    *("bad_alloc", "ALLOC_FAILED"),
)
_PASSING = ("timed out", "Resource temporarily")


def lacks_memory(error: BaseException) -> bool:
    """Whether an operation failed for lack of memory; the chain of `__cause__` is checked, too."""
    return _is_of(error, MemoryError, _MEMORY)


def is_passing(error: BaseException) -> bool:
    """Whether the operation may succeed later: it failed for lack of memory, or of a file or lock.

    The chain of `__cause__` is checked, too.
    """
    return lacks_memory(error) or _is_of(error, OSError, _PASSING)


def _is_of(error: BaseException, kind: type[BaseException], texts: Iterable[str]) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, kind) or any(text in str(seen) for text in texts):
            return True
        seen = seen.__cause__
    return False
