"""Arithmetic with sizes in a program's file: the same numbers at every size, and nothing but numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.bundle.program_file import read_program, write_program
from ampopt.bundle.size_operators import SIZE_OPERATORS, computed_size
from ampopt.bundle.stored_sizes import StoredSizes, stored_sizes
from ampopt.errors import BundleError, ExportError
from ampopt.ir.program import Program
from ampopt.ir.size_range import SizeRange
from ampopt.ir.symbolic_capture import capture_ranges
from tests.helpers import Model
from tests.support.planted import captured_of

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SIZES = ({0: SizeRange("batch", 1, 6), 2: SizeRange("height", 2, 9)},)
CPU = torch.device("cpu")


def _forward(m: Model, x: Tensor) -> Tensor:
    columns = x.flatten(2).transpose(1, 2)
    grown = torch.cat([columns, columns], 1).reshape(x.shape[0], 2 * x.shape[2] * x.shape[3], 3)
    ramp = torch.arange(grown.shape[1]) / (x.shape[2] / 2.0)
    result: Tensor = grown * ramp[None, :, None] / x.shape[0]
    return result


def program() -> Program:
    original, captured = captured_of(Model(_forward), X)
    found = capture_ranges(original, captured, SIZES).program
    return found.replace(examples=captured.program.examples, sizes=SIZES)


@pytest.fixture(scope="module")
def written() -> tuple[dict[str, Any], dict[str, Tensor]]:
    return write_program(program())


def read(data: object, tensors: dict[str, Tensor], stored: StoredSizes | None = None) -> Program:
    held = stored_sizes(SIZES) if stored is None else stored
    return read_program(data, tensors, [X], device=CPU, stored=held)


def test_a_program_that_computes_with_sizes_comes_back(written: Any) -> None:
    data, tensors = written
    assert {node["operator"] for node in data["nodes"] if "number" in node} >= {"size", "mul"}
    found = read(json.loads(json.dumps(data)), tensors)
    assert found.sizes == SIZES
    for batch, height in ((1, 2), (4, 8), (6, 9), (3, 5)):
        x = torch.randn(batch, 3, height, 8)
        assert torch.allclose(found.run(x)[0], _forward(Model(_forward), x))


def test_what_a_file_cannot_hold_is_named_and_no_damage() -> None:
    original, captured = captured_of(Model(lambda m, x: x / 2 ** x.shape[2]), X)
    found = capture_ranges(original, captured, SIZES).program
    with pytest.raises(ExportError, match=r"cannot hold .*pow.*exponent of an integer is at most 4\)$"):
        write_program(found.replace(examples=captured.program.examples, sizes=SIZES))


def test_without_ranges_sizes_are_no_nodes(written: Any) -> None:
    data, tensors = written
    with pytest.raises(BundleError, match="expected an object of call"):
        read(data, tensors, StoredSizes())


def _number(data: dict[str, Any], operator: str) -> dict[str, Any]:
    found: dict[str, Any] = next(node for node in data["nodes"] if node.get("operator") == operator)
    return found


ATTACKS = {
    "an operator that is none": ("mul", {"operator": "__import__"}, "no operator of sizes '__import__'"),
    "an operator that is a list": ("mul", {"operator": []}, "no operator of sizes"),
    "an operator of tensors": ("mul", {"operator": "aten.add.Tensor"}, "no operator of sizes"),
    "text": ("mul", {"args": ["a", 4]}, "takes numbers of 64 bits"),
    "a list": ("mul", {"args": [[1], 4]}, "takes numbers of 64 bits"),
    "a truth": ("mul", {"args": [True, 4]}, "takes numbers of 64 bits"),
    "a tensor": ("mul", {"args": [{"node": "x"}, 4]}, "takes numbers of 64 bits"),
    "no arguments": ("mul", {"args": []}, "takes numbers of 64 bits"),
    "an overflow": ("mul", {"args": [2**62, 2**62]}, "no number of 64 bits"),
    "infinity": ("mul", {"args": [{"float": "inf"}, 2]}, "takes numbers of 64 bits"),
    "a large power": ("mul", {"operator": "pow", "args": [9, 10**9]}, "exponent of an integer is at most 4"),
    "a power beyond": ("mul", {"operator": "pow", "args": [{"float": 9.5}, 10**9]}, "cannot be computed"),
    "an imaginary root": ("mul", {"operator": "pow", "args": [-8, {"float": 0.5}]}, "no number of 64 bits"),
    "one divided by zero": ("mul", {"operator": "pow", "args": [0, -1]}, "cannot be computed"),
    "a division by zero": ("mul", {"operator": "floordiv", "args": [9, 0]}, "cannot be computed"),
    "a dimension beyond the end": ("size", {"args": [{"node": "x"}, 9]}, "cannot be computed"),
    "the size of a number": ("size", {"args": [3, 0]}, "takes a tensor"),
    "a member too many": ("mul", {"kwargs": {}}, "expected an object of number"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_on_a_number_is_refused(attack: str, written: Any) -> None:
    data, tensors = json.loads(json.dumps(written[0])), written[1]
    operator, change, reason = ATTACKS[attack]
    text = json.dumps(change).replace('"x"', json.dumps(_placeholder(data)))
    _number(data, operator).update(json.loads(text))
    with pytest.raises(BundleError, match=reason):
        read(data, tensors)


def _placeholder(data: dict[str, Any]) -> str:
    name: str = next(node["input"] for node in data["nodes"] if "input" in node)
    return name


def test_a_program_that_fails_at_a_corner_is_refused(written: Any) -> None:
    data, tensors = json.loads(json.dumps(written[0])), written[1]
    for node in data["nodes"]:
        if node.get("operator") == "aten.reshape.default":
            node["args"][1][0] = 4  # the example's batch
    with pytest.raises(BundleError, match=r"reshape.*invalid for input"):
        read(data, tensors)


def test_an_output_is_no_number(written: Any) -> None:
    data, tensors = json.loads(json.dumps(written[0])), written[1]
    data["outputs"][0]["node"] = _number(data, "size")["number"]
    with pytest.raises(BundleError, match="not a tensor"):
        read(data, tensors)


@pytest.mark.parametrize("name", SIZE_OPERATORS)
def test_every_operator_gives_a_plain_number(name: str) -> None:
    function = SIZE_OPERATORS[name]
    args: list[Any] = [X, 0] if name == "size" else [7]
    if name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "sym_max", "sym_min"):
        args = [7, 3]
    found = computed_size(function, args)
    assert type(found) in (int, float)
    if name != "size":
        assert found == function(*args)


@pytest.mark.parametrize("args", [[16, -0.5], [16, 0.5], [16, -2], [0.9, 20], [2.0, 60], [7, 0], [-3, 4]])
def test_a_power_has_any_exponent_with_which_it_has_64_bits(args: list[Any]) -> None:
    assert computed_size(SIZE_OPERATORS["pow"], args) == args[0] ** args[1]
