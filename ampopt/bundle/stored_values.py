"""Stores Python values as tagged JSON, and reads them back without evaluating anything.

`null`, `true`, `7`, `"tanh"` and `[…]` stand for themselves; everything else is an object with one member,
whose name is the tag: `{"float": 0.5}`, `{"float": "nan"}`, `{"dtype": "float16"}`, `{"device": "own"}`.
"""

from __future__ import annotations

import math
import reprlib
from typing import Any, NoReturn

import torch

from ampopt.errors import BundleError, ExportError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    )
}
MEMORY_FORMATS = {
    str(format).removeprefix("torch."): format
    for format in (
        *(torch.contiguous_format, torch.preserve_format),
        *(torch.channels_last, torch.channels_last_3d),
    )
}
_NAMED: dict[str, dict[str, Any]] = {
    "dtype": DTYPES,
    "memory_format": MEMORY_FORMATS,
    "layout": {"strided": torch.strided},
}
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

INT64 = range(-(2**63), 2**63)
"""The range of integers that PyTorch's operators accept."""


def encode_value(value: object, device: torch.device, where: str) -> Any:
    """JSON for a plain value of a program on `device`.

    Raises ExportError, which begins with `where`, for a value of a type that a file cannot hold.
    """
    if value is None or type(value) in (bool, str) or (type(value) is int and value in INT64):
        return value
    if type(value) is float:
        return {"float": value if math.isfinite(value) else str(value)}
    if isinstance(value, torch.device):
        return {"device": _device_name(value, device, where)}
    for tag, names in _NAMED.items():
        name = next((name for name, known in names.items() if known is value), None)
        if name is not None:
            return {tag: name}
    raise ExportError(f"{where}: a file cannot hold {reprlib.repr(value)}, a {type(value).__name__}")


def decode_value(data: object, device: torch.device, where: str) -> Any:
    """Decode a value of `encode_value`, for a program on `device`. Raises BundleError for other data."""
    if data is None or isinstance(data, (bool, str)):
        return data
    if isinstance(data, int):
        return integer(data, where)
    tag, content = tagged(data, where)
    if tag == "float":
        return _float(content, where)
    if tag == "device" and content in ("own", "cpu"):
        return device if content == "own" else torch.device("cpu")
    if tag not in _NAMED:
        refuse(where, f"unknown value {reprlib.repr(data)}")
    return named(content, _NAMED[tag], where)


def _device_name(value: torch.device, own: torch.device, where: str) -> str:
    """ "own" for the program's device, which is another one elsewhere; "cpu" for the CPU beside it."""
    if value.type == own.type and (value.index is None or own.index is None or value.index == own.index):
        return "own"
    if value.type == "cpu":
        return "cpu"
    raise ExportError(
        f"{where}: a program on {own} that also uses {value} cannot be moved to another machine"
    )


def _float(content: object, where: str) -> float:
    if isinstance(content, float) and math.isfinite(content):
        return content
    if not isinstance(content, str) or content not in _NOT_FINITE:
        refuse(where, f"{reprlib.repr(content)} is not a floating-point number")
    return _NOT_FINITE[content]


OF_A_FILE = "; the bundle is damaged or was not written by ampopt"
"""How a refusal ends; of a program that is to be written it is not true."""


def refuse(where: str, what: str, cause: Exception | None = None) -> NoReturn:
    """Raise the BundleError for invalid data of a file at `where`."""
    raise BundleError(f"{where}: {what}{OF_A_FILE}") from cause


def members(data: object, names: tuple[str, ...], where: str) -> tuple[Any, ...]:
    """The members of a JSON object in the order of `names`.

    Raises BundleError for other or missing members.
    """
    if not isinstance(data, dict) or data.keys() != set(names):
        refuse(where, f"expected an object of {', '.join(names)}, found {reprlib.repr(data)}")
    return tuple(data[name] for name in names)


def tagged(data: object, where: str) -> tuple[str, Any]:
    """The tag and the content of an object with one member."""
    if not isinstance(data, dict) or len(data) != 1:
        refuse(where, f"expected a tagged value, found {reprlib.repr(data)}")
    return next(iter(data.items()))


def array(data: object, where: str) -> list[Any]:
    """A JSON array."""
    if not isinstance(data, list):
        refuse(where, f"expected an array, found {reprlib.repr(data)}")
    return data


def text(data: object, where: str) -> str:
    """A JSON string."""
    if not isinstance(data, str):
        refuse(where, f"expected a string, found {reprlib.repr(data)}")
    return data


def boolean(data: object, where: str) -> bool:
    """A JSON `true` or `false`."""
    if not isinstance(data, bool):
        refuse(where, f"expected true or false, found {reprlib.repr(data)}")
    return data


def integer(data: object, where: str) -> int:
    """A JSON number that is an integer of 64 bits."""
    if not isinstance(data, int) or isinstance(data, bool) or data not in INT64:
        refuse(where, f"expected an integer of 64 bits, found {reprlib.repr(data)}")
    return data


def named(data: object, names: dict[str, Any], where: str) -> Any:
    """The value for a name in a table."""
    if not isinstance(data, str) or data not in names:
        refuse(where, f"{reprlib.repr(data)} is none of {', '.join(names)}")
    return names[data]
