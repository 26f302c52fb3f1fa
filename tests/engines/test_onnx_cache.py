"""Exported graphs on disk: found again for the same program only, whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.engines import onnx_cache
from ampopt.engines.onnx_cache import Exports, exported, exports_in
from ampopt.engines.onnx_program import plain_model
from ampopt.ir.lanes import FP32
from ampopt.ir.program import Program
from ampopt.system.cache_folder import MOST_BYTES
from tests.helpers import program_of

onnx = pytest.importorskip("onnx")
X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
X64, X512 = torch.ones(1, 64, 8, 8), torch.ones(1, 512)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def program(scale: float = 1.0) -> Program:
    torch.manual_seed(0)
    last = nn.Conv2d(64, 64, 3)
    with torch.no_grad():
        last.weight.mul_(scale)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), last).eval()
    return program_of(model, X, lane=FP32)


def model_proto(program: Program, *others: Tensor) -> Any:
    """Every weight of a program as an initializer, and some that it does not have."""
    weights = dict(program.graph.named_buffers())
    named = {**weights, **{f"val_{index}": tensor for index, tensor in enumerate(others)}}
    tensors = [onnx.numpy_helper.from_array(tensor.numpy(), name) for name, tensor in named.items()]
    return onnx.helper.make_model(onnx.helper.make_graph([], "a graph", [], [], tensors))


def export(program: Program, *others: Tensor) -> bytes:
    return exported(program.graph, program.examples, lambda: model_proto(program, *others))


def found(program: Program) -> bytes:
    """What the cache has; a failure where it has nothing."""
    return exported(program.graph, program.examples, lambda: pytest.fail("exported anew"))


def test_what_was_exported_is_found_byte_for_byte(folder: Path) -> None:
    made, shape = program(), torch.tensor([2, 3])
    expected = model_proto(made, shape).SerializeToString()
    assert export(made, shape) == expected
    assert found(made) == expected


def test_a_file_does_not_hold_the_programs_weights(folder: Path) -> None:
    made = program()
    export(made)
    (file,) = folder.glob("*.onnx")
    assert file.stat().st_size < 1000 < sum(w.nbytes for w in made.graph.buffers())


@pytest.mark.parametrize(
    ("model", "x"),
    [
        pytest.param(nn.Sequential(nn.Conv2d(64, 256, 3), nn.ReLU(), nn.Conv2d(256, 128, 3)), X64, id="conv"),
        pytest.param(nn.Sequential(nn.Linear(512, 768), nn.ReLU(), nn.Linear(768, 64)), X512, id="matrices"),
        pytest.param(nn.GRU(256, 256, batch_first=True), torch.ones(1, 4, 256), id="GRU"),
    ],
)
def test_what_the_exporter_makes_of_large_weights_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor
) -> None:
    """It names weights as it likes, and transposes matrices: by their names none was found."""
    made = program_of(model.eval(), x, lane=FP32)
    assert sum(weight.nbytes for weight in made.graph.buffers()) > MOST_BYTES
    expected = plain_model(made.graph, made.examples)
    (file,) = folder.glob("*.onnx")
    assert file.stat().st_size < MOST_BYTES / 10
    monkeypatch.setattr("ampopt.engines.onnx_program.model_of", lambda *_: pytest.fail("exported anew"))
    assert plain_model(made.graph, made.examples) == expected


def test_a_matrix_and_its_transpose_of_one_size_are_told_apart(folder: Path) -> None:
    made = program_of(nn.Linear(9, 9), torch.ones(1, 9), lane=FP32)
    weight = dict(made.graph.named_buffers())["p_weight"]
    assert export(made, weight.t(), weight) == found(made)


def test_an_initializer_of_another_value_under_a_weights_name_stays(folder: Path) -> None:
    made = program()
    weights = dict(made.graph.named_buffers())
    name = max(weights, key=lambda each: weights[each].numel())

    def make() -> Any:
        model = model_proto(made)
        (changed,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
        changed.CopyFrom(onnx.numpy_helper.from_array(weights[name].numpy() * 2, name))
        return model

    expected = make().SerializeToString()
    assert exported(made.graph, made.examples, make) == expected
    assert found(made) == expected


def test_other_weights_inputs_or_libraries_are_exported_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = program()
    export(made)
    other = program(scale=2.0)
    assert export(other) == model_proto(other).SerializeToString() != export(made)
    for examples in ([X[..., :7]], [X.double()], [X.contiguous(memory_format=torch.channels_last)]):
        with pytest.raises(pytest.fail.Exception, match="exported anew"):
            exported(made.graph, examples, lambda: pytest.fail("exported anew"))
    for name, value in (("library_versions", lambda: ["onnx 0"]), ("own_code", lambda: "another")):
        with monkeypatch.context() as patch:
            patch.setattr(onnx_cache, name, value)
            with pytest.raises(pytest.fail.Exception, match="exported anew"):
                found(made)
    found(made)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[: len(data) // 2],
        lambda data: data + b"\0",
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: b"\0" * (MOST_BYTES + 1),
        lambda data: hashlib.sha256(b"").digest(),
    ],
)
def test_a_damaged_file_is_not_believed_and_is_replaced(
    folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    made = program()
    expected = export(made)
    (file,) = folder.glob("*.onnx")
    file.write_bytes(damage(file.read_bytes()))
    assert export(made) == expected
    assert found(made) == expected


def test_another_users_file_is_not_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = program()
    export(made)
    monkeypatch.setattr("os.getuid", lambda: -1)
    with pytest.raises(pytest.fail.Exception, match="exported anew"):
        found(made)


def test_a_model_of_many_other_weights_is_not_kept(folder: Path) -> None:
    made, transposed = program(), torch.zeros(MOST_BYTES // 4)
    for _ in range(2):
        assert export(made, transposed) == model_proto(made, transposed).SerializeToString()
    assert list(folder.glob("*")) == []


def test_without_a_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", "")
    made = program()
    assert export(made) == model_proto(made).SerializeToString()
    with pytest.raises(pytest.fail.Exception, match="exported anew"):
        found(made)


@pytest.mark.parametrize("cache", ["", "cache"])
def test_exports_are_held_and_found_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", cache and str(tmp_path / cache))
    made, held = program(), Exports()
    if cache:
        export(made)
    with exports_in(held):
        expected = export(made)
    monkeypatch.setenv("AMPOPT_CACHE", "")
    (data,) = held.values()
    assert len(data) < 1000
    with exports_in(dict(held)):
        assert found(made) == expected
        with pytest.raises(pytest.fail.Exception, match="exported anew"):
            found(program(scale=2.0))
    with pytest.raises(pytest.fail.Exception, match="exported anew"):
        found(made)


def test_a_damaged_export_that_is_held_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", "")
    made, held = program(), Exports()
    with exports_in(held):
        expected = export(made)
        ((key, data),) = held.items()
        held[key] = data[:40] + bytes([data[40] ^ 1]) + data[41:]
        assert export(made) == expected
        assert held == {key: data}


def test_a_damaged_export_that_is_held_leaves_the_folders_alone(folder: Path) -> None:
    made = program()
    expected, held = export(made), Exports()
    (file,) = folder.glob("*.onnx")
    held[file.stem] = b"damaged"
    with exports_in(held):
        assert found(made) == expected
    assert held == {file.stem: file.read_bytes()}
