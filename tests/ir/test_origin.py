"""Provenance: every node of a captured program says where it comes from, and rewrites carry it on."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ampopt.engines.onnx_graph import to_onnx
from ampopt.errors import CaptureError, ExportError
from ampopt.ir.graph import (
    add_constant,
    add_rounded,
    aten,
    calls,
    copy_of,
    finish,
    insert_call,
    only_user,
    replace,
    where,
)
from ampopt.ir.origin import WHOLE_MODEL, Origin, carry_on, origins_of, place_of
from ampopt.ir.program import Program
from ampopt.passes import BakeAutocast, FoldConstants, FoldConvBn, MergeLinearChain
from tests.helpers import BF16, Model, check_origins, program_of, with_statistics

X = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def line_of(function: Callable[..., Any], after: int = 1) -> str:
    """The line that stands so many lines below a function's first."""
    return f"test_origin.py:{function.__code__.co_firstlineno + after}"


def places(program: Program) -> dict[str, str]:
    """Where every call and weight comes from, in words, by its name."""
    return {
        node.name: place_of(node)
        for node in program.graph.graph.nodes
        if node.op in ("call_function", "get_attr")
    }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stem:
            x = block(x)
        return torch.sigmoid(x)


IN_BLOCK, IN_NET = line_of(Block.forward), line_of(Net.forward, 3)


def test_calls_know_their_module_and_the_users_line_and_weights_those_of_their_readers() -> None:
    program = program_of(Net(), X)
    found = places(program)
    assert found["conv2d_1"] == f"stem.1.conv, {IN_BLOCK}"
    assert found["batch_norm"] == f"stem.0.norm, {IN_BLOCK}"
    assert found["relu"] == f"stem.0, {IN_BLOCK}"
    assert found["sigmoid"] == IN_NET
    assert found["p_stem_0_conv_weight"] == f"stem.0.conv, {IN_BLOCK}"
    assert all(found.values())
    assert set.union(*[set(node.meta) for node in program.graph.graph.nodes]) == {"origins"}


def test_a_layer_of_pytorchs_alone_has_a_module_and_no_line() -> None:
    program = program_of(nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh())), X)
    assert [origins_of(node) for node in calls(program.graph)] == [(Origin("0", ""),), (Origin("1.0", ""),)]


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.conv(x))
        return self.conv(y)  # type: ignore[no-any-return]


def test_each_call_of_a_shared_module_has_its_own_line_and_the_weight_all_of_them() -> None:
    found = places(program_of(Twice(), X))
    first, second = line_of(Twice.forward), line_of(Twice.forward, 2)
    assert (found["conv2d"], found["conv2d_1"]) == (f"conv, {first}", f"conv, {second}")
    assert found["p_conv_weight"] == f"conv, {first}; conv, {second}"
    assert found["tanh"] == first


class Counter(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * self.seen


def test_what_is_written_to_a_state_has_its_line_and_inputs_come_from_the_whole_model() -> None:
    program = program_of(nn.Sequential(Counter()), X)
    found = places(program)
    assert found["add_"] == f"0, {line_of(Counter.forward)}"
    assert found["mul"] == f"0, {line_of(Counter.forward, 2)}"
    inputs = program.graph.graph.find_nodes(op="placeholder")
    assert [origins_of(node) for node in inputs] == [(WHOLE_MODEL,)] * 2


class OwnAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.sigmoid(self.block.conv(x))


class WritesBefore(OwnAutocast):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y[:, 0] += 1
        return super().forward(y)


def test_calls_in_a_block_under_the_models_own_autocast_know_theirs() -> None:
    found, line = places(program_of(OwnAutocast(), X)), line_of(OwnAutocast.forward, 2)
    assert (found["conv2d"], found["sigmoid"]) == (f"block.conv, {line}", line)
    assert found["p_block_conv_weight"] == f"block.conv, {line}"


def test_in_a_decomposed_graph_every_node_has_its_line_and_a_blocks_nodes_the_blocks() -> None:
    program = program_of(WritesBefore(), X)
    found, block = places(program), line_of(OwnAutocast.forward, 2)
    assert aten.select_scatter.default in {node.target for node in calls(program.graph)}
    assert found["mul"] == line_of(WritesBefore.forward)
    assert found["select_scatter"] == line_of(WritesBefore.forward, 2)
    assert found["sigmoid"] == found["conv2d"] == f"block.conv, {block}; {block}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, X)])
def test_of_a_torchscript_model_nothing_is_known_but_that_it_is_the_whole(make: Callable[..., Any]) -> None:
    program = program_of(make(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()).eval()), X)
    assert {origins_of(node) for node in program.graph.graph.nodes if node.op != "output"} == {(WHOLE_MODEL,)}
    assert [where(node) for node in calls(program.graph)] == [node.name for node in calls(program.graph)]


class GivesAway(nn.Module):
    unread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.register_buffer("unread", torch.ones(1))

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        return self.conv(x), x, self.conv.weight, self.unread


def test_results_that_are_inputs_or_weights_are_copied_where_these_come_from() -> None:
    program = program_of(GivesAway(), X)
    copies = [origins_of(node) for node in calls(program.graph, [aten.clone.default])]
    assert copies == [(WHOLE_MODEL,), (Origin("conv", line_of(GivesAway.forward)),), (WHOLE_MODEL,)]


class WritesToOverlaps(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        y.unfold(2, 3, 1).mul_(2)
        return y


def test_an_error_of_the_capture_names_the_place() -> None:
    with pytest.raises(CaptureError, match=rf"share memory: mul_ \({line_of(WritesToOverlaps.forward, 2)}\)"):
        program_of(WritesToOverlaps(), X)


class Bessel(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.expm1(self.conv(x))
        z: Tensor = torch.special.i1(y)
        return z


def test_an_error_of_the_onnx_exporter_names_the_place() -> None:
    program = program_of(nn.Sequential(Bessel()), X)
    options: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"], "dims": ({},)}
    with pytest.raises(ExportError, match=rf"bessel_i1 \(0, {line_of(Bessel.forward, 2)}\)"):
        to_onnx(program, io=None, target="onnxruntime", **options)


def _chain() -> fx.GraphModule:
    """conv, add, relu of an input, each from a module of its name; the weight as the convolution."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("w")
    conv = graph.call_function(aten.conv2d.default, (x, weight))
    add = graph.call_function(aten.add.Tensor, (conv, x))
    relu = graph.call_function(aten.relu.default, (add,))
    graph.output((relu,))
    for node, module in ((weight, "conv"), (conv, "conv"), (add, "add"), (relu, "relu")):
        node.meta["origins"] = (Origin(module, ""),)
    return fx.GraphModule({"w": torch.ones(3, 3, 1, 1)}, graph)


def test_what_takes_the_place_of_a_chain_comes_from_all_its_parts_in_order() -> None:
    module = _chain()
    relu = next(calls(module, [aten.relu.default]))
    conv = next(calls(module, [aten.conv2d.default]))
    fused = insert_call(module, relu, aten.conv2d.default, *conv.args)
    replace(relu, fused)
    assert place_of(fused) == "conv; add; relu"
    finish(module)


def test_what_others_still_read_is_no_part_of_what_takes_a_place() -> None:
    module = _chain()
    relu = next(calls(module, [aten.relu.default]))
    conv = next(calls(module, [aten.conv2d.default]))
    module.graph.output_node().args = ((relu, conv),)
    fused = insert_call(module, relu, aten.neg.default, *conv.args[:1])
    replace(relu, fused)
    assert place_of(fused) == "add; relu"


def test_a_new_weight_comes_from_its_reader_and_that_ones_weights() -> None:
    module = _chain()
    conv = next(calls(module, [aten.conv2d.default]))
    conv.all_input_nodes[1].meta["origins"] = (Origin("parametrization", ""),)
    assert place_of(add_constant(module, "new", torch.ones(1), conv)) == "conv; parametrization"
    assert place_of(add_rounded(module, "new", torch.ones(1), torch.float16, conv)) == "conv; parametrization"


def test_what_is_added_at_the_end_comes_from_what_it_reads() -> None:
    module = _chain()
    output, conv = module.graph.output_node(), next(calls(module, [aten.conv2d.default]))
    both = insert_call(module, output, aten.sub.Tensor, conv, only_user(conv))
    assert place_of(both) == "conv; add"


def test_a_node_of_many_origins_names_the_first_few() -> None:
    node = next(calls(_chain()))
    node.meta["origins"] = tuple(Origin(name, "a.py:1") for name in "abcde")
    assert where(node) == "conv2d_default (a, a.py:1; b, a.py:1; c, a.py:1; and 2 more)"
    carry_on(node, node, node)
    assert len(origins_of(node)) == 5


def test_copies_of_a_graph_have_its_origins_and_change_them_alone() -> None:
    module = _chain()
    copied = copy_of(module)
    carry_on(next(calls(copied)), *copied.graph.nodes)
    assert place_of(next(calls(module))) == "conv"
    assert place_of(next(calls(copied))) == "conv; add; relu"
    origin = Origin("a", "b.py:1")
    assert pickle.loads(pickle.dumps(origin)) == origin


def test_a_folded_layer_and_its_weights_come_from_both() -> None:
    program = program_of(with_statistics(Net()), X)
    folded = FoldConvBn().apply(program).program
    both = f"stem.0.conv, {IN_BLOCK}; stem.0.norm, {IN_BLOCK}"
    found = places(folded)
    assert [found[name] for name in ("conv2d", "batch_norm_weight", "batch_norm_bias")] == [both] * 3
    check_origins(program, folded)


def test_merged_layers_and_weights_computed_beforehand_come_from_all_that_made_them() -> None:
    a = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    program = program_of(Model(lambda m, x: m.b(m.a(x)), a=a, b=nn.Linear(6, 6)), X)
    constant = FoldConstants().apply(program).program
    merged = MergeLinearChain().apply(constant).program
    check_origins(program, merged)
    (linear,) = calls(merged.graph)
    assert [origin.module for origin in origins_of(linear)] == ["a", "b", "a.parametrizations.weight.0"]


def test_casts_of_weights_come_from_the_weights_and_those_of_results_from_who_wants_them() -> None:
    program = program_of(Net(), X, lane=BF16)
    baked = BakeAutocast().apply(program).program
    check_origins(program, baked)
    found = places(baked)
    assert found["p_stem_1_conv_weight_bfloat16"] == f"stem.1.conv, {IN_BLOCK}"
