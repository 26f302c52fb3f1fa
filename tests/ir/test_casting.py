"""Policies of mixed precision decide for each call; what is recurrent or taken out of autocast is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.ir.casting import POLICIES, decide, own_dtype, record_autocast, result_dtypes, stays_in_fp32
from ampopt.ir.graph import aten, calls, constant
from ampopt.ir.own_autocast import FULL_PRECISION
from ampopt.ir.program import Program
from tests.helpers import Model, program_of

LOW, WIDE = torch.bfloat16, torch.float32
IMAGE, ROWS = torch.randn(1, 3, 8, 8), torch.randn(2, 6)


def wanted(program: Program, policy: str) -> dict[str, set[torch.dtype]]:
    """For each operator by its name: the dtypes that a policy wants its inputs cast to."""
    found = decide(policy, program, program.graph, LOW)
    return {str(node.target).split(".")[1]: set(inputs.values()) for node, inputs in found.items()}


def _net(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.conv(x)).relu()
    return torch.softmax(m.linear(y.mean((2, 3))), -1).exp()


@pytest.fixture
def program() -> Program:
    """A convolution, a norm, an activation, a linear layer, a softmax and an exponential."""
    members = {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "linear": nn.Linear(4, 5)}
    return program_of(Model(_net, **members).eval(), IMAGE)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("amp", {"conv2d": {LOW}, "batch_norm": set(), "relu": set(), "linear": {LOW}}),
        ("O1", {"conv2d": {LOW}, "batch_norm": set(), "linear": {LOW}, "softmax": {WIDE}, "exp": set()}),
        ("O2", {"conv2d": {LOW}, "batch_norm": {WIDE}, "relu": {LOW}, "linear": {LOW}, "softmax": set()}),
        ("half", {"conv2d": {LOW}, "batch_norm": {LOW}, "relu": set(), "softmax": set(), "exp": set()}),
    ],
)
def test_each_policy_casts_what_it_lists(
    policy: str, expected: dict[str, set[torch.dtype]], program: Program
) -> None:
    found = wanted(program, policy)
    assert {name: found[name] for name in expected} == expected


def test_a_decision_names_the_inputs_that_change_and_no_others(program: Program) -> None:
    (conv,), (linear,) = (calls(program.graph, [kind]) for kind in (aten.conv2d.default, aten.linear.default))
    decisions = decide("O1", program, program.graph, LOW)
    assert decisions[conv] == dict.fromkeys(conv.all_input_nodes, LOW)
    assert decisions[linear] == dict.fromkeys(linear.all_input_nodes[1:], LOW)  # its input is low already
    assert set(decisions) == set(calls(program.graph))


def test_the_policy_amp_is_what_autocast_itself_does(program: Program) -> None:
    decisions, dtypes = record_autocast(program, program.graph, LOW)
    assert decisions == decide("amp", program, program.graph, LOW)
    seen: dict[str, torch.dtype] = {}
    with torch.no_grad(), torch.autocast("cpu", LOW, cache_enabled=False):
        seen["conv2d"] = F.conv2d(IMAGE, torch.randn(4, 3, 3, 3)).dtype
        seen["softmax"] = torch.softmax(torch.randn(2, 3, dtype=LOW), -1).dtype
    by_name = {node.name: dtype for node, dtype in dtypes.items()}
    assert {name: by_name[name] for name in seen} == seen
    assert seen["conv2d"] is LOW


def test_without_autocast_every_result_has_the_dtype_that_the_graph_gives_it(program: Program) -> None:
    assert set(result_dtypes(program, program.graph).values()) == {WIDE}


def test_inputs_of_several_dtypes_go_to_the_widest_under_o1() -> None:
    model = Model(lambda m, x: m.linear(x) + x[:, :4], linear=nn.Linear(6, 4))
    assert wanted(program_of(model, ROWS), "O1")["add"] == {WIDE}


def test_casts_of_the_models_own_are_nobodys_business() -> None:
    model = Model(lambda m, x: m.linear(x.double().float()).double(), linear=nn.Linear(6, 4))
    program = program_of(model, ROWS)
    casts = [n for n in calls(program.graph) if n.target in (aten._to_copy.default, aten.to.dtype)]
    assert len(casts) == 3
    for policy in POLICIES:
        decisions = decide(policy, program, program.graph, LOW)
        assert [decisions[cast] for cast in casts] == [{}, {}, {}]
        (linear,) = calls(program.graph, [aten.linear.default])
        assert LOW in decisions[linear].values()


def _upcast(m: Any, x: Tensor) -> Tensor:
    y = m.outer(x)
    wide = y.float()
    scaled = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
    back = m.scale * scaled.to(y.dtype)
    largest, _ = back.float().max(-1, keepdim=True)
    return m.inner(back * 2) + largest  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", ["O2", "half"])
def test_what_the_model_casts_to_fp32_is_computed_in_it_until_it_is_cast_back(policy: str) -> None:
    model = Model(_upcast, outer=nn.Linear(6, 4), scale=torch.ones(4), inner=nn.Linear(4, 4))
    program = program_of(model.eval(), ROWS)
    decisions = decide(policy, program, program.graph, LOW)
    named = {node.name: set(decisions[node].values()) for node in calls(program.graph)}
    assert LOW not in named["mul"] | named["mean"] | named["rsqrt"] | named["mul_1"]
    assert named["mul_2"] == named["linear"] == {LOW}
    assert LOW in named["linear_1"]
    assert named["max_1"] == set()
    assert named["add_1"] == {WIDE}


@pytest.mark.parametrize("policy", ["O2", "half"])
def test_products_stay_wide_where_all_that_they_multiply_is(policy: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.linear(x)
        gram = y.float() @ y.float().mT
        return (gram / gram.abs().max()) @ m.linear(x)  # type: ignore[no-any-return]

    program = program_of(Model(forward, linear=nn.Linear(6, 4)).eval(), ROWS)
    first, second = calls(program.graph, [aten.matmul.default])
    decisions = decide(policy, program, program.graph, LOW)
    assert decisions[first] == {}
    assert set(decisions[second].values()) == {LOW}


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(6, 4),
    "gru": lambda: nn.GRU(6, 4),
    "rnn_tanh": lambda: nn.RNN(6, 4),
    "rnn_relu": lambda: nn.RNN(6, 4, nonlinearity="relu"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_stay_in_the_dtype_of_their_weights(name: str, policy: str) -> None:
    program = program_of(RECURRENT[name](), ROWS)
    (layer,) = [node for node in calls(program.graph) if f"aten.{name}." in str(node.target)]
    assert stays_in_fp32(layer)
    assert own_dtype(program.graph, layer) is WIDE
    assert LOW not in decide(policy, program, program.graph, LOW)[layer].values()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_model_takes_out_of_autocast_stays_out(policy: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.outer(x)
        with torch.autocast("cpu", enabled=False):
            return m.inner(y.float())  # type: ignore[no-any-return]

    program = program_of(Model(forward, inner=nn.Linear(4, 3), outer=nn.Linear(6, 4)), ROWS)
    inner, outer = sorted(
        calls(program.graph, [aten.linear.default]), key=lambda n: FULL_PRECISION not in n.meta
    )
    assert stays_in_fp32(inner)
    assert not stays_in_fp32(outer)
    decisions = decide(policy, program, program.graph, LOW)
    assert LOW not in decisions[inner].values()
    assert LOW in decisions[outer].values()


def test_weights_of_one_lower_dtype_are_what_a_call_computes_in() -> None:
    program = program_of(nn.LSTM(6, 4).bfloat16(), ROWS.bfloat16())
    (layer,) = [node for node in calls(program.graph) if stays_in_fp32(node)]
    assert own_dtype(program.graph, layer) is torch.bfloat16
    weight = next(source for source in layer.all_input_nodes if source.op == "get_attr")
    tensor = constant(program.graph, weight)
    assert tensor is not None
    setattr(program.graph, str(weight.target), tensor.float())
    assert own_dtype(program.graph, layer) is WIDE  # they disagree


def test_an_unknown_policy_is_no_policy(program: Program) -> None:
    with pytest.raises(KeyError, match="O3"):
        decide("O3", program, program.graph, LOW)
