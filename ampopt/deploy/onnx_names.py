"""Names of an exported model's inputs and outputs, from the model or from the user."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree

from ampopt.errors import InputError
from ampopt.ir.capture import Captured
from ampopt.ir.signature import OutputLayout


def input_names_of(captured: Captured, given: Sequence[str] | None = None) -> tuple[str, ...]:
    """A name for each input tensor: `given`, or the parameter names of the model's `forward`.

    Buffers that hold a state come last, under their own names.
    """
    placeholders = [node for node in captured.program.graph.graph.nodes if node.op == "placeholder"]
    own = tuple(str(node.target) for node in placeholders)
    if given is None:
        return own
    count = len(own) - len(captured.state)
    return _with_state(_checked(given, count, "input"), own[count:])


def output_names_of(
    captured: Captured, inputs: Sequence[str], given: Sequence[str] | None = None
) -> tuple[str, ...]:
    """A name for each output tensor: `given`, or the keys of the result's dicts and named tuples.

    A tensor without a key is `output`, `output_1`, and so on, by its position among all of them; names in
    `inputs` are not used again. The new state of a buffer is `<buffer>_next`, and comes last.
    """
    states = tuple(f"{name}_next" for name in inputs[len(inputs) - len(captured.state) :])
    if given is not None:
        names = _checked(given, len(captured.program.exit) - len(states), "output")
        if taken := set(names) & set(inputs):
            raise InputError(f"output_names: {sorted(taken)[0]!r} is the name of an input, too")
        return _with_state(names, states)
    names_so_far: list[str] = []
    for index, path in enumerate(_paths(captured.layout)):
        named = itertools.dropwhile(lambda part: isinstance(part, pytree.SequenceKey), path)
        name = "_".join(_text(part) for part in named) or (f"output_{index}" if index else "output")
        names_so_far.append(_free(name, {*names_so_far, *inputs, *states}))
    return (*names_so_far, *states)


def _with_state(names: tuple[str, ...], states: tuple[str, ...]) -> tuple[str, ...]:
    if taken := set(names) & set(states):
        raise InputError(f"{sorted(taken)[0]!r} is the name of the model's state: choose another")
    return (*names, *states)


def _paths(layout: OutputLayout) -> list[tuple[Any, ...]]:
    """Where in the model's nested result each tensor is."""
    numbered = pytree.tree_unflatten(list(range(len(layout.template))), layout.spec)
    found = pytree.tree_flatten_with_path(numbered)[0]
    return [path for path, index in found if layout.template[index] is OutputLayout.TENSOR]


def _text(part: Any) -> str:
    """One step into a nested result: a dict's key, a field's name, or a place in a list."""
    return next(str(getattr(part, kind)) for kind in ("key", "name", "idx") if hasattr(part, kind))


def _free(name: str, taken: set[str]) -> str:
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _checked(names: Sequence[str], count: int, kind: str) -> tuple[str, ...]:
    if isinstance(names, str) or len(names) != count:
        raise InputError(f"{kind}_names={names!r}: the model has {count} {kind} tensors, name each of them")
    if len(set(names)) != count or not all(names):
        raise InputError(f"{kind}_names={list(names)}: every name may be there once, and none empty")
    return tuple(names)
