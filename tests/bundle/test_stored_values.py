"""Plain values come back from tagged JSON as they were, and anything else is refused with its place."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ampopt.bundle.stored_values import (
    DTYPES,
    MEMORY_FORMATS,
    array,
    boolean,
    decode_value,
    encode_value,
    integer,
    members,
    named,
    refuse,
    tagged,
    text,
)
from ampopt.errors import BundleError, ExportError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Level(enum.IntEnum):
    """An integer of a type of its own."""

    LOW = 1


def there_and_back(value: object) -> Any:
    text_of_it = json.dumps(encode_value(value, CPU, "here"), allow_nan=False)
    return decode_value(json.loads(text_of_it), CPU, "here")


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, 1, -7, 2**63 - 1, -(2**63), "", "tanh", "ß\n\0"),
        *(0.0, -0.0, 1.0, 0.1, -1e-320, 1.7976931348623157e308, math.inf, -math.inf, math.nan),
    ],
)
def test_numbers_and_texts_come_back_to_the_bit_and_as_their_type(value: object) -> None:
    found = there_and_back(value)
    assert (type(found), repr(found)) == (type(value), repr(value))


@pytest.mark.parametrize("value", [*DTYPES.values(), *MEMORY_FORMATS.values(), torch.strided])
def test_what_torch_names_comes_back_as_the_same_object(value: object) -> None:
    assert there_and_back(value) is value


def test_the_form_that_files_hold_stays_as_it_is() -> None:
    values = [0.5, math.nan, -math.inf, torch.float16, torch.channels_last, torch.strided, CPU, 7]
    assert [encode_value(value, CPU, "here") for value in values] == [
        {"float": 0.5},
        {"float": "nan"},
        {"float": "-inf"},
        {"dtype": "float16"},
        {"memory_format": "channels_last"},
        {"layout": "strided"},
        {"device": "own"},
        7,
    ]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (2**63, "int"),
        (-(2**63) - 1, "int"),
        (Level.LOW, "Level"),
        (np.float64(0.5), "float64"),
        (1j, "complex"),
        (b"x", "bytes"),
        ([1], "list"),
        (torch.float8_e5m2, "dtype"),
        (torch.sparse_coo, "layout"),
        (torch.ones(1), "Tensor"),
    ],
)
def test_a_value_that_a_file_cannot_hold_is_refused_with_its_place_and_type(value: object, kind: str) -> None:
    with pytest.raises(ExportError, match=rf"^there: a file cannot hold .*, a {kind}$"):
        encode_value(value, CPU, "there")


@pytest.mark.parametrize(
    ("value", "own", "name"),
    [
        ("cpu", "cpu", "own"),
        ("cuda", "cuda:1", "own"),
        ("cuda:1", "cuda:1", "own"),
        ("cuda:1", "cuda", "own"),
        ("cpu", "cuda:0", "cpu"),
    ],
)
def test_the_programs_device_is_stored_without_its_number(value: str, own: str, name: str) -> None:
    assert encode_value(torch.device(value), torch.device(own), "here") == {"device": name}


def test_a_stored_device_is_that_of_the_machine_that_reads_it() -> None:
    assert decode_value({"device": "own"}, CUDA, "here") == CUDA
    assert decode_value({"device": "own"}, CPU, "here") == CPU
    assert decode_value({"device": "cpu"}, CUDA, "here") == CPU


@pytest.mark.parametrize(("value", "own"), [("cuda:1", "cuda:0"), ("cuda:0", "cpu"), ("meta", "cuda:0")])
def test_a_program_on_several_devices_is_not_stored(value: str, own: str) -> None:
    with pytest.raises(ExportError, match=rf"^here: a program on {own} that also uses {value} cannot be"):
        encode_value(torch.device(value), torch.device(own), "here")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (2**63, "expected an integer of 64 bits"),
        (0.5, "expected a tagged value, found 0.5"),
        ([], "expected a tagged value"),
        ({}, "expected a tagged value"),
        ({"float": 0.5, "dtype": "float16"}, "expected a tagged value"),
        ({"float": 1}, "1 is not a floating-point number"),
        ({"float": math.nan}, "nan is not a floating-point number"),
        ({"float": "NaN"}, "'NaN' is not a floating-point number"),
        ({"float": ["inf"]}, "is not a floating-point number"),
        ({"dtype": "float8_e5m2"}, "'float8_e5m2' is none of bool, uint8"),
        ({"dtype": ["float16"]}, "is none of bool"),
        ({"layout": "sparse_coo"}, "'sparse_coo' is none of strided"),
        ({"device": "cuda:0"}, "unknown value {'device': 'cuda:0'}"),
        ({"code": "1 + 1"}, "unknown value {'code'"),
    ],
)
def test_what_was_never_written_is_refused_with_its_place(data: object, message: str) -> None:
    with pytest.raises(BundleError) as caught:
        decode_value(data, CPU, "there")
    assert str(caught.value).startswith("there: ")
    assert message in str(caught.value)


def test_a_refusal_names_the_place_and_keeps_its_cause() -> None:
    cause = KeyError("x")
    with pytest.raises(BundleError, match=r"^graph: no such node; the bundle is damaged") as caught:
        refuse("graph", "no such node", cause)
    assert caught.value.__cause__ is cause


def test_members_come_in_the_order_that_was_asked_for_and_have_to_be_all_of_them() -> None:
    assert members({"b": 2, "a": 1}, ("a", "b"), "here") == (1, 2)
    assert members({}, (), "here") == ()
    for data in ({"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 2}, [1, 2], None):
        with pytest.raises(BundleError, match=r"^here: expected an object of a, b, found"):
            members(data, ("a", "b"), "here")


READERS: list[tuple[Callable[[object, str], object], list[object], list[object]]] = [
    (array, [[], [1, "x"]], [(), {}, "x", None]),
    (text, ["", "x"], [1, None, ["x"], b"x"]),
    (boolean, [True, False], [0, 1, "true", None]),
    (integer, [0, -(2**63), 2**63 - 1], [True, False, 1.0, 2**63, -(2**63) - 1, "1", None]),
    (tagged, [], [{}, {"a": 1, "b": 2}, [("a", 1)], None]),
]


@pytest.mark.parametrize(
    ("read", "right", "wrong"), READERS, ids=["array", "text", "boolean", "integer", "tagged"]
)
def test_every_reader_takes_its_own_kind_and_nothing_like_it(
    read: Callable[[object, str], object], right: list[object], wrong: list[object]
) -> None:
    for data in right:
        assert read(data, "here") is data
    for data in wrong:
        with pytest.raises(BundleError, match=r"^here: expected "):
            read(data, "here")


def test_a_tag_comes_with_its_content_and_a_name_with_its_value() -> None:
    content = ["x"]
    tag, found = tagged({"a": content}, "here")
    assert tag == "a"
    assert found is content
    assert named("x", {"w": 1, "x": content}, "here") is content
    for data in ("y", None, ["x"], 1):
        with pytest.raises(BundleError, match=r"^here: .* is none of w, x;"):
            named(data, {"w": 1, "x": 2}, "here")
