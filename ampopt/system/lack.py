"""What the machine lacks where something fails, and what to do: memory, room, files, rights, depth."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from ampopt.errors import LackError, TooLargeError, first_line, lacks_memory

_MEMORY = "memory: free some, or give a smaller example"
_DEPTH = "depth of calls: if none goes on without end, raise it by sys.setrecursionlimit"
_NO_FOLDER = "No usable temporary directory"

_ELSEWHERE = (
    "set TMPDIR, and TORCHINDUCTOR_CACHE_DIR where that is set, to a folder with room that can be written "
    "to, and start a new process"
)
_BY_NUMBER = {
    errno.ENOSPC: f"room on a disk: make some, or {_ELSEWHERE}",
    errno.EDQUOT: f"room in the user's share of a disk: make some, or {_ELSEWHERE}",
    errno.EROFS: f"a folder that can be written to: {_ELSEWHERE}",
    errno.EACCES: f"the right to a file: give it to this user, or {_ELSEWHERE}",
    errno.EPERM: f"the right to a file: give it to this user, or {_ELSEWHERE}",
    errno.EMFILE: "file descriptors: close some, or raise their number (ulimit -n)",
    errno.ENFILE: "file descriptors of the whole system: close some",
}


def lack(what: str, error: BaseException) -> LackError | None:
    """That `what` ("the capture of Net") lacks something; None if an error is about another thing.

    Looks at the error and at what it was raised from. A `TooLargeError` where less of the model may do with
    what there is.
    """
    for each in _causes(error):
        if isinstance(each, OSError) and (missing := _missing(each)) is not None:
            return LackError(f"{what} lacks {missing} ({first_line(each)})")
        if isinstance(each, RecursionError):
            return TooLargeError(f"{what} lacks {_DEPTH} ({first_line(each)})")
    if lacking := [each for each in _causes(error) if lacks_memory(each)]:
        return TooLargeError(f"{what} lacks {_MEMORY} ({first_line(lacking[-1])})")
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _missing(error: OSError) -> str | None:
    if _NO_FOLDER in str(error):
        return f"a folder for temporary files: {_ELSEWHERE}"
    return None if error.errno is None else _BY_NUMBER.get(error.errno)
