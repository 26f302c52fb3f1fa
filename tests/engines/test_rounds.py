"""rounds: an unrolled loop is compiled once, and what is no loop is left as it is."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx, nn

from ampopt.diagnosis.own_program import own_kernels
from ampopt.engines.cuts import LEAST_CALLS
from ampopt.engines.divided import Chain
from ampopt.engines.rounds import calls_once, form, in_rounds, is_unrolled
from ampopt.ir.graph import aten, calls
from ampopt.ir.lanes import FP32
from ampopt.ir.program import Program
from ampopt.ir.transform import Rehearsed, replay
from ampopt.ir.unmarked import bytes_of
from ampopt.passes import ChannelsLast, Compile, FoldConstants, RemoveInferenceNoops
from ampopt.search.openings import COMPILED_ON_CPU, OPENINGS, opening_of
from tests.helpers import program_of
from tests.support.loops import Loop, copied, eight, image
from tests.support.planted import captured_of


def in_order(program: Program, count: int = 1) -> Chain:
    division = in_rounds(program, count)
    assert division is not None
    return Chain(division, [piece.graph for piece in division.programs])


def check(program: Program, count: int = 1) -> None:
    with torch.no_grad():
        for x in (image(), image() * 3 - 1):
            x = x.to(program.device)
            for one, other in zip(program.graph(x), in_order(program, count)(x), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_rounds_of_a_loop_share_a_program_that_gives_what_the_whole_gives() -> None:
    program = copied(eight)
    division = in_rounds(program)
    assert division is not None
    assert len(division.programs) < 5 <= len(division.pieces)
    assert max(division.kinds.count(kind) for kind in division.kinds) >= 6
    assert sum(1 for piece in division.programs for _ in calls(piece.graph)) < 0.5 * len(
        [*calls(program.graph)]
    )
    check(program)


class Prepared(Loop):
    """Has much to compute before its loop."""

    def __init__(self) -> None:
        super().__init__(8)
        self.before = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(44))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        for conv in self.before:
            x = x + conv(x).tanh()
        return super().forward(x)


def test_what_is_before_the_loop_is_divided_for_several_compilers() -> None:
    program = copied(Prepared)
    one, several = in_rounds(program), in_rounds(program, 4)
    assert one is not None
    assert several is not None
    assert len(several.programs) == len(one.programs) + 2
    assert in_rounds(program, 4) is several
    sizes = [sum(1 for _ in calls(piece.graph)) for piece in several.programs]
    whole = max(sum(1 for _ in calls(piece.graph)) for piece in one.programs)
    assert max(sizes) < 0.5 * whole
    again = in_rounds(program_of(Prepared(), image()), 4)
    assert again is not None
    assert [sum(1 for _ in calls(piece.graph)) for piece in again.programs] == sizes
    check(program, 4)
    assert [piece.graph for piece in Compile().divided(program, 4)] == [
        p.graph for p in one.programs
    ]  # a CPU


def test_before_a_loop_pieces_are_not_shorter_than_they_may_be() -> None:
    model = Prepared()
    model.before = model.before[:1]
    program = program_of(model, image())
    few, one = in_rounds(program, 4), in_rounds(program)
    assert few is not None
    assert one is not None
    sizes = [sum(1 for _ in calls(piece.graph)) for piece in few.programs]
    assert len(sizes) == len(one.programs)
    assert sizes[0] >= LEAST_CALLS


def test_rounds_on_other_devices_are_not_equal() -> None:
    """A number on the CPU and one on a GPU look the same but for that."""
    program = copied(eight)
    division = in_rounds(program)
    assert division is not None
    first, second = (division.pieces[at] for at in (2, 3))
    assert form(first) == form(second)
    moved = tuple(x.to("meta") for x in second.program.examples)
    assert form(first) != form(dataclasses.replace(second, program=second.program.replace(examples=moved)))


class TwoLoops(Loop):
    """Two loops: what is before the second one has a loop in it."""

    def __init__(self) -> None:
        super().__init__(8)
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        estimate = self.last(super().forward(x)[-1])
        for _ in range(5):
            for _ in range(9):
                estimate = estimate * 0.5 + (self.last(estimate) * x).sin() * 0.25
            estimate = estimate * 1.25
        return (estimate,)


def test_a_piece_with_rounds_of_its_own_is_compiled_as_a_whole() -> None:
    program = copied(TwoLoops)
    check(program)
    pieces = Compile().divided(program, 1)
    assert any(in_rounds(piece) for piece in pieces)
    assert [[*Compile().undivided().divided(piece, 4)] for piece in pieces] == [[piece] for piece in pieces]


def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """What is compiled from here on, which stays what it is."""
    compiled: list[fx.GraphModule] = []

    def compiles(_self: Compile, piece: Program, _: object) -> fx.GraphModule:
        compiled.append(piece.graph)
        return piece.graph

    monkeypatch.setattr(Compile, "_compile", compiles)
    return compiled


def lengths(graphs: Sequence[fx.GraphModule]) -> list[int]:
    return [sum(1 for _ in calls(graph)) for graph in graphs]


@pytest.mark.parametrize("model", [Prepared, TwoLoops])
@pytest.mark.parametrize("workers", [1, 3])
def test_what_was_divided_for_so_many_processes_is_put_together_and_replayed(
    monkeypatch: pytest.MonkeyPatch, model: Callable[[], nn.Module], workers: int
) -> None:
    """As on a GPU, without a compiler."""
    compiled = uncompiled(monkeypatch)

    def on_gpu() -> Program:
        return copied(model).replace(device=torch.device("cuda"))

    program, step = on_gpu(), Compile()
    sent = lengths([piece.graph for piece in step.divided(program, workers)])
    result = step.apply_beside(program, lambda: Rehearsed(None, (None,) * len(sent), workers))
    assert lengths(compiled) == sent
    with torch.no_grad():
        assert result.program.engine is not None
        for one, other in zip(result.program.engine(image()), program.graph(image()), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    again = result.replay
    assert isinstance(again, Compile)
    compiled.clear()
    second = again.apply(on_gpu())
    assert lengths(compiled) == sent
    assert second.replay == again
    compiled.clear()
    fewer = again.apply_beside(on_gpu(), lambda: Rehearsed(None, (None,) * len(sent), 1))
    assert lengths(compiled) == sent
    assert fewer.replay == again


class Solves(nn.Module):
    """Inverts what it has computed, in each round."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        estimate = self.first(x)
        for _ in range(5):
            for _ in range(10):
                estimate = estimate + (estimate * x).tanh() * 0.5
            rows = estimate.flatten(2)[0]
            estimate = torch.linalg.solve(rows @ rows.t(), rows).reshape(x.shape)
        return torch.as_tensor(estimate)


def test_the_examples_of_a_piece_are_what_it_gets() -> None:
    """Where others may be refused: a matrix of zeros has no inverse, and is none of the model's."""
    torch.manual_seed(0)
    program = program_of(Solves(), image())
    division = in_rounds(program)
    assert division is not None
    values = dict(zip(division.inputs, program.examples, strict=True))
    with torch.no_grad():
        for piece in division.pieces:
            for name, example in zip(piece.inputs, piece.program.examples, strict=True):
                torch.testing.assert_close(example, values[name], rtol=0, atol=0)
            values.update(zip(piece.outputs, piece.program.graph(*piece.program.examples), strict=True))
    check(program)


def test_what_no_later_step_reads_is_let_go() -> None:
    division = in_rounds(copied(eight))
    assert division is not None
    alive = list[weakref.ref[Tensor]]()
    most = 0

    def noting(function: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
        def call(*given: Tensor) -> Sequence[Tensor]:
            nonlocal most
            most = max(most, sum(each() is not None for each in alive))
            made = function(*given)
            alive.extend(weakref.ref(tensor) for tensor in made)
            return made

        return call

    with torch.no_grad():
        results = Chain(division, [noting(piece.graph) for piece in division.programs])(image())
    returned = {id(tensor) for tensor in results}
    assert len(alive) > len(returned) + 6
    assert most <= len(returned) + 3


@pytest.mark.gpu
def test_on_a_gpu_the_rounds_are_compiled_once_and_what_is_before_them_in_pieces() -> None:
    _, captured = captured_of(Prepared().eval().cuda(), image().cuda())
    program = replay((RemoveInferenceNoops(), FoldConstants(), ChannelsLast()), FP32.start(captured.program))
    division = in_rounds(program, 4)
    assert division is not None
    assert max(division.kinds.count(kind) for kind in division.kinds) >= 6
    check(program, 4)
    pieces = Compile().divided(program, 4)
    assert [piece.graph for piece in pieces] == [piece.graph for piece in division.programs]
    done = Compile(pieces=4).apply(program).program
    assert isinstance(done.engine, Chain)
    assert len(done.engine.steps) == len(division.pieces)
    with torch.no_grad():
        for x in (image().cuda(), image().cuda() * 3 - 1):
            for one, other in zip(program.run(x), done.run(x), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [(3, 3), (5, 1), (1, 5)])
def test_each_round_may_have_a_copy_of_its_weights_and_constants(kernel: tuple[int, int]) -> None:
    """A column in channels_last ends in one number, whose stride is the channels' count (RAFT-large)."""
    _, captured = captured_of(Loop(5, fresh=True, kernel=kernel).eval(), image())
    passes = RemoveInferenceNoops(), FoldConstants(), ChannelsLast()
    program = replay(passes, FP32.start(captured.program))
    weights = [node for node in program.graph.graph.nodes if node.op == "get_attr"]
    assert len({node.target for node in weights}) > 10  # the layout has made copies
    division = in_rounds(program)
    assert division is not None
    assert max(division.kinds.count(kind) for kind in division.kinds) >= 3
    check(program)


def test_the_weights_of_a_graph_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each reading is a copy to the host, and the search asks for an estimate again and again."""
    program, read = copied(eight), list[Tensor]()

    def counted(tensor: Tensor) -> bytes:
        read.append(tensor)
        return bytes_of(tensor)

    monkeypatch.setattr("ampopt.ir.model_hash.bytes_of", counted)
    first = calls_once(program.graph)
    assert read
    read.clear()
    assert calls_once(program.graph) == first
    assert is_unrolled(program.graph)
    assert not read


def test_the_calls_of_a_loop_are_counted_once() -> None:
    programs = copied(eight), program_of(Loop(12), image())
    counts = [calls_once(program.graph) for program in programs]
    assert counts[1] - counts[0] < 10, "of 4 rounds more, each of 36 calls and some"
    assert Compile().expected_seconds(programs[1]) == 4.0 + 0.03 * counts[1]


def layers() -> nn.Module:
    """As many calls as a loop of eight rounds, with weights of their own."""
    return Loop(8, shared=False)


def test_layers_of_one_shape_with_weights_of_their_own_are_no_loop() -> None:
    program = copied(layers)
    assert calls_once(program.graph) == sum(1 for _ in calls(program.graph))
    assert in_rounds(program) is None
    assert not is_unrolled(program.graph)


def test_weights_that_differ_in_one_number_are_others() -> None:
    model = Loop(5, shared=False)
    for conv in model.convs[1:]:
        conv.load_state_dict(model.convs[0].state_dict())
    program = program_of(model, image())
    assert in_rounds(program) is not None
    with torch.no_grad():
        for number, conv in enumerate(model.convs):
            conv.weight[1, 2, 1, 1] += number  # type: ignore[index, operator]
    other = program_of(model, image())
    assert in_rounds(other) is None


@pytest.mark.parametrize("kind", ["sparse", "rows", "packed", "complex", "conjugate", "small", "none"])
def test_weights_whose_numbers_cannot_be_read_are_equal_to_themselves_alone(kind: str) -> None:
    made: Callable[[], Tensor] = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "rows": lambda: torch.eye(3).to_sparse_csr(),
        "packed": lambda: torch.eye(3).to_mkldnn(),
        "complex": lambda: torch.eye(3) * 1j,
        "conjugate": lambda: (torch.eye(3) * 1j).conj(),
        "small": lambda: torch.eye(3).to(torch.float8_e4m3fn),
        "none": lambda: torch.empty(3, 3, device="meta"),
    }[kind]

    def graph(weights: list[Tensor]) -> fx.GraphModule:
        owner, calls = nn.Module(), fx.Graph()
        value = calls.placeholder("x")
        for number in range(120):
            owner.register_buffer(f"w{number}", weights[number // 40 % len(weights)])
            value = calls.call_function(aten.mul.Tensor, (value, calls.get_attr(f"w{number}")))
        calls.output((value,))
        return fx.GraphModule(owner, calls)

    shared, readable = made(), kind in ("complex", "small")
    assert is_unrolled(graph([shared]))
    assert is_unrolled(graph([made(), made(), made()])) is readable


def test_two_rounds_are_too_few() -> None:
    assert in_rounds(program_of(Loop(2), image())) is None


def test_inductor_compiles_the_body_once_and_is_right() -> None:
    _, captured = captured_of(Loop(6).eval(), image())
    program, step = FP32.start(captured.program), Compile()
    pieces = step.divided(program, 1)
    assert 1 < len(pieces) < 5
    assert step.expected_seconds(program) < 4 + 0.03 * 0.7 * sum(1 for _ in calls(program.graph))
    made = step.apply(program).program
    assert isinstance(made.engine, Chain)
    for x in (image(), image() * 2):
        for one, other in zip(made.run(x), program.run(x), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    named = {name for kernel in own_kernels(made) for name in kernel.nodes}
    for part in made.engine.steps:  # equal rounds share inductor's code, and each has its own names
        mine = {node.name for node in calls(part.graph)}
        assert len(named & mine) >= 0.9 * len(mine)


def test_a_loop_opens_with_inductor_and_layers_do_not() -> None:
    assert opening_of(copied(eight), ()).engine == COMPILED_ON_CPU[False].engine == "compile"
    assert opening_of(copied(layers), ()).engine == OPENINGS["cpu", False].engine != "compile"
