"""divided: a program in pieces gives what the whole gives."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from ampopt.engines.cuts import LEAST_CALLS, MOST_UNEVEN
from ampopt.engines.divided import Chain, divided, forget_pieces
from ampopt.ir.graph import aten, calls, copy_of
from ampopt.ir.program import Program
from ampopt.passes import ChannelsLast
from tests.helpers import Model, program_of


class Residual(nn.Module):
    """Blocks of a convolution, an activation and a sum with their input."""

    def __init__(self, blocks: int, width: int = 8) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + conv(x).sigmoid().tanh()
        return x


def image(width: int = 8) -> Tensor:
    return torch.randn(1, width, 6, 6, generator=torch.Generator().manual_seed(0))


def forty() -> nn.Module:
    """160 calls: enough for four pieces."""
    return Residual(40)


@functools.cache
def captured_once(make: Callable[[], nn.Module], example: Callable[[], Tensor]) -> Program:
    return program_of(make(), example())


def copied(make: Callable[[], nn.Module], example: Callable[[], Tensor] = image) -> Program:
    """The program of such a model, captured once, with a graph of its own."""
    program = captured_once(make, example)
    return program.replace(graph=copy_of(program.graph))


def chained(program: Program, count: int) -> Chain:
    division = divided(program, count)
    assert division is not None
    return Chain(division, [piece.graph for piece in division.programs])


def check(program: Program, count: int, *tensors: Tensor) -> None:
    with torch.no_grad():
        wholes, pieces = program.graph(*tensors), chained(program, count)(*tensors)
        for one, other in zip(wholes, pieces, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_pieces_follow_each_other_and_each_is_a_program(count: int) -> None:
    program = copied(forty)
    division = divided(program, count)
    assert division is not None
    assert len(division.pieces) == count
    sizes = [sum(1 for _ in calls(piece.graph)) for piece in division.programs]
    assert sum(sizes) == sum(1 for _ in calls(program.graph))
    assert min(sizes) > 0.7 * max(sizes)
    for piece in division.pieces:
        outputs = piece.program.run(*piece.program.examples)
        assert len(outputs) == len(piece.outputs)
    check(program, count, image())
    assert all(len(piece.inputs) == 1 for piece in division.pieces)  # a cut is between blocks


def test_a_division_is_made_once() -> None:
    program = program_of(Residual(20), image())  # 80 calls: enough for two
    division = divided(program, 4)
    assert division is not None
    assert len(division.pieces) == 2
    assert divided(program, 4) is division
    assert divided(program, 2) is division  # there is no room for more
    assert divided(program.replace(cuda_graph=True), 2) is division
    forget_pieces(program)
    assert divided(program, 2) is not division


@pytest.mark.parametrize("step", [torch.exp, torch.nn.functional.normalize])
def test_nothing_runs_for_a_division_where_no_piece_refuses_zeros(
    step: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a first run loads kernels for seconds, for which compilers would wait."""
    program = program_of(Model(lambda m, x: step(m.blocks(x)), blocks=forty()), image())
    monkeypatch.setattr("ampopt.engines.divided._crossing", lambda *_: pytest.fail("it has run"))
    division = divided(program, 2)
    assert division is not None
    (example,) = division.programs[1].examples
    assert not example.any()


def test_a_graph_that_is_short_or_wide_everywhere_is_not_divided() -> None:
    assert divided(program_of(Residual(LEAST_CALLS // 4), image()), 4) is None

    def wide(m: Any, x: Tensor) -> Tensor:
        rows = [x * k for k in range(2, 40)]
        return torch.stack([row.exp() for row in rows]).sum(0)

    assert divided(program_of(Model(wide), image()), 2) is None


class Rounds(nn.Module):
    """A loop in which each round reads what was computed once, as an optical flow reads its volumes."""

    def __init__(self, rounds: int, volumes: int) -> None:
        super().__init__()
        self.rounds, self.volumes = rounds, volumes
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        volumes = [self.conv(x).exp() * 2.0**-k for k in range(self.volumes)]
        for _ in range(self.rounds):
            for volume in volumes:
                x = self.conv(x).sigmoid() * volume
        return x


def many_rounds() -> nn.Module:
    """A loop whose rounds read six volumes."""
    return Rounds(40, 6)


def test_what_each_round_of_a_long_loop_reads_may_cross_all_cuts() -> None:
    rounds, volumes = 40, 6
    program = copied(many_rounds)
    division = divided(program, 2)
    assert division is not None
    assert [len(piece.inputs) for piece in division.pieces] == [1, 1 + volumes]
    check(program, 2, image())
    short = program_of(Rounds(rounds // 10, volumes), image())
    assert divided(short, 2) is None


def test_a_cut_is_near_the_middle_of_a_long_graph_though_fewer_tensors_cross_elsewhere() -> None:
    program = copied(many_rounds)
    division = divided(program, 2)
    assert division is not None
    sizes = [sum(1 for _ in calls(piece.graph)) for piece in division.programs]
    assert abs(sizes[0] - sum(sizes) / 2) <= MOST_UNEVEN


def test_weights_stay_shared_and_what_only_depends_on_them_does_not_cross() -> None:
    def scaled(m: Any, x: Tensor) -> Tensor:
        weight = (m.w * 2).exp()
        for _ in range(40):
            x = x * weight + 1
        return x

    model = Model(scaled, w=nn.Parameter(torch.randn(8, 1, 1) * 0.01))
    assert divided(program_of(model, image()), 2) is None
    program = copied(forty)
    division = divided(program, 2)
    assert division is not None
    whole = {tensor.data_ptr() for tensor in program.graph.state_dict().values()}
    parts = [tensor.data_ptr() for piece in division.programs for tensor in piece.graph.state_dict().values()]
    assert sorted(parts) == sorted(whole)


class TwoEnds(nn.Module):
    """An early result and a late one, and an input that is read late."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Residual(20), Residual(20)

    def forward(self, x: Tensor, late: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        early = self.first(x)
        return early.mean((2, 3)), self.last(early) * late, x


def test_early_results_and_late_inputs_go_around_the_pieces() -> None:
    x, late = image(), torch.full((1, 8, 6, 6), 3.0)
    program = program_of(TwoEnds(), x, late)
    check(program, 3, x, late)
    check(program, 3, -x, x)


def shapes_by_value(m: Any, x: Tensor) -> Tensor:
    for _ in range(LEAST_CALLS * 3):
        x = x + 1
    return x


def views(m: Any, x: Tensor) -> Tensor:
    y = x.exp()
    for _ in range(LEAST_CALLS):
        y = y.transpose(2, 3).sigmoid()
        y = y[:, :, ::2].repeat(1, 1, 2, 1)
    return y


FORWARDS: tuple[Callable[[Any, Tensor], Tensor], ...] = (shapes_by_value, views)
MODELS = {forward: functools.partial(Model, forward) for forward in FORWARDS}


@pytest.mark.parametrize("forward", MODELS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_shapes_strides_and_views_are_those_of_the_whole(
    forward: Callable[[Any, Tensor], Tensor], count: int
) -> None:
    check(copied(MODELS[forward]), count, image())


def test_channels_last_crosses_a_cut_and_other_strides_are_brought_into_it() -> None:
    program = ChannelsLast().apply(copied(forty)).program
    division = divided(program, 2)
    assert division is not None
    (example,) = division.programs[1].examples
    assert example.is_contiguous(memory_format=torch.channels_last)
    seen: list[tuple[int, ...]] = []
    entered = program.entry[0].convert(image())

    def first(x: Tensor) -> tuple[Tensor, ...]:
        assert x is entered
        return (division.programs[0].graph(x)[0].contiguous(),)

    def second(x: Tensor) -> tuple[Tensor, ...]:
        seen.append(x.stride())
        return (x,)

    with torch.no_grad():
        Chain(division, [first, second])(entered)
    assert seen == [example.stride()]


def test_a_graph_whose_shapes_depend_on_values_is_not_divided() -> None:
    program = copied(forty)
    last = list(calls(program.graph))[-1]
    with program.graph.graph.inserting_after(last):
        found = program.graph.graph.call_function(aten.nonzero.default, (last,))
    last.replace_all_uses_with(found, delete_user_cb=lambda user: user is not found)
    program.graph.recompile()
    assert divided(program, 2) is None


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a third of the usual size, so that a chain that is cut is short."""
    for module in ("cuts", "divided"):
        monkeypatch.setattr(f"ampopt.engines.{module}.LEAST_CALLS", 10)


@example([1, 2, 3, 0] * 7, 2)
@example([2, 1, 1, 3, 0] * 7, 3)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 3), min_size=24, max_size=36), st.integers(2, 4))
@pytest.mark.usefixtures("small_pieces")
def test_any_chain_of_calls_with_skips(kinds: list[int], count: int) -> None:
    graph = fx.Graph()
    kept = [graph.placeholder("x")]
    for kind in kinds:
        skipped = kept[-min(kind + 1, len(kept))]
        target = (aten.add.Tensor, aten.mul.Tensor, aten.sigmoid.default, aten.flip.default)[kind]
        new = graph.call_function(target, (kept[-1], *((1,), (skipped,), (), ([2],))[kind]))
        kept.append(graph.call_function(aten.tanh.default, (new,)) if kind == 1 else new)
    graph.output((kept[-1],))
    program = captured_once(nn.Sigmoid, image).replace(graph=fx.GraphModule({}, graph))
    division = divided(program, count)
    assume(division is not None)
    assert division is not None
    names = [piece.outputs for piece in division.pieces]
    assert len(set(itertools.chain.from_iterable(names))) == sum(map(len, names))
    check(program, count, image())


class Tokens(nn.Module):
    """Pixels become tokens that lie in memory as an image, and so do their sums."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, stride=2)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))
        self.mixers = nn.ModuleList(nn.Linear(9, 9) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer, mixer in zip(self.layers, self.mixers, strict=True):
            mixed = mixer(x.transpose(1, 2)).transpose(1, 2)
            first, second = layer(x).chunk(2, -1)
            x = x + mixed * 0.5 + torch.cat((second.tanh(), first.sigmoid()), -1)
        return x


def small_image() -> Tensor:
    return torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def tokens() -> nn.Module:
    torch.manual_seed(0)
    return Tokens(24)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_tokens_that_lie_as_an_image_are_divided(count: int) -> None:
    program = copied(tokens, small_image)
    division = divided(program, count)
    assert division is not None
    assert len(division.pieces) == count
    for before, after in itertools.pairwise(division.pieces):
        assert after.inputs == before.outputs
        assert len(after.inputs) == 1
        (stride,) = after.strides
        assert stride[1:] == (1, 9), "as it lies in the whole"
    check(program, count, small_image())
    check(program, count, small_image() * 3 - 1)
