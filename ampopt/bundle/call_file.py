"""The signature of a loaded bundle as JSON: the structure of a model's call and of its result.

PyTorch's own way to store such structures (`treespec_loads`) imports modules that the file names and takes
attributes from them; this module supports only tuples, lists, dicts, OrderedDicts, namedtuples, `torch.Size`
and PyTorch's own result types. A namedtuple's class is not in the file: the caller's class is used if given,
else a new one of the same name and fields.
"""

from __future__ import annotations

import collections
import functools
import keyword
import re
import reprlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampopt.bundle.stored_values import array, decode_value, encode_value, members, named, refuse, tagged
from ampopt.errors import BundleError, ExportError
from ampopt.ir.capture import Captured
from ampopt.ir.keywords import in_order
from ampopt.ir.program import Program
from ampopt.ir.signature import OutputLayout, flatten_call, flatten_outputs

FILE = "manifest.json, call"

_DEEPEST = 32
"""Nesting of containers."""

_SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list, "size": torch.Size}
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered_dict": collections.OrderedDict}
_RESULTS: dict[str, Any] = {kind.__name__: kind for kind in torch.return_types.all_return_types}
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


def write_call(captured: Captured) -> dict[str, Any]:
    """The structure of a model's call and result as JSON, with every value that is not a tensor.

    Keyword arguments whose order the model sees are a third part of the arguments. `all_differ` is there,
    and true, only where no tensor may be given twice.
    The written data is read back as a check. Raises ExportError for containers and values that a file cannot
    hold.
    """
    device, mark = captured.program.device, torch.empty(0, device="cpu")
    result = [mark if leaf is OutputLayout.TENSOR else leaf for leaf in captured.layout.template]
    args, kwargs = pytree.tree_unflatten(captured.leaves, captured.spec)
    rest = {name: value for name, value in kwargs.items() if name not in captured.by_name}
    named = {name: value for name, value in kwargs.items() if name in captured.by_name}
    data = {
        "arguments": _encode((args, named, rest) if len(rest) > 1 else (args, kwargs), device, "arguments"),
        "result": _encode(pytree.tree_unflatten(result, captured.layout.spec), device, "result"),
    }
    if captured.all_differ:
        data["all_differ"] = True
    try:
        read_call(data, captured.program, states=len(captured.state))
    except BundleError as error:
        raise ExportError(f"a file cannot hold how the model is called: {error}") from error
    return data


def _encode(value: Any, device: torch.device, where: str) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        return {"tensor": None}
    for tag, known in _SEQUENCES.items():
        if kind is known:
            return {tag: [_encode(part, device, where) for part in value]}
    for tag, known in _MAPPINGS.items():
        if kind is known:
            return {tag: [[_key(key, where), _encode(part, device, where)] for key, part in value.items()]}
    if kind in _RESULTS.values():
        return {"torch": [kind.__name__, [_encode(part, device, where) for part in value]]}
    if pytree.is_namedtuple_class(kind):
        parts = [[field, _encode(part, device, where)] for field, part in value._asdict().items()]
        return {"namedtuple": [kind.__name__, parts]}
    if kind in pytree.SUPPORTED_NODES:
        raise ExportError(
            f"{FILE}, {where}: a file cannot hold a {kind.__name__}: a wrapper of the model can take or give "
            "a dict, a list, a tuple or a namedtuple in its place"
        )
    return encode_value(value, device, f"{FILE}, {where}")


def _key(key: object, where: str) -> str | int:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise ExportError(f"{FILE}, {where}: a file cannot hold the dict key {reprlib.repr(key)}")


def read_call(data: object, program: Program, types: Sequence[type] = (), *, states: int = 0) -> Captured:
    """The capture that `write_call` stored, with a program that was read; it answers calls like the original.

    `types` are the caller's own namedtuples, known by name and fields. The last `states` inputs and
    outputs of the program are a state, of which a call tells nothing. Raises BundleError for data that
    `write_call` does not write, and if the number of tensors differs from the program's.
    """
    all_differ = isinstance(data, dict) and data.get("all_differ") is True
    arguments, result, *_ = members(data, ("arguments", "result", *(["all_differ"] * all_differ)), FILE)
    call = _decode(arguments, program.device, types, f"{FILE}, arguments")
    args, *parts = call if type(call) is tuple and call else (None,)
    names = [name for part in parts if type(part) is dict for name in part]
    are_dicts = len(parts) in (1, 2) and all(type(part) is dict for part in parts)
    if type(args) is not tuple or not are_dicts or not all(type(name) is str for name in names):
        refuse(f"{FILE}, arguments", "expected positional and keyword arguments")
    if len(set(names)) != len(names):
        refuse(f"{FILE}, arguments", "an argument with two values")
    by_name = frozenset(parts[0])
    kwargs = {name: value for part in parts for name, value in part.items()}
    leaves, spec = flatten_call(args, in_order(kwargs, by_name))
    tensors, layout = flatten_outputs(_decode(result, program.device, types, f"{FILE}, result"))
    for what, marks, own in (
        ("arguments", [leaf for leaf in leaves if isinstance(leaf, Tensor)], program.examples),
        ("result", tensors, program.exit),
    ):
        if len(marks) != len(own) - states:
            refuse(f"{FILE}, {what}", f"{len(marks)} tensors, while the program has {len(own) - states}")
    examples = iter(program.examples)
    leaves = [next(examples) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return Captured(program, spec, tuple(leaves), layout, by_name=by_name, all_differ=all_differ)


def _decode(data: object, device: torch.device, types: Sequence[type], where: str, depth: int = 0) -> Any:
    """The nested value, with an empty tensor where a tensor is."""
    if depth > _DEEPEST:
        refuse(where, f"containers nested deeper than {_DEEPEST}")
    if not isinstance(data, dict):
        return decode_value(data, device, where)
    tag, content = tagged(data, where)

    def inner(parts: object) -> list[Any]:
        return [_decode(part, device, types, where, depth + 1) for part in array(parts, where)]

    if tag == "tensor" and content is None:
        return torch.empty(0, device="cpu")
    if tag == "size":
        return _size(inner(content), where)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](inner(content))
    if tag in _MAPPINGS:
        keys = [key for key, _ in _pairs(content, where)]
        if not all(type(key) in (str, int) for key in keys) or len(set(keys)) != len(keys):
            refuse(where, "expected different strings or integers as keys")
        return _MAPPINGS[tag](zip(keys, inner([part for _, part in _pairs(content, where)]), strict=True))
    if tag == "torch":
        name, parts = _pair(content, where)
        return _torch_result(named(name, _RESULTS, where), inner(parts), where)
    if tag == "namedtuple":
        name, content = _pair(content, where)
        fields = tuple(field for field, _ in _pairs(content, where))
        kind = _namedtuple(name, fields, types, where)
        return kind(*inner([part for _, part in _pairs(content, where)]))
    return decode_value(data, device, where)


def _pair(data: object, where: str) -> tuple[Any, Any]:
    pair = array(data, where)
    if len(pair) != 2:
        refuse(where, f"expected a name and a value, found {reprlib.repr(data)}")
    return pair[0], pair[1]


def _pairs(data: object, where: str) -> list[tuple[Any, Any]]:
    return [_pair(pair, where) for pair in array(data, where)]


def _size(sizes: list[Any], where: str) -> torch.Size:
    if not all(type(size) is int for size in sizes):
        refuse(where, "a size is made of integers")
    return torch.Size(sizes)


def _torch_result(kind: Any, parts: list[Any], where: str) -> Any:
    if len(parts) != kind.n_sequence_fields:
        refuse(where, f"{len(parts)} values for torch.return_types.{kind.__name__}")
    return kind(parts)


def _namedtuple(name: object, fields: tuple[Any, ...], types: Sequence[type], where: str) -> Any:
    """The caller's own class of this name with these fields, else one made for the purpose."""
    for word in (name, *fields):
        if not isinstance(word, str) or not _IDENTIFIER.fullmatch(word) or keyword.iskeyword(word):
            refuse(where, f"{reprlib.repr(word)} is no name for a namedtuple or a field of one")
    if len(set(fields)) != len(fields) or any(field.startswith("_") for field in fields):
        refuse(where, "the fields of a namedtuple differ, and none begins with an underscore")
    own = (kind for kind in types if pytree.is_namedtuple_class(kind) and kind.__name__ == name)
    return next((kind for kind in own if kind._fields == fields), None) or _stand_in(str(name), fields)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=256)
def _stand_in(name: str, fields: tuple[str, ...]) -> Any:
    """One class for one name and fields, so that equal files give equal structures.

    `namedtuple` writes the fields into code that it evaluates: they have been checked to be identifiers.
    """
    return collections.namedtuple(name, fields)
