"""Where in a model's code an error arose: its file and line, and what stands there."""

from __future__ import annotations

import linecache
import sysconfig
import textwrap
from pathlib import Path
from types import TracebackType

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


def _innermost(trace: TracebackType | None) -> str | None:
    found = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_the_models(file) and (text := linecache.getline(file, trace.tb_lineno).strip()):
            found = f'{Path(file).name}:{trace.tb_lineno}, "{textwrap.shorten(text, 80, placeholder=" …")}"'
        trace = trace.tb_next
    return found


def _is_the_models(file: str) -> bool:
    is_generated = file.startswith("<") and not file.startswith("<ipython")
    is_installed = "/site-packages/" in file or "/dist-packages/" in file
    own = _NOT_THE_MODELS[:2] if is_installed else _NOT_THE_MODELS
    return not is_generated and not file.startswith(own)
