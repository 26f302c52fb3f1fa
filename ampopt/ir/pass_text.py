"""Parses the text form of a pipeline, and lists passes of installed packages without importing them.

The text is that of MLIR and xDSL: `fold-conv-bn,degroup{least-gain=1.1}`. Options are separated by spaces or
commas; a value is JSON, a word without quotes, or `none`.

A package brings passes with the entry-point group `ampopt.passes`, whose entries name a class:

    [project.entry-points."ampopt.passes"]
    drop-double-relu = "my_package.drop_double_relu:DropDoubleRelu"
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

from ampopt.errors import InputError
from ampopt.system.wording import argument

GROUP = "ampopt.passes"

_NAME = re.compile(r"[A-Za-z][\w-]*")
_WORD = re.compile(r"[A-Za-z_][\w.:+/-]*")
_BETWEEN = re.compile(r"[\s,]*")
_JSON = json.JSONDecoder()
_JSON_WORDS = ("true", "false", "null", "NaN", "Infinity")


def installed() -> dict[str, EntryPoint]:
    """The passes of installed packages by name; the first one if two packages have the same name."""
    found: dict[str, EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        found.setdefault(entry.name, entry)
    return found


def distribution(entry: EntryPoint) -> str:
    """The package of an entry point, with its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def parse(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse names and options (with underscores) of passes. Raises InputError with the character position."""
    found: list[tuple[str, dict[str, Any]]] = []
    at = _skip(text, 0)
    while at < len(text):
        if (name := _NAME.match(text, at)) is None:
            raise _unreadable(text, at, "the name of a pass")
        options, at = _options(text, name.end())
        if at < len(text) and text[at] not in ", \n":
            raise _unreadable(text, at, "a comma")
        found.append((name[0], options))
        at = _skip(text, at)
    return found


def unparse(name: str, options: Mapping[str, object]) -> str:
    """The text of one pass; `parse` returns the same name and options, with lists as tuples."""
    if not options:
        return name
    return f"{name}{{{' '.join(f'{dashed(key)}={value_text(value)}' for key, value in options.items())}}}"


def dashed(option: str) -> str:
    """An option's name in text form: `least_gain` is `least-gain`."""
    return option.replace("_", "-")


def value_text(value: object) -> str:
    """An option's value in text form."""
    if value is None:
        return "none"
    if isinstance(value, str) and _WORD.fullmatch(value) and value not in ("none", *_JSON_WORDS):
        return value
    return json.dumps(value)


def _options(text: str, at: int) -> tuple[dict[str, Any], int]:
    options: dict[str, Any] = {}
    if not text.startswith("{", at):
        return options, at
    at = _skip(text, at + 1)
    while not text.startswith("}", at):
        key = _NAME.match(text, at)
        if key is None or not text.startswith("=", key.end()):
            raise _unreadable(text, at, "option=value, or a closing brace")
        options[key[0].replace("-", "_")], at = _value(text, key.end() + 1)
        at = _skip(text, at)
    return options, at + 1


def _value(text: str, at: int) -> tuple[Any, int]:
    word = _WORD.match(text, at)
    if word is not None and word[0] not in _JSON_WORDS:
        return (None if word[0] == "none" else word[0]), word.end()
    try:
        value, end = _JSON.raw_decode(text, at)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _unreadable(text, at, "a value, in JSON or a word") from error
    return tuples(value), end


def tuples(value: object) -> object:
    """A value of JSON with tuples in place of lists, as fields of passes have them."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def _skip(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return at if found is None else found.end()


def _unreadable(text: str, at: int, wanted: str) -> InputError:
    found = repr(text[at : at + 12]) if at < len(text) else "the end"
    return InputError(
        f"{argument('passes', text)}: {wanted} should stand at character {at + 1}, where {found} is"
    )
