"""The files beside an ONNX model that it takes weights from, read from its bytes without `onnx`.

A runtime opens the files that a model names. OpenVINO follows any path, and a bundle's author could have a
robot's own files read into the results.

Format: protocol buffers' wire format, https://protobuf.dev/programming-guides/encoding, and the fields of
`onnx.proto`, https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_Numbers = Mapping[int, str]

MESSAGES: dict[str, _Numbers] = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
}
"""The fields, by number, in which a message holds messages that lead to a tensor's `external_data`."""

_VARINT, _EIGHT, _TEXT, _FOUR = 0, 1, 2, 5
_KEY, _VALUE = 1, 2


def external_files(model: bytes) -> set[str]:
    """The locations of external weights in a serialized `ModelProto`, as it writes them.

    Raises ValueError for bytes that are no such message.
    """
    found: set[str] = set()
    waiting = [("Model", memoryview(model))]
    while waiting:
        kind, message = waiting.pop()
        parts = MESSAGES[kind]
        for number, value in _parts(message):
            inner = parts.get(number)
            if inner is None or not isinstance(value, memoryview):
                continue
            if inner != "Entry":
                waiting.append((inner, value))
                continue
            entry = {place: bytes(text) for place, text in _parts(value) if isinstance(text, memoryview)}
            if entry.get(_KEY) == b"location":
                found.add(entry.get(_VALUE, b"").decode())
    return found


def _parts(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message in order, each with its number."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        if tag >> 32:
            raise ValueError("a tag of more than 32 bits, of which readers take 32")
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == _TEXT:
            size, place = _varint(message, place)
        elif kind in (_EIGHT, _FOUR):
            size = 8 if kind == _EIGHT else 4
        else:
            raise ValueError(f"a field of wire type {kind}, which ONNX does not have")
        if size > len(message) - place:
            raise ValueError("a field is longer than its message")
        yield number, message[place : place + size]
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """The number at a place, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            raise ValueError("it ends within a number")
        byte, place = message[place], place + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("a number of more than ten bytes")
