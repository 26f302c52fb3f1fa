"""What is taken as a manifest: every field's type, plausible values, and only the bytes that were written."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampopt.bundle.manifest import (
    COPY_AGAIN,
    MANIFEST,
    MAX_BYTES,
    MAX_FILES,
    RefusedError,
    check_names,
    decode,
    encode,
)
from ampopt.version import __version__
from tests.support.bundles import fields

FILE = {"sha256": "a" * 64, "bytes": 3}


def manifest(**changes: Any) -> dict[str, Any]:
    return fields(files={"model.onnx": FILE}) | changes


def changed(path: str, value: Any) -> dict[str, Any]:
    """A manifest with another value at a dotted path; `...` removes it."""
    result = copy.deepcopy(manifest())
    *parents, last = path.split(".")
    place: Any = result
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key.replace("/", ".")]
    if value is ...:
        del place[last]
    else:
        place[last.replace("/", ".")] = value
    return result


def test_a_manifest_comes_back_as_it_was() -> None:
    assert decode(encode(manifest())) == manifest()


def test_a_bundle_without_onnx_needs_no_onnx_field() -> None:
    without = {key: value for key, value in manifest(files={"program.json": FILE}).items() if key != "onnx"}
    assert decode(encode(without)) == without
    with pytest.raises(RefusedError, match=r"onnx.*missing"):
        decode(encode(without | {"files": {"model.onnx": FILE}}))


@pytest.mark.parametrize("field", [key for key in manifest() if key != "schema"])
def test_every_field_must_be_there(field: str) -> None:
    with pytest.raises(RefusedError, match=f"'{field}' is missing"):
        decode(encode(changed(field, ...)))


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("ampopt", ["", "../0.1", 1, None]),
        ("created", ["yesterday", "2026-13-01T00:00:00Z", 5, None]),
        ("model", [[], "ResNet", None]),
        ("model.name", ["", 3, None, "x" * 5000]),
        ("model.sha256", ["A" * 64, "a" * 63, 0]),
        ("lane.dtype", ["float17", "torch.float16", 16]),
        ("inputs", [[], {}, None, [[]]]),
        ("inputs.0.name", ["", 1]),
        ("inputs.0.shape", [[-1], [1.0], [True], "1", [2**40], [1] * 17, [2**63]]),
        ("inputs.0.dtype", ["object", None]),
        ("inputs.0.layout", ["", "Contiguous Layout", 1]),
        ("outputs.0.shape", [[None], ["N"]]),
        ("tolerance", [-0.1, 1.1, "0.01", True, None]),
        ("latency.p50_ms", [-1, "1", None, 9.9]),
        ("latency.p99_ms", [-1, "1", True, 0.1]),
        ("latency.device", ["", None]),
        ("fingerprint", [{"device": 3}, []]),
        ("onnx.precision", ["int8", 16]),
        ("onnx.opset", [0, "18", 18.5, True]),
        ("onnx.session", [[], None]),
        ("onnx.latency.p50_ms", [-1, None, 9.9]),
        ("call", [[], "eval", None]),
        ("files", [{}, [], {str(number): FILE for number in range(MAX_FILES + 1)}]),
        ("files.model/onnx", [{}, "a" * 64, FILE | {"more": 1}]),
        ("files.model/onnx.sha256", ["a" * 65, None]),
        ("files.model/onnx.bytes", [-1, 1.5, "3", True, 2**63]),
        ("surprise", [1]),
        ("inputs.0.surprise", [1]),
    ],
)
def test_values_of_another_kind_are_refused(path: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RefusedError, match=path.partition(".")[0]):
            decode(encode(changed(path, value)))


def test_a_p99_may_be_unknown() -> None:
    unknown = changed("latency.p99_ms", None)
    unknown["onnx"]["latency"]["p99_ms"] = None
    assert decode(encode(unknown)) == unknown


def test_two_inputs_of_one_name_are_refused() -> None:
    with pytest.raises(RefusedError, match="same name"):
        decode(encode(manifest(inputs=manifest()["inputs"] * 2)))


@pytest.mark.parametrize("schema", [0, 3, 10**30, -1, 1.0, True, "1", None, [], {"a": 1}])
def test_an_unknown_schema_names_the_ampopt_that_reads_it(schema: Any) -> None:
    with pytest.raises(RefusedError, match="schema") as caught:
        decode(encode(manifest(schema=schema, ampopt="9.8.7", new_field=1)))
    assert "9.8.7" in caught.value.advice


@pytest.mark.parametrize("schema", [3, True])
def test_a_schema_that_this_ampopt_would_not_write_is_not_for_it_to_read(schema: Any) -> None:
    with pytest.raises(RefusedError, match=f"has schema '{schema}'") as caught:
        decode(encode(manifest(schema=schema, ampopt=__version__)))
    assert caught.value.advice == COPY_AGAIN


def test_a_manifest_without_a_schema_is_told_so() -> None:
    without = {key: value for key, value in manifest().items() if key != "schema"}
    with pytest.raises(RefusedError, match=f"^{MANIFEST} has no schema, and ampopt") as caught:
        decode(encode(without))
    assert caught.value.advice == COPY_AGAIN


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"[1]", "not an object"),
        (b"null", "not an object"),
        (b"{", "not JSON"),
        (b'{"schema": 1,}', "not JSON"),
        (b'{"schema": 1, "schema": 1}', "twice"),
        (b'{"schema": 1, "call": {"a": 1, "a": 2}}', "twice"),
        (b'{"tolerance": NaN}', "finite"),
        (b'{"tolerance": -Infinity}', "finite"),
        (b'{"tolerance": 1e999}', "finite"),
        (b'{"tolerance": ' + b"9" * 100_000 + b"}", "not JSON|bytes"),
        (b'{"model": "\\ud800"}', "not JSON"),
        (b'{"\\udfff": 1}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"call": ' + b"[" * 70 + b"]" * 70 + b"}", "64 levels"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "not JSON"),
        (b'\xef\xbb\xbf{"schema": 1}', "not JSON"),
        ('{"schema": 1}'.encode("utf-16"), "not JSON"),
        (b'{"schema": 1, "a": "\xff"}', "not JSON"),
        (b'{"schema": 1}\0', "not JSON"),
        (b" " * (MAX_BYTES + 1), "is the most"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_what_is_no_plain_json_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        decode(data)


@given(st.binary(max_size=200) | st.text().map(str.encode) | st.just(encode(fields(files={"a": FILE}))[:-1]))
def test_whatever_the_bytes_are_only_a_refusal_comes(data: bytes) -> None:
    with pytest.raises(RefusedError):
        decode(data)


@given(st.data())
def test_any_changed_byte_is_seen(data: st.DataObject) -> None:
    whole = encode(manifest())
    place = data.draw(st.integers(0, len(whole) - 1))
    other = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    with pytest.raises(RefusedError):
        decode(other)


def test_the_same_values_in_other_bytes_are_refused() -> None:
    parsed = json.loads(encode(manifest()))
    for other in (json.dumps(parsed), json.dumps(parsed, indent=1), json.dumps(parsed, indent=2) + "\n"):
        with pytest.raises(RefusedError, match="was changed"):
            decode(other.encode())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"bytes", object()])
def test_values_that_json_has_not_cannot_be_written(value: Any) -> None:
    with pytest.raises(RefusedError, match="cannot be written"):
        encode(manifest(call={"value": value}))


def test_a_value_within_itself_cannot_be_written() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(RefusedError, match="cannot be written"):
        encode(manifest(call=loop))


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../x", "a/b", "/etc/passwd", "a/", "\\x", "a\\b", "C:x", "C:\\x", "\\\\host\\x",
        "x:stream", "a\0", "\0", "a\n", ".hidden", "trailing.", "trailing ", "-rf", "ünder", "\u212a",
        "a\u0301", "x" * 101, "nul", "NUL.txt", "com1.json", "aux", "~x", "$HOME", "*", "a b",
    ],
)  # fmt: skip
def test_names_that_are_no_plain_file_names_are_refused(name: str) -> None:
    with pytest.raises(RefusedError, match="not allowed"):
        check_names([name])
    with pytest.raises(RefusedError, match="not allowed"):
        decode(encode(manifest(files={"program.json": FILE, name: FILE}, onnx=manifest()["onnx"])))


@pytest.mark.parametrize(
    "name", ["x", "model.onnx.data", "self_test.safetensors", "A-1_b.c", "x" * 100, "console"]
)
def test_plain_names_are_allowed(name: str) -> None:
    check_names([name])


@pytest.mark.parametrize(
    "names", [("a", "a"), ("model.onnx", "MODEL.onnx"), ("manifest.json", "Manifest.JSON")]
)
def test_names_that_are_one_file_on_some_system_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(RefusedError, match="twice"):
        check_names(names)


@pytest.mark.parametrize("name", ["manifest.json", "MANIFEST.SIG"])
def test_the_manifest_does_not_list_itself(name: str) -> None:
    with pytest.raises(RefusedError, match="twice"):
        decode(encode(manifest(files={name: FILE})))
