"""Names and operators in a program's file that must never reach generated code or be looked up."""

from __future__ import annotations

import json

import pytest
from torch import Tensor

from ampopt.errors import BundleError
from ampopt.ir.program import Program
from tests.support.program_sample import Data, call_of, check_code, read, sample_program, written_sample


@pytest.fixture(scope="module")
def program() -> Program:
    return sample_program()


@pytest.fixture
def written(program: Program) -> tuple[Data, dict[str, Tensor]]:
    return written_sample(program)


def test_the_sample_has_every_kind_of_thing_in_it(written: tuple[Data, dict[str, Tensor]]) -> None:
    text = json.dumps(written[0])
    for part in ('"getitem"', '"dtype"', '"device"', '"float"', '"tanh"', '"kwargs": {"', '"weight"', "[{"):
        assert part in text


def test_the_sample_reads_and_its_code_is_clean(
    written: tuple[Data, dict[str, Tensor]], program: Program
) -> None:
    check_code(read(*written, program).graph)


def rename(data: Data, old: str, new: object) -> Data:
    """The data with a node's name changed everywhere."""
    text = json.dumps(data).replace(json.dumps(old), json.dumps(new))
    renamed: Data = json.loads(text)
    return renamed


HOSTILE = "__import__('os').system('touch CANARY')"
NAMES = [
    HOSTILE,
    "x; import os",
    "x\nimport os",
    "a.b",
    "",
    "1x",
    "x y",
    "x'",
    'x"',
    "x#",
    "# COUNTER: 3",
    "self",
    "torch",
    "device",
    "inf",
    "nan",
    "None",
    "lambda",
    "class",
    "print",
    "exec",
    "__import__",
    "__builtins__",
    "\uff58",
    "\u017felf",
    "x\u0000",
    "x" * 201,
    "x\n",
    None,
    7,
    ["x"],
    {"node": "x"},
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
@pytest.mark.parametrize("kind", ["input", "weight", "call"])
def test_names_that_are_not_plain_are_refused(
    kind: str, name: object, written: tuple[Data, dict[str, Tensor]], program: Program
) -> None:
    data, tensors = written
    node = next(node for node in data["nodes"] if kind in node)
    old = node[kind]
    if isinstance(name, str):
        for other in data["nodes"]:
            if "args" in other:
                other["args"] = rename({"": other["args"]}, old, name)[""]
        data["outputs"] = rename({"": data["outputs"]}, old, name)[""]
    node[kind] = name
    with pytest.raises(BundleError, match=r"^program\.json, node"):
        read(data, tensors, program)


MODULE_NAMES = [
    "forward",
    "training",
    "graph",
    "code",
    "_buffers",
    "_graph",
    "__class__",
    "__call__",
    "to",
    "__dict__",
]


@pytest.mark.parametrize("name", [*NAMES[:12], *MODULE_NAMES], ids=repr)
def test_weights_cannot_take_the_place_of_a_modules_attributes(
    name: str, written: tuple[Data, dict[str, Tensor]], program: Program
) -> None:
    data, tensors = written
    node = next(node for node in data["nodes"] if "weight" in node)
    data["weights"][name] = data["weights"].pop(node["of"])
    node["of"] = name
    with pytest.raises(BundleError, match=r"^program\.json, node"):
        read(data, tensors, program)


OPERATORS = [
    HOSTILE,
    "os.system",
    "builtins.eval",
    "aten.eval",
    "aten.relu",
    "aten.relu.out",
    "aten.relu_.default",
    "aten::relu",
    "aten.__class__.default",
    "aten.relu.__call__",
    "aten.relu.default.__class__",
    "aten.save.default",
    "aten.from_file.default",
    "aten._print.default",
    "aten.item.default",
    "aten._local_scalar_dense.default",
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.new_empty.default",
    "aten.rand.default",
    "aten.bernoulli.default",
    "aten.set.source_Storage",
    "aten.set_data.default",
    "aten.resize.default",
    "aten.pin_memory.default",
    "aten.record_stream.default",
    "aten.cudnn_convolution_relu.default",
    "aten.lu_solve.default",
    "aten.sparse_coo_tensor.indices",
    "prim.Print.default",
    "prims.add.default",
    "mkldnn._convolution_pointwise.default",
    "higher_order.cond",
    "_operator.getitem",
    "",
    None,
    3,
    ["aten.relu.default"],
]


@pytest.mark.parametrize("operator", OPERATORS, ids=repr)
def test_operators_that_are_unknown_or_do_more_than_compute_are_refused(
    operator: object, written: tuple[Data, dict[str, Tensor]], program: Program
) -> None:
    data, tensors = written
    call_of(data, "gelu").update(operator=operator, kwargs={})
    with pytest.raises(BundleError, match=r"^program\.json, node 'gelu'.*(operator|string)"):
        read(data, tensors, program)
