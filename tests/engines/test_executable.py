"""What runs a program, and what answers its calls of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.engines import executable as module
from ampopt.engines.executable import executable, quick
from ampopt.engines.onnx_engine import OnnxEngine
from ampopt.errors import PassError
from ampopt.ir.program import Border, Program
from tests.helpers import program_of

IMAGE = torch.arange(24.0).reshape(1, 2, 3, 4)


class FakeGraph:
    """Stands for a captured graph and remembers what it was asked."""

    def __init__(self, program: Program, *, outputs: str) -> None:
        self.program, self.outputs = program, outputs
        self.examples = list[Tensor]()

    def quick(self, example: Tensor) -> str:
        self.examples.append(example)
        return "the graph's own"


class FakeEngine(OnnxEngine):
    """An engine that adds 1 in a whole call, and 2 by its quicker way."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtypes = (dtype,)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (tensors[0] + 1,)

    def quick(
        self, example: Tensor, otherwise: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> Callable[[Tensor], tuple[Tensor, ...]]:
        assert torch.equal(otherwise(example)[0], example + 1)
        return lambda tensor: (tensor + 2,)


def added(program: Program, x: Tensor) -> float:
    """What the quick way of a program with a `FakeEngine` adds."""
    answer = quick(program, program.run, x)(torch.is_tensor, lambda tensors: tensors[0])
    return float((answer(x) - x).mean())


@pytest.fixture
def program() -> Program:
    return program_of(nn.ReLU(), IMAGE)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CapturedGraph", FakeGraph)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("outputs", ["copy", "static"])
def test_a_program_that_asks_for_no_graph_is_run_as_it_is(program: Program, outputs: Any) -> None:
    run = executable(program, outputs=outputs)
    assert run == program.run
    (found,) = run(-IMAGE + 3)
    assert torch.equal(found, (-IMAGE + 3).relu())


@pytest.mark.usefixtures("graphs")
def test_a_program_that_asks_for_a_graph_is_captured_with_the_outputs_that_are_wanted(
    program: Program,
) -> None:
    program = program.replace(cuda_graph=True)
    found: list[Any] = [executable(program), executable(program, outputs="static")]
    assert [type(graph) for graph in found] == [FakeGraph, FakeGraph]
    assert [graph.outputs for graph in found] == ["copy", "static"]
    assert all(graph.program is program for graph in found)


def test_a_capture_that_fails_raises(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise PassError("no graph")

    monkeypatch.setattr(module, "CapturedGraph", fails)
    with pytest.raises(PassError, match="no graph"):
        executable(program.replace(cuda_graph=True))


@pytest.mark.usefixtures("graphs")
def test_a_captured_graph_has_a_quick_way_of_its_own(program: Program) -> None:
    program = program.replace(cuda_graph=True, engine=FakeEngine())
    graph: Any = executable(program)
    found: object = quick(program, graph, IMAGE)
    assert found == "the graph's own"
    assert len(graph.examples) == 1
    assert graph.examples[0] is IMAGE


@pytest.mark.parametrize("engine", [None, lambda x: (x.relu(),)])
def test_other_programs_answer_what_is_recognized_by_a_whole_call_and_refuse_the_rest(
    program: Program, engine: Any
) -> None:
    ran = list[Tensor]()

    def run(tensor: Tensor) -> tuple[Tensor, ...]:
        ran.append(tensor)
        return program.run(tensor)

    answer = quick(program.replace(engine=engine), run, IMAGE)(
        lambda thing: thing is IMAGE, lambda outputs: {"restored": outputs}
    )
    assert answer(IMAGE.clone()) is NotImplemented
    assert answer(None) is NotImplemented
    assert ran == []
    assert torch.equal(answer(IMAGE)["restored"][0], IMAGE.relu())
    assert len(ran) == 1
    assert ran[0] is IMAGE


def test_an_engine_has_a_quicker_way_where_nothing_is_converted(program: Program) -> None:
    program = program.replace(engine=FakeEngine())
    assert added(program, IMAGE) == 2
    wide = Border(torch.float64)
    assert added(program.replace(entry=(wide,), exit=(wide,)), IMAGE.double()) == 1
    wide_engine = program.replace(entry=(wide,), exit=(wide,), engine=FakeEngine(torch.float64))
    assert added(wide_engine, IMAGE.double()) == 2


@pytest.mark.parametrize("example", [IMAGE.double(), IMAGE.to(memory_format=torch.channels_last)])
def test_an_engine_is_called_whole_where_its_input_is_converted(program: Program, example: Tensor) -> None:
    assert added(program.replace(engine=FakeEngine()), example) == 1


@pytest.mark.parametrize(
    "border", [Border(torch.float64), Border(torch.float32, memory_format=torch.channels_last)]
)
def test_an_engine_is_called_whole_where_its_output_is_converted(program: Program, border: Border) -> None:
    assert added(program.replace(engine=FakeEngine(), exit=(border,)), IMAGE) == 1
