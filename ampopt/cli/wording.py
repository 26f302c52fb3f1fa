"""Says what reports and errors tell of arguments of the Python interface in options of the command line."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar

_Value = TypeVar("_Value")

_SAME = "tolerance|precision|policy|passes|exclude|io|nan|hz|seconds|target|part"
"""Arguments whose options have the same names."""

_VALUE = r"(?=[^\s.,;:)])"

_OPTIONS = (
    (rf"\bbudget_s\b=?{_VALUE}", "--budget "),
    (r"\bbudget_s\b=?", "--budget"),
    (rf"\bdeadline_ms={_VALUE}", "--deadline-ms "),
    (rf"\b({_SAME})=(?:\['([^']*)'\]|'([^']*)'|\"([^\"]*)\")", r"--\1 \2\3\4"),
    (rf"\b({_SAME})={_VALUE}", r"--\1 "),
    (rf"\b({_SAME}|device|dynamic)=(?!{_VALUE})", r"--\1"),
    (r"^dynamic(?=:)", "--dynamic"),
    (r"\bcache=False", "--no-cache"),
    (r"\bforce=True", "--force"),
    (r"`verify_key`", "--verify-key"),
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
