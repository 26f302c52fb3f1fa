"""What the options of passes may be: of the type that is annotated, and within a range where one is given.

`warm_ups: int = option(4, 1, 1000)` is a field of a pass, whose default is 4. Values from text, files and
Python alike are checked before any work.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import reprlib
import types
import typing
from typing import Any, TypeVar

from ampopt.errors import InputError
from ampopt.ir.pass_text import dashed, value_text
from ampopt.ir.transform import Family, Numerics, Pass

_Number = TypeVar("_Number", int, float)

_RANGE = "range"
"""The key of a field's metadata under which its least and its largest value are."""

_KINDS: dict[object, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
    types.NoneType: (types.NoneType, "none"),
}
"""What an annotation takes, and its words."""


_ATTRIBUTES: dict[str, tuple[type, str]] = {
    "name": (str, "a text"),
    "numerics": (Numerics, "one of Numerics"),
    "family": (Family, "one of Family"),
    **dict.fromkeys(("portable", "shape_dependent", "enables_others"), (bool, "True or False")),
}
"""What the attributes of a pass's class are, by which it is tried and verified, and its words."""


def option(default: _Number, least: _Number, most: _Number) -> _Number:
    """A field of a pass: a number from `least` to `most`, both included; NaN is none."""
    made: Any = dataclasses.field(default=default, metadata={_RANGE: (least, most)})
    found: _Number = made
    return found


def is_option(field: dataclasses.Field[Any]) -> bool:
    """Whether a field of a pass is an `option`, and no finding."""
    return _RANGE in field.metadata


def why_not(step: Pass, name: str, value: object) -> str | None:
    """What an option of a pass may be, where this value is something else; None where it may be that."""
    (field,) = (field for field in dataclasses.fields(step) if field.name == name)
    usual = None if field.default is dataclasses.MISSING else field.default
    hint = _hints(type(step)).get(name)
    ends = field.metadata.get(_RANGE)
    if _fits(value, hint, usual) and (ends is None or ends[0] <= value <= ends[1]):
        return None
    told = _words(hint) if usual is None else f"one such as {_shown(usual)}"
    return f"give {told}" + ("" if ends is None else f", from {ends[0]:g} to {ends[1]:g}")


def check_option(step: Pass, name: str, value: object) -> None:
    """Raise InputError, which names the pass, the option and what is allowed, for a value that is not."""
    if (wanted := why_not(step, name, value)) is not None:
        raise InputError(f"{step.name}'s option {dashed(name)} is {_shown(value)}: {wanted}")


def check_options(step: Pass) -> None:
    """Raise InputError if an option of a pass, or an attribute of its class, may not be what it is."""
    for name, (kind, words) in _ATTRIBUTES.items():
        if not isinstance(given := getattr(step, name, None), kind):
            raise InputError(f"{type(step).__name__}.{name} is {reprlib.repr(given)}: let it be {words}")
    for field in dataclasses.fields(step):
        check_option(step, field.name, getattr(step, field.name))


@functools.cache
def _hints(kind: type[Pass]) -> dict[str, Any]:
    """The annotations by field; none where a module lacks what they name, as one for type checkers only."""
    try:
        return typing.get_type_hints(kind)
    except Exception:  # whatever evaluating another's annotations raises
        return {}


def _fits(value: Any, hint: object, usual: object = None) -> bool:
    """Whether a value is of an annotated type; where that is none of text's types, of the default's."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each, usual) for each in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        expected = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return len(value) == len(expected) and all(map(_fits, value, expected))
    if hint in _KINDS:
        return isinstance(value, _KINDS[hint][0]) and (hint is bool or not isinstance(value, bool))
    return usual is None or isinstance(value, type(usual))


def _words(hint: object) -> str:
    """An annotation in words, as a text of passes has the values."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_words, inner))
    if origin is tuple:
        return (
            f"a list of {_words(inner[0])}" if inner[-1] is Ellipsis else f"[{', '.join(map(_words, inner))}]"
        )
    return _KINDS[hint][1] if hint in _KINDS else str(hint)


def _shown(value: object) -> str:
    try:
        return value_text(value)
    except (TypeError, ValueError):
        return repr(value)
