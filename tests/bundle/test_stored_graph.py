"""The nodes of a graph as JSON: what is written, what it comes back as, and what is refused."""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from ampopt.bundle import stored_graph
from ampopt.bundle.stored_graph import read_graph, write_nodes
from ampopt.errors import BundleError, ExportError
from ampopt.ir.graph import aten, calls
from ampopt.ir.own_autocast import FULL_PRECISION
from tests.helpers import Model, program_of

CPU = torch.device("cpu")
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))

Nodes = list[dict[str, Any]]


def relu(**changes: Any) -> Nodes:
    """`y = relu(x + w)`, with changes to the last call."""
    call = {"call": "y", "operator": "aten.relu.default", "args": [{"node": "sum_1"}], "kwargs": {}}
    args = [{"node": "x"}, {"node": "w"}]
    return [
        {"input": "x"},
        {"weight": "w", "of": "scale"},
        {"call": "sum_1", "operator": "aten.add.Tensor", "args": args, "kwargs": {}},
        call | changes,
    ]


def read(nodes: object, results: list[Any] | None = None, weights: set[str] | None = None) -> fx.Graph:
    return read_graph(nodes, results or ["y"], {"scale"} if weights is None else weights, CPU, "file")


def text_of(graph: fx.Graph) -> str:
    return "\n".join(str(graph).splitlines()[1:])


def written(graph: fx.Graph) -> Nodes:
    """What a graph is in a file, as JSON gives it back."""
    found: Nodes = json.loads(json.dumps(write_nodes(graph, CPU, "file"), allow_nan=False))
    return found


def test_a_file_of_nodes_is_a_graph_and_that_graph_is_the_file() -> None:
    graph = read(relu())
    graph.lint()
    assert [(n.op, n.name, n.target) for n in graph.nodes] == [
        ("placeholder", "x", "x"),
        ("get_attr", "w", "scale"),
        ("call_function", "sum_1", aten.add.Tensor),
        ("call_function", "y", aten.relu.default),
        ("output", "output", "output"),
    ]
    assert written(graph) == relu()


def test_a_graph_that_was_read_computes() -> None:
    module = fx.GraphModule({"scale": torch.tensor(-0.5)}, read(relu()))
    (y,) = module(X)
    assert torch.equal(y, (X - 0.5).relu())


def _everything(m: Any, x: Tensor) -> Any:
    first, second = torch.split(x, [1, 2], dim=1)
    ramp = torch.arange(0, 1, 0.5, dtype=torch.float64, device=x.device)
    return torch.cat([second, first], 1), torch.nn.functional.gelu(x, approximate="tanh"), ramp, x.half()


def test_lists_numbers_words_dtypes_and_devices_come_back_as_arguments() -> None:
    graph = program_of(Model(_everything), X).graph.graph
    results = [node.name for node in graph.output_node().all_input_nodes]
    again = read_graph(written(graph), results, set(), CPU, "file")
    assert text_of(again) == text_of(graph)
    assert written(again) == written(graph)
    assert operator.getitem in [node.target for node in again.nodes]


def test_a_tuple_comes_back_as_a_tuple_and_a_list_as_a_list() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.sum.dim_IntList, ((x), (0, 1)))
    graph.output((y,))
    (_, call) = written(graph)
    assert call["args"] == [{"node": "x"}, {"tuple": [0, 1]}]
    again = read([{"input": "x"}, call], [call["call"]], set())
    assert next(calls_of(again)).args[1] == (0, 1)


def calls_of(graph: fx.Graph) -> Any:
    return (node for node in graph.nodes if node.op == "call_function")


def test_a_call_that_keeps_full_precision_is_marked_and_comes_back_so() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.linear(x)
        with torch.autocast("cpu", enabled=False):
            return y.float().exp()

    program = program_of(Model(forward, linear=nn.Linear(3, 3)), X)
    kinds = {node.target: FULL_PRECISION in node.meta for node in calls(program.graph)}
    assert kinds[aten.exp.default]
    nodes = written(program.graph.graph)
    (exp,) = [node for node in nodes if node.get("operator") == "aten.exp.default"]
    assert next(iter(exp)) == "call in fp32"
    weights = {node["of"] for node in nodes if "of" in node}
    again = read_graph(nodes, [exp["call in fp32"]], weights, CPU, "file")
    assert {node.target: FULL_PRECISION in node.meta for node in calls_of(again)} == kinds


def _with(target: Any) -> fx.Graph:
    graph = fx.Graph()
    graph.output((graph.call_function(target, (graph.placeholder("x"),)),))
    return graph


def test_what_is_no_operator_of_aten_is_not_written() -> None:
    with pytest.raises(ExportError, match=r"^file, node 'sin': a file cannot hold .*sin.*: "):
        write_nodes(_with(torch.sin), CPU, "file")
    graph = fx.Graph()
    graph.output((graph.call_method("relu", (graph.placeholder("x"),)),))
    with pytest.raises(ExportError, match="node 'relu': a file holds calls of operators only, not"):
        write_nodes(graph, CPU, "file")


def test_a_value_that_a_file_cannot_hold_is_not_written() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(aten.add.Scalar, (graph.placeholder("x"), 1j)),))
    with pytest.raises(ExportError, match=r"^file, node 'add_scalar': a file cannot hold 1j, a complex"):
        write_nodes(graph, CPU, "file")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operator": "os.system"}, "has no ATen operator 'os.system'"),
        ({"operator": "aten.relu_.default"}, "the operator aten.relu_.default is not allowed: "),
        ({"operator": None}, "expected a string"),
        ({"args": {"x": 1}}, "expected an array"),
        ({"args": [{"node": "z"}]}, "no node before it is called 'z'"),
        ({"args": [{"node": "y"}]}, "no node before it is called 'y'"),
        ({"args": ["a#b"]}, "no operator takes the string 'a#b'"),
        (
            {"operator": "aten.dropout.default", "args": [{"node": "sum_1"}, {"float": 0.5}, True]},
            "the operator aten.dropout.default cannot be called like this: ",
        ),
        ({"args": [[[[[1]]]]]}, "no operator takes lists nested as deep as this"),
        ({"kwargs": []}, "expected an object of keyword arguments"),
        ({"kwargs": {"self": 1, "eval": 2}}, "aten.relu.default has no argument 'eval'"),
        ({"call": "sum_1"}, "the name 'sum_1' is taken"),
        ({"call": "self"}, "'self' is not a name"),
        ({"call": "class"}, "'class' is not a name"),
        ({"call": "__import__"}, "'__import__' is not a name"),
        ({"call": "a b"}, "'a b' is not a name"),
        ({"call": 3}, "3 is not a name"),
        ({"more": 1}, "expected an object of call, operator, args, kwargs"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_with_its_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError) as caught:
        read(relu(**changes))
    assert str(caught.value).startswith("file, node ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "weights", "message"),
    [
        ({}, {"scale"}, "file, nodes: expected an array"),
        ([3], set(), "file, node 0: expected an object"),
        ([{"weight": "w", "of": "other"}], {"scale"}, "file, node 0: there is no weight 'other'"),
        ([{"weight": "w", "of": "forward"}], {"forward"}, "a weight cannot be called 'forward'"),
        (relu(), {"scale", "more"}, "file, weights: 'more' is read by no node"),
        (relu(), {"scale", "more"}, "the bundle is damaged"),
    ],
)
def test_inputs_and_weights_that_do_not_fit_are_refused(nodes: Any, weights: set[str], message: str) -> None:
    with pytest.raises(BundleError) as caught:
        read(nodes, weights=weights)
    assert message in str(caught.value)


@pytest.mark.parametrize("result", ["z", 3, None, {"node": "y"}])
def test_a_result_is_the_name_of_a_node(result: Any) -> None:
    with pytest.raises(BundleError, match=r"^file, outputs: no node before it is called"):
        read(relu(), [result])


def test_a_name_that_fx_would_change_is_refused() -> None:
    with pytest.raises(BundleError, match="the name 'print' is taken"):
        read(relu(call="print"), ["print"])


def test_a_graph_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_graph, "MOST_NODES", 4)
    read(relu())
    more = [*relu(), {"call": "z", "operator": "aten.relu.default", "args": [{"node": "y"}], "kwargs": {}}]
    with pytest.raises(BundleError, match=r"^file, nodes: more than 4 nodes"):
        read(more, ["z"])
