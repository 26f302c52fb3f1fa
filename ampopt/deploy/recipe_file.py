"""Stores a recipe (the passes that made a program, with their measured choices) as JSON."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from typing import Any

from ampopt.bundle.stored_values import array, members, refuse
from ampopt.ir.pass_options import is_option, why_not
from ampopt.ir.pass_text import tuples
from ampopt.ir.transform import Pass
from ampopt.passes import PIPELINE

WHERE = "program.json, recipe"

KNOWN: Mapping[str, Pass] = {step.name: step for step in PIPELINE}
"""The passes that a file may contain, with an example of each, whose fields a file may set."""


def write_recipe(recipe: tuple[Pass, ...], known: Mapping[str, Pass] = KNOWN) -> list[Any]:
    """Each pass's name and fields, in order.

    Passes that are not in `known` (by default ampopt's) are left out.

    Raises TypeError if a known pass has a field that JSON cannot hold.
    """
    named = [step for step in recipe if type(step) is type(known.get(step.name))]
    plain: list[Any] = json.loads(
        json.dumps([{"pass": step.name, "fields": dataclasses.asdict(step)} for step in named])
    )
    return plain


def read_recipe(data: object, known: Mapping[str, Pass] = KNOWN) -> tuple[Pass, ...]:
    """The passes that `write_recipe` wrote. Raises BundleError for unknown passes, fields and values.

    An option that is a number may be missing: an older version had none, and did as its default does.
    """
    return tuple(_read_pass(item, known) for item in array(data, WHERE))


def _read_pass(data: object, known: Mapping[str, Pass]) -> Pass:
    name, fields = members(data, ("pass", "fields"), WHERE)
    if not isinstance(name, str) or name not in known:
        refuse(WHERE, f"there is no pass {reprlib.repr(name)}")
    example = known[name]
    own = dataclasses.fields(example)
    held = fields if isinstance(fields, dict) else {}
    names = tuple(field.name for field in own if field.name in held or not is_option(field))
    values = {key: tuples(value) for key, value in zip(names, members(fields, names, WHERE), strict=True)}
    for key, value in values.items():
        if (wanted := why_not(example, key, value)) is not None:
            refuse(WHERE, f"{name}'s {key} is {reprlib.repr(value)}: {wanted}")
    return dataclasses.replace(example, **values)
