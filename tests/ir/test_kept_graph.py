"""A graph that a pass of another package changed in place is put back, and the pass fails."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from ampopt.errors import PassError
from ampopt.ir.graph import add_constant, aten, calls, copy_of, finish, insert_call
from ampopt.ir.kept_graph import KeptGraph
from ampopt.ir.origin import Origin, origins_of
from ampopt.ir.own_autocast import FULL_PRECISION
from ampopt.ir.program import Program
from tests.helpers import program_of, text_of, with_statistics
from tests.support.planted import Doing


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.ReLU())
    return with_statistics(layers)


def the_relu(program: Program) -> fx.Node:
    return next(calls(program.graph, [aten.relu.default]))


def _bypass(program: Program) -> None:
    the_relu(program).replace_all_uses_with(the_relu(program).all_input_nodes[0])


def _remove(program: Program) -> None:
    _bypass(program)
    finish(program.graph)


def _retarget(program: Program) -> None:
    the_relu(program).target = aten.tanh.default
    program.graph.recompile()


def _retarget_in_code_alone(program: Program) -> None:
    relu = the_relu(program)
    before, relu.target = relu.target, aten.tanh.default
    program.graph.recompile()
    relu.target = before


def _set_number(program: Program) -> None:
    (norm,) = calls(program.graph, [aten.batch_norm.default])
    norm.args = tuple(1.0 if value == 1e-5 else value for value in norm.args)
    program.graph.recompile()


def _set_type(program: Program) -> None:
    (norm,) = calls(program.graph, [aten.batch_norm.default])
    norm.args = tuple(0 if value is False else value for value in norm.args)


def _append(program: Program) -> None:
    insert_call(program.graph, the_relu(program), aten.tanh.default, the_relu(program).args[0])


def _new_graph(program: Program) -> None:
    graph = copy.deepcopy(program.graph.graph)
    program.graph.graph = graph
    _bypass(program)


def _new_weight(program: Program) -> None:
    add_constant(program.graph, "w", torch.ones(2), the_relu(program))


def _other_weight(program: Program) -> None:
    name = next(name for name, _ in program.graph.named_buffers())
    setattr(program.graph, name, torch.zeros(4, 3, 3, 3))


def _no_weight(program: Program) -> None:
    delattr(program.graph, next(name for name, _ in program.graph.named_buffers()))


def _new_submodule(program: Program) -> None:
    program.graph.add_module("extra", nn.ReLU())


def _patch_forward(program: Program) -> None:
    program.graph.forward = lambda x: (x,)


def _hook(program: Program) -> None:
    program.graph.register_forward_hook(lambda module, args, result: tuple(r * 2 for r in result))


def _set_meta(key: str, value: object) -> Callable[[Program], None]:
    def edit(program: Program) -> None:
        the_relu(program).meta[key] = value

    return edit


CHANGES: dict[str, tuple[Callable[[Program], None], str]] = {
    "a reader": (_bypass, "conv2d_1"),
    "fewer nodes": (_remove, "relu"),
    "an operator": (_retarget, "relu"),
    "its code": (_retarget_in_code_alone, "its code"),
    "a number": (_set_number, "batch_norm"),
    "a number's type": (_set_type, "batch_norm"),
    "more nodes": (_append, "relu"),
    "another graph": (_new_graph, "conv2d_1"),
    "a new weight": (_new_weight, "w"),
    "another weight": (_other_weight, "p_0_weight"),
    "no weight": (_no_weight, "p_0_weight"),
    "a submodule": (_new_submodule, "extra"),
    "its forward": (_patch_forward, "forward"),
    "a hook": (_hook, "_forward_hooks"),
    "an exact weight": (_set_meta("exact", torch.zeros(1)), "relu"),
    "origins": (_set_meta("origins", (Origin("elsewhere", ""),)), "relu"),
    "full precision": (_set_meta(FULL_PRECISION, True), "relu"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_a_changed_graph_is_put_back_and_the_pass_fails(name: str, fails: bool) -> None:
    edit, place = CHANGES[name]
    program = program_of(net(), torch.randn(1, 3, 8, 8))
    before, text, state = program.run(*program.examples), text_of(program), _state(program)

    def edit_and_fail(given: Program) -> None:
        edit(given)
        raise ValueError("half-way")

    said = f"it changed the graph that it was given: edit a copy .*; the first change was at .*{place}"
    with pytest.raises(PassError, match=said):
        Doing(edit_and_fail if fails else edit).apply(program)
    assert text_of(program) == text
    assert _state(program) == state
    assert all(map(torch.equal, program.run(*program.examples), before))
    Doing(lambda given: None).apply(program)  # nothing is left to be told
    program.graph.graph.lint()


def _state(program: Program) -> list[object]:
    nodes = [(origins_of(node), set(node.meta)) for node in program.graph.graph.nodes]
    names = [name for name, _ in program.graph.named_modules()]
    return [nodes, names, {name: id(tensor) for name, tensor in program.graph.named_buffers()}]


ALLOWED: dict[str, Callable[[Program], object]] = {
    "an edited copy": lambda program: _remove(program.with_graph(copy_of(program.graph))),
    "a run": lambda program: program.run(*program.examples),
    "finish": lambda program: finish(program.graph),
    "shapes": lambda program: ShapeProp(program.graph).propagate(*program.examples),
    "tracing": lambda program: torch.jit.trace(program.graph, program.examples),
    "torch.compile": lambda program: torch.compile(program.graph, backend="eager")(*program.examples),
    "eval": lambda program: program.graph.eval(),
    "an equal graph": lambda program: setattr(program.graph, "graph", copy.deepcopy(program.graph.graph)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_leaves_the_graph_as_it_is_is_allowed(name: str) -> None:
    program = program_of(net(), torch.randn(1, 3, 8, 8))
    text, state = text_of(program), _state(program)
    Doing(ALLOWED[name]).apply(program)
    assert text_of(program) == text
    assert _state(program) == state, "what helpers note in meta does not stay"


def test_a_block_in_a_graph_is_put_back() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.relu(x) + 1

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x) * 2

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return True

    outer = Outer()
    outer.add_module("inner", fx.symbolic_trace(outer.inner))
    module, x = fx.GraphModule(outer, Tracer().trace(outer)), torch.randn(3)
    kept, before = KeptGraph(module), module(x)
    inner = copy_of(module).get_submodule("inner")  # copies of a graph share its blocks
    assert isinstance(inner, fx.GraphModule)
    (relu,) = inner.graph.find_nodes(op="call_function", target=torch.relu)
    relu.replace_all_uses_with(relu.args[0])
    inner.recompile()
    assert not torch.equal(module(x), before)
    assert kept.put_back() == "inner.add"
    assert torch.equal(module(x), before)
    assert kept.put_back() is None
