"""Pickles for processes of our own, which find PyTorch's constants in PyTorch.

A memory format tells pickle only the name `torch.contiguous_format`, and pickle takes the first module in
which that name can be found: one of the user's that has imported PyTorch. The other process would then import
it, with all that it does when it is imported. A layout has no pickle at all.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import IO, Any

import torch


def write_pickle(value: object, file: IO[bytes]) -> None:
    """Write a pickle, which `pickle.load` reads. Raises what pickle does."""
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        torch.memory_format: _reduced,
        torch.layout: _reduced,
    }
    pickler.dump(value)


def pickled(value: object) -> bytes:
    """A whole pickle, of what may not be pickled in the end. Raises what pickle does."""
    file = io.BytesIO()
    write_pickle(value, file)
    return file.getvalue()


def _reduced(constant: object) -> tuple[Any, tuple[str]]:
    return _constant, (str(constant).removeprefix("torch."),)


def _constant(name: str) -> object:
    return getattr(torch, name)
