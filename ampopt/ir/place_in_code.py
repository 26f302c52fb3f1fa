"""Where in a model's code an error or a call arose: its file and line, and what stands there."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import textwrap
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

_NOT_THE_MODELS = tuple(
    f"{folder}/"
    for folder in (Path(torch.__file__).parent, Path(__file__).parents[1], sysconfig.get_path("stdlib"))
)
"""Folders of code that no model consists of: PyTorch, ampopt, and Python's own without what is installed."""


def place_in_code(error: BaseException) -> str | None:
    """`detector.py:41, "if score.item() > 0.5:"`, the innermost line of a model's code that led to an error.

    None if the error, and what it was raised from, has come through none.
    """
    seen, now = set[int](), error
    while id(now) not in seen:
        seen.add(id(now))
        if (found := _innermost(now.__traceback__)) is not None:
            return found
        now = now.__cause__ or now.__context__ or now
    return None


def place_of_call(within: CodeType) -> str | None:
    """The innermost line of a model's code, as above, that has led here, inside of a call of `within`.

    None if there is none: a model of PyTorch's own modules has no line of its own.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not within:
        if (found := place_of_line(frame.f_code.co_filename, frame.f_lineno)) is not None:
            return found
        frame = frame.f_back
    return None


def _innermost(trace: TracebackType | None) -> str | None:
    found = None
    while trace is not None:
        found = place_of_line(trace.tb_frame.f_code.co_filename, trace.tb_lineno) or found
        trace = trace.tb_next
    return found


def place_of_line(file: str, line: int) -> str | None:
    """A line with its place; None if it is none of a model's code, or cannot be read."""
    if not _is_the_models(file) or not (text := linecache.getline(file, line).strip()):
        return None
    return f'{Path(file).name}:{line}, "{textwrap.shorten(text, 80, placeholder=" …")}"'


def _is_the_models(file: str) -> bool:
    is_generated = file.startswith("<") and not file.startswith("<ipython")
    is_installed = "/site-packages/" in file or "/dist-packages/" in file
    own = _NOT_THE_MODELS[:2] if is_installed else _NOT_THE_MODELS
    return not is_generated and not file.startswith(own)
