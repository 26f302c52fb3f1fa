"""Keep off the user's terminal what PyTorch's exporters say there; their exceptions say it all."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

LOGGERS = ("torch", "onnxscript", "onnx_ir")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters' loggers, warnings and writes to both standard streams within the block."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
