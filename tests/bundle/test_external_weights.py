"""A bundle's ONNX model takes weights from no file but the bundle's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampopt import robot
from ampopt.bundle.external_weights import external_files
from ampopt.bundle.files import open_bundle, write_bundle
from ampopt.errors import BundleError
from tests.support.onnx_models import convolution, expected, image, save_bundle

onnx = pytest.importorskip("onnx")


def tensor(location: str | None = None, name: str = "w") -> Any:
    made = onnx.numpy_helper.from_array(np.ones(3, np.float32), name)
    if location is not None:
        made.ClearField("raw_data")
        made.data_location = onnx.TensorProto.EXTERNAL
        made.external_data.add(key="offset", value="0")
        made.external_data.add(key="location", value=location)
    return made


def model(*nodes: Any, initializers: Any = (), sparse: Any = (), functions: Any = ()) -> Any:
    graph = onnx.helper.make_graph(nodes, "g", [], [], initializer=initializers, sparse_initializer=sparse)
    return onnx.helper.make_model(graph, functions=functions)


def constant(location: str | None) -> Any:
    return onnx.helper.make_node("Constant", [], ["c"], value=tensor(location))


def branching(location: str | None) -> Any:
    inner = onnx.helper.make_graph([constant(location)], "inner", [], [])
    return onnx.helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)


def in_function(location: str | None) -> Any:
    made = onnx.helper.make_function(
        "d", "F", [], ["c"], [constant(location)], [onnx.helper.make_opsetid("", 18)]
    )
    return model(functions=[made])


def in_sparse(location: str | None) -> Any:
    places = onnx.numpy_helper.from_array(np.arange(3), "places")
    return model(sparse=[onnx.helper.make_sparse_tensor(tensor(location), places, [9])])


PLACES: dict[str, Callable[[str | None], Any]] = {
    "a weight": lambda location: model(initializers=[tensor(), tensor(location, "v")]),
    "a constant": lambda location: model(constant(location)),
    "a branch": lambda location: model(branching(location)),
    "a function": in_function,
    "a sparse weight": in_sparse,
    "weights of a node": lambda location: model(
        onnx.helper.make_node("F", [], ["y"], many=[tensor(), tensor(location)])
    ),
}


def varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def field(number: int, content: bytes, above: int = 0) -> bytes:
    """A field of bytes; `above`: what stands above the 32 bits of its tag."""
    return varint((number << 3 | 2) + (above << 32)) + varint(len(content)) + content


@pytest.mark.parametrize("above", range(1, 5))
def test_a_tag_that_readers_cut_is_refused(above: int) -> None:
    """They take 32 bits of it: with one more it is an unknown field here, and the same to them."""
    high = [1 if each == above else 0 for each in range(1, 5)]
    entry = field(1, b"location", high[0]) + field(2, b"../secret")
    data = field(7, field(5, field(13, entry, high[1]), high[2]), high[3])
    with pytest.raises(ValueError, match="a tag of more than 32 bits"):
        external_files(data)
    plain = field(7, field(5, field(13, field(1, b"location") + field(2, b"../secret"))))
    assert external_files(plain) == {"../secret"}


@pytest.mark.parametrize("name", PLACES)
def test_a_file_is_found_wherever_it_is_named(name: str) -> None:
    assert external_files(PLACES[name]("../secret").SerializeToString()) == {"../secret"}
    assert external_files(PLACES[name](None).SerializeToString()) == set()


def test_texts_that_look_like_it_are_none() -> None:
    made = model(onnx.helper.make_node("F", ["location"], ["y"], name="/location/0", location="/etc/passwd"))
    made.metadata_props.add(key="location", value="/etc/passwd")
    assert external_files(made.SerializeToString()) == set()


def test_what_is_appended_counts_too() -> None:
    plain, other = model().SerializeToString(), model(constant("/a")).SerializeToString()
    assert external_files(plain + other) == {"/a"}


@pytest.mark.parametrize(
    "data", [b"\x3a", b"\x3a\x05abc", b"\x0b", b"\xff" * 12, b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"]
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"it ends|longer|wire type|ten bytes"):
        external_files(data)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("data", [PLACES["a weight"]("/etc/hostname").SerializeToString(), b"\x3a\x05abc"])
def test_a_bundle_that_names_another_file_is_refused(tmp_path: Path, engine: str, data: bytes) -> None:
    pytest.importorskip("onnxruntime")
    if engine == "openvino":
        pytest.importorskip("openvino")
    opened = open_bundle(
        save_bundle(tmp_path / "own", convolution(), {"x": image()}, {"y": expected(image())})
    )
    files: dict[str, bytes | Path] = {name: opened.read(name) for name in opened.names}
    manifest = {name: value for name, value in opened.manifest.items() if name not in ("files", "schema")}
    write_bundle(tmp_path / "robot.ampopt", manifest, files | {"model.onnx": data})
    reason = "takes weights from '/etc/hostname', which is no file of the bundle|is no ONNX model: a field is"
    with pytest.raises(BundleError, match=reason):
        robot.load(tmp_path / "robot.ampopt", engine=engine)
