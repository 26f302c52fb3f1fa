"""The standard streams of a command: whatever becomes of them, its work is not lost."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class _Lasting(io.FileIO):
    """A descriptor that takes what is printed, and never fails where it is printed.

    That may be in the user's model, which would seem to be at fault. A reader who has gone, as that of
    `| head -1`, misses nothing; any other `failure` is told at the end.
    """

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write, as far as it can be written."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)
        except OSError as error:
            self.failure = error
            return len(data)


@contextlib.contextmanager
def lasting_streams(code: int = 1) -> Iterator[None]:
    """Let nothing that is printed in the block raise an error: a stream may be closed, full, or not Unicode.

    Characters that its encoding lacks are replaced. Where stdout has not taken everything, a block that ends
    with SystemExit, as commands do, ends with a sentence on stderr and exit code `code`.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_lasting(stream) for stream in before)
    try:
        yield
    except SystemExit as end:
        sys.stdout.flush()
        if (failure := getattr(_raw(sys.stdout), "failure", None)) is not None:
            said = f"error: not everything could be printed: {failure.strerror}"
            if code == 1:
                raise SystemExit(said) from end
            print(said, file=sys.stderr)
            raise SystemExit(code) from end
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed; the next file would get its number, and what libraries print there
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper) or not isinstance(_raw(stream), io.FileIO):
        return stream  # a console of Windows, or what another program has put in its place
    stream.flush()
    raw: Any = _Lasting(stream.fileno(), "w", closefd=False)
    is_strict = stream.errors in ("strict", "surrogateescape")
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="replace" if is_strict else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _raw(stream: TextIO) -> Any:
    """What is behind a text stream: behind its buffer, if it has one."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)
