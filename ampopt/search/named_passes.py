"""Finds passes by name: those of ampopt, and those of installed packages, which are imported on first use."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from ampopt.errors import InputError, first_line, near, reason_of
from ampopt.ir.pass_options import check_option, check_options
from ampopt.ir.pass_text import dashed, distribution, installed, parse, unparse
from ampopt.ir.pipeline import Pipeline
from ampopt.ir.transform import Pass
from ampopt.passes import PIPELINE, AllowTf32, BakeAutocast, KeepFp32
from ampopt.system.wording import argument

logger = logging.getLogger("ampopt")

Passes = Pipeline | Sequence[Pass | str] | str
"""A user's passes: a pipeline, a list of exactly the passes to try, or that list as text."""


def by_name(name: str) -> Pass:
    """The pass with this name and default options. Raises InputError if there is no usable one."""
    own, others = {step.name: step for step in PIPELINE}, of_others(installed())
    if name in own:
        return own[name]
    if name not in others:
        known = sorted({*own, *others})
        raise InputError(f"there is no pass {name}: choose from {', '.join(known)}{near([name], known)}")
    owner = distribution(others[name])
    try:
        made = others[name].load()
        step = made if isinstance(made, Pass) else made()
    except (Exception, SystemExit) as error:  # whatever it is: it is the package's own
        raise InputError(f"the pass {name} of {owner} does not load: {first_line(error)}") from error
    if not isinstance(step, Pass) or step.name != name:
        kind = f"a pass named {step.name}" if isinstance(step, Pass) else repr(step)
        raise InputError(f"the entry point {name} of {owner} gives {kind}: rename one of them")
    return step


def of_others(found: Mapping[str, EntryPoint]) -> dict[str, EntryPoint]:
    """Those of the installed passes that can be named; a warning tells, once, of one with a name of ours."""
    own = {step.name for step in PIPELINE}
    for name in sorted(own & set(found)):
        _warn_of(name, distribution(found[name]))
    return {name: entry for name, entry in found.items() if name not in own}


@functools.cache
def _warn_of(name: str, owner: str) -> None:
    logger.warning("ampopt: the pass %s of %s is not used, ampopt's own is: let it be renamed", name, owner)


def as_pipeline(passes: object) -> Pipeline:
    """The pipeline for a user's passes. Raises InputError for other types, and options that may not be so."""
    if isinstance(passes, Pipeline):
        found = passes
    elif isinstance(passes, str):
        found = Pipeline.of(from_text(passes))
    elif isinstance(passes, Pass) or not isinstance(passes, Sequence):
        raise InputError(f"{argument('passes', passes)}: give a list of passes, their text, or a Pipeline")
    else:
        found = Pipeline.of(
            step for item in passes for step in (from_text(item) if isinstance(item, str) else (item,))
        )
    for step in found:
        check_options(step)
    return found


def from_text(text: str) -> tuple[Pass, ...]:
    """Parse the passes of a text such as `fold-conv-bn,degroup{least-gain=1.1}`. Raises InputError."""
    return tuple(_with_options(by_name(name), options) for name, options in parse(text))


def to_text(passes: Iterable[Pass]) -> str:
    """The text of passes, with the options that are not defaults; `from_text` returns equal passes."""
    return ",".join(unparse(step.name, _changed(step)) for step in passes)


def _changed(step: Pass) -> dict[str, Any]:
    usual = {field.name: field.default for field in dataclasses.fields(step)}
    return {name: value for name in usual if (value := getattr(step, name)) != usual[name]}


def _with_options(step: Pass, options: dict[str, Any]) -> Pass:
    fields = [field.name for field in dataclasses.fields(step)]
    if unknown := [name for name in options if name not in fields]:
        known = ", ".join(map(dashed, fields)) or "none"
        raise InputError(f"{step.name} has no option {dashed(unknown[0])}: its options are {known}")
    for name, value in options.items():
        check_option(step, name, value)
    values = {name: _like(getattr(step, name), value) for name, value in options.items()}
    try:
        return dataclasses.replace(step, **values)
    except (Exception, SystemExit) as error:  # what a package's pass says of its options
        raise InputError(f"{unparse(step.name, options)}: {reason_of(error)}") from error


def _like(usual: object, value: Any) -> Any:
    return float(value) if isinstance(usual, float) and type(value) is int else value


def check_listed(pipeline: Pipeline, *, tolerance: float | None, policy: str) -> None:
    """Raise InputError if the user's list of passes contradicts other arguments."""
    mine = [step.name for step in pipeline if isinstance(step, (BakeAutocast, KeepFp32))]
    if policy != "amp" and mine:
        given, listed = argument("policy", policy), argument("passes=")
        raise InputError(f"{given}: {mine[0]} in {listed} has a policy: give one of the two")
    if tolerance is None and any(isinstance(step, AllowTf32) for step in pipeline):
        listed, lacking = argument("passes="), argument("tolerance=")
        raise InputError(f"{listed} has allow-tf32, which needs a tolerance: give {lacking}, or leave it out")


def code_of(step: Pass) -> tuple[str, ...] | None:
    """Identifies the code of a user's pass: its module, distribution, version, and its file's hash.

    Empty for a pass of ampopt; None if the code is not in a file.
    """
    name = type(step).__module__
    if name.partition(".")[0] == "ampopt":
        return ()
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return None
    entry = installed().get(step.name)
    owner = distribution(entry) if entry is not None and entry.module == name else ""
    return name, owner, hashlib.sha256(Path(file).read_bytes()).hexdigest()
