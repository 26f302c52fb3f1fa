"""Says what reports and errors tell of arguments of the Python interface in options of the command line."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar

_Value = TypeVar("_Value")

_OPTIONS = (
    (r"\bbudget_s=(\d[\d.]*)", r"--budget \1"),
    (r"\btolerance=(\d[\d.e+-]*\d|\d)", r"--tolerance \1"),
    (r"\bprecision='([^']*)'", r"--precision \1"),
    (r"\bio='([^']*)'", r"--io \1"),
    (r"\bexclude=\['([^']*)'\]", r"--exclude \1"),
    (r"\bcache=False", "--no-cache"),
    (r'\bnan="(\w+)"', r"--nan \1"),
    (r"`verify_key`", "--verify-key"),
    (r"\b(hz|seconds)=(?=\S)", r"--\1 "),
    (r"\bdeadline_ms=(?=\S)", "--deadline-ms "),
    (r"\b(budget)_s=", r"--\1"),
    (r"\b(tolerance|precision|passes|device|exclude)=(?!\S)", r"--\1"),
)


def in_options(text: str) -> str:
    """A text in which arguments that the command line has, too, are written as its options."""
    for argument, option in _OPTIONS:
        text = re.sub(argument, option, text)
    return text


def told(value: _Value) -> _Value:
    """A report, or a part of one, whose texts are `in_options`; what is not a dataclass stays as it is."""
    made: Any = value
    if isinstance(value, str):
        made = in_options(value)
    elif isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        made = type(value)(told(each) for each in value)
    elif isinstance(value, dict):
        made = {key: told(each) for key, each in value.items()}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: told(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        made = dataclasses.replace(value, **fields)
    found: _Value = made
    return found
