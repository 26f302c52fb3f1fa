"""A hand-made attack on every field of a program's file: each is a BundleError that names the place."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ampopt.bundle.program_file import write_program
from ampopt.errors import BundleError, ExportError
from ampopt.ir.program import Program
from tests.helpers import program_of
from tests.support.program_sample import Data, call_of, read, sample_program, written_sample

Change = Callable[[Data], object]

HOSTILE = "__import__('os').system('touch CANARY')"


@pytest.fixture(scope="module")
def program() -> Program:
    return sample_program()


@pytest.fixture
def written(program: Program) -> tuple[Data, dict[str, Tensor]]:
    return written_sample(program)


def _argument(value: object) -> Change:
    return lambda data: call_of(data, "gelu")["kwargs"].update(approximate=value)


def _position(operator: str, index: int, value: object) -> Change:
    return lambda data: call_of(data, operator)["args"].__setitem__(index, value)


ATTACKS: dict[str, tuple[Change, str]] = {
    "code in a string": (_argument(HOSTILE), "node 'gelu'.*string"),
    "quotes in a string": (_argument("tanh'"), "node 'gelu'.*string"),
    "a line in a string": (_argument("tanh\n"), "node 'gelu'.*string"),
    "a comment that fx looks for": (_argument("# COUNTER: 0"), "node 'gelu'.*string"),
    "a mode that is none": (_argument("none such"), "node 'gelu'.*cannot be called"),
    "an unknown tag": (_argument({"eval": HOSTILE}), "node 'gelu'.*unknown value"),
    "two tags": (_argument({"float": 1.0, "node": "x"}), "node 'gelu'.*tagged"),
    "no tag": (_argument({}), "node 'gelu'.*tagged"),
    "a float that is code": (_argument({"float": HOSTILE}), "node 'gelu'.*not a floating-point"),
    "a float that is null": (_argument({"float": None}), "node 'gelu'.*not a floating-point"),
    "a float out of range": (_argument({"float": float("inf")}), "node 'gelu'.*not a floating-point"),
    "a bare float": (_argument(0.5), "node 'gelu'.*tagged"),
    "an unknown dtype": (_argument({"dtype": "__class__"}), "node 'gelu'.*none of bool"),
    "a dtype that is no name": (_argument({"dtype": ["float32"]}), "node 'gelu'.*none of bool"),
    "an unknown memory format": (_argument({"memory_format": HOSTILE}), "node 'gelu'.*none of contiguous"),
    "an unknown layout": (_argument({"layout": "sparse_coo"}), "node 'gelu'.*none of strided"),
    "another device": (_argument({"device": "cuda:7"}), "node 'gelu'.*unknown value"),
    "a huge integer": (_position("split", 1, [10**400, 1]), "node 'split.*64 bits"),
    "a value of the wrong type": (_position("gelu", 0, 3), "node 'gelu'.*Expected a value of type 'Tensor'"),
    "a negative size": (_position("split", 1, [-1, 4]), "node 'split.*cannot be called"),
    "too few arguments": (lambda d: call_of(d, "gelu")["args"].clear(), "node 'gelu'.*missing"),
    "too many arguments": (lambda d: call_of(d, "gelu")["args"].append(1), "node 'gelu'.*at most 2"),
    "an unknown keyword": (
        lambda d: call_of(d, "gelu")["kwargs"].update(shape=1),
        "node 'gelu'.*no argument 'shape'",
    ),
    "code for a keyword": (
        lambda d: call_of(d, "gelu")["kwargs"].update({HOSTILE: 1}),
        "node 'gelu'.*no argument",
    ),
    "a keyword for getitem": (
        lambda d: call_of(d, "getitem")["kwargs"].update(b=1),
        "node 'getitem.*no argument",
    ),
    "arguments that are no list": (lambda d: call_of(d, "gelu").update(args={"x": 1}), "node 'gelu'.*array"),
    "keywords that are no object": (lambda d: call_of(d, "gelu").update(kwargs=[]), "node 'gelu'.*keyword"),
    "deep nesting": (_position("cat", 0, [[[[[1]]]]]), "node 'cat'.*nested"),
    "deep tuples": (_position("cat", 0, {"tuple": [{"tuple": [[[[1]]]]}]}), "node 'cat'.*nested"),
    "a tuple that is none": (_position("cat", 0, {"tuple": 1}), "node 'cat'.*array"),
    "an unknown node": (_position("gelu", 0, {"node": "nobody"}), "node 'gelu'.*no node before it"),
    "itself": (_position("gelu", 0, {"node": "gelu"}), "node 'gelu'.*no node before it"),
    "a later node": (_position("gelu", 0, {"node": "cat"}), "node 'gelu'.*no node before it"),
    "a node that is no name": (_position("gelu", 0, {"node": ["x"]}), "node 'gelu'.*no node before it"),
    "an item of a tensor": (_position("getitem", 0, {"node": "gelu"}), "node 'getitem.*list of tensors"),
    "an item beyond the end": (_position("getitem", 1, 2), "node 'getitem.*out of range"),
    "an item by a name": (_position("getitem", 1, "__class__"), "node 'getitem.*list of tensors"),
    "an item by a truth": (_position("getitem", 1, True), "node 'getitem.*list of tensors"),
    "a huge result": (
        lambda d: call_of(d, "gelu").update(
            operator="aten.expand.default", kwargs={}, args=[{"node": "conv2d"}, [2**40, 3, 4, 4]]
        ),
        "node 'gelu'.*more than",
    ),
    "a size that overflows": (
        lambda d: call_of(d, "gelu").update(operator="aten.zeros.default", kwargs={}, args=[[2**62, 2**62]]),
        "node 'gelu'.*cannot be called",
    ),
    "random numbers": (_position("dropout", 2, True), "node 'dropout'.*random"),
    "a member too many": (lambda d: call_of(d, "gelu").update(eval=1), "node .*expected an object"),
    "a member too few": (lambda d: call_of(d, "gelu").pop("args"), "node .*expected an object"),
    "a node that is none": (lambda d: d["nodes"].__setitem__(0, 3), "node 0.*expected an object"),
    "nodes that are no list": (lambda d: d.update(nodes={"a": 1}), "nodes.*array"),
    "no nodes": (lambda d: d.update(nodes=[]), "read by no node|no node"),
    "a repeated node": (lambda d: d["nodes"].append(d["nodes"][-1]), "is taken"),
    "a repeated input": (lambda d: d["nodes"].append({"input": "more"}), "inputs"),
    "a weight that nothing reads": (
        lambda d: d["weights"].update(more=next(iter(d["weights"].values()))),
        "weights.*'more' is read by no node",
    ),
    "a weight that is not there": (
        lambda d: next(n for n in d["nodes"] if "of" in n).update(of="other"),
        "no weight 'other'",
    ),
    "an output that is no node": (lambda d: d["outputs"][0].update(node="nobody"), "outputs.*no node"),
    "an output of several": (
        lambda d: d["outputs"][0].update(node="split_with_sizes"),
        "output is not a tensor",
    ),
    "an exit that is none": (lambda d: d["outputs"][0].update(exit=None), "outputs.*expected an object"),
    "outputs that are none": (lambda d: d.update(outputs=None), "outputs.*array"),
    "a dtype of an exit": (lambda d: d["outputs"][0]["exit"].update(dtype="str"), "outputs.*none of bool"),
    "a format of an entry": (
        lambda d: d["inputs"][0]["entry"].update(memory_format=HOSTILE),
        "input 0.*none of contiguous",
    ),
    "another shape": (lambda d: d["inputs"][0].update(shape=[1, 2, 4, 5]), "input 0.*self-test"),
    "a shape of bools": (lambda d: d["inputs"][0].update(shape=[True, 2, 4, 4]), "input 0.*64 bits"),
    "another dtype": (lambda d: d["inputs"][0].update(dtype="float16"), "input 0.*self-test"),
    "no inputs": (lambda d: d.update(inputs=[]), "inputs.*0 inputs"),
    "an unknown lane": (lambda d: d.update(lane_dtype="int8"), "lane_dtype.*none of float32"),
    "an unknown autocast": (lambda d: d["settings"].update(autocast="float32"), "settings.*none of float16"),
    "a setting that is no truth": (lambda d: d["settings"].update(tf32="yes"), "settings.*true or false"),
    "a setting too many": (lambda d: d["settings"].update(benchmark=True), "settings.*expected an object"),
    "another schema": (lambda d: d.update(schema=2), "schema 2"),
    "a schema that is a truth": (lambda d: d.update(schema=True), "schema True"),
    "no schema": (lambda d: d.pop("schema"), "schema None"),
    "something beside": (lambda d: d.update(more=1), "expected an object"),
    "weights that are no object": (lambda d: d.update(weights=[]), "weights.*object"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused(attack: str, written: tuple[Data, dict[str, Tensor]], program: Program) -> None:
    data, tensors = written
    change, message = ATTACKS[attack]
    change(data)
    with pytest.raises(BundleError, match=rf"^program\.json.*{message}"):
        read(data, tensors, program)


WEIGHT_ATTACKS: dict[str, tuple[Change, str]] = {
    "too few strides": (lambda w: w.update(strides=[1]), "strides.*do not fit"),
    "strides with gaps": (lambda w: w.update(strides=[10**12, 9, 3, 1]), "strides.*do not fit"),
    "strides that repeat": (lambda w: w.update(strides=[0, 0, 0, 0]), "strides.*do not fit"),
    "negative strides": (lambda w: w.update(strides=[-18, 9, 3, 1]), "strides.*do not fit"),
    "huge strides": (lambda w: w.update(strides=[2**70, 9, 3, 1]), "64 bits"),
    "strides that are none": (lambda w: w.update(strides="1"), "array"),
    "another tensor": (lambda w: w.update(tensor="other"), "missing"),
    "a tensor that is no name": (lambda w: w.update(tensor=["x"]), "string"),
    "another device": (lambda w: w.update(device={"device": "cuda"}), "unknown value"),
    "a device that is none": (lambda w: w.update(device=None), "cannot be a weight"),
    "a member too many": (lambda w: w.update(dtype="float32"), "expected an object"),
}


@pytest.mark.parametrize("attack", WEIGHT_ATTACKS)
def test_an_attack_on_a_weight_is_refused(
    attack: str, written: tuple[Data, dict[str, Tensor]], program: Program
) -> None:
    data, tensors = written
    change, message = WEIGHT_ATTACKS[attack]
    (name,) = [name for name, tensor in tensors.items() if tensor.dim() == 4]
    change(data["weights"][name])
    with pytest.raises(BundleError, match=rf"^program\.json, weight '{name}'.*{message}"):
        read(data, tensors, program)


def test_missing_and_additional_tensors_are_refused(
    written: tuple[Data, dict[str, Tensor]], program: Program
) -> None:
    data, tensors = written
    name = next(iter(tensors))
    with pytest.raises(BundleError, match=f"tensor '{name}' is missing"):
        read(data, {key: tensor for key, tensor in tensors.items() if key != name}, program)
    with pytest.raises(BundleError, match="'more', which no weight refers to"):
        read(data, {**tensors, "more": torch.zeros(1)}, program)


def test_tensors_of_other_kinds_are_refused(
    written: tuple[Data, dict[str, Tensor]], program: Program
) -> None:
    data, tensors = written
    (name,) = [name for name, tensor in tensors.items() if tensor.dim() == 4]
    for wrong in (torch.zeros(3, 2, 3, 3).to(torch.float8_e4m3fn), torch.zeros(3, 2, 3, 3).int()):
        with pytest.raises(BundleError, match=r"^program\.json, (weight|node)"):
            read(data, {**tensors, name: wrong}, program)


@pytest.mark.parametrize("value", [None, 3, "x", [], [1], True, {}])
def test_a_file_that_is_something_else_is_refused(value: object, program: Program) -> None:
    with pytest.raises(BundleError, match=r"^program\.json"):
        read(value, {}, program)


def test_a_batch_norm_that_trains_is_refused() -> None:
    program = program_of(nn.BatchNorm2d(3).eval(), torch.randn(1, 3, 4, 4))
    data, tensors = write_program(program)
    call_of(data, "batch_norm")["args"][5] = True
    with pytest.raises(BundleError, match=r"node 'batch_norm'.*running statistics"):
        read(data, tensors, program)


def test_what_could_not_be_read_is_not_written(program: Program) -> None:
    module = copy.deepcopy(program.graph)
    node = next(n for n in module.graph.nodes if n.name == "gelu")
    node.kwargs = {"approximate": "tanh #"}
    with pytest.raises(ExportError, match=r"node 'gelu'.*string"):
        write_program(program.with_graph(module))
