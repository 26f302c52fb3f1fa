"""compile: inductor runs the program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch._inductor.utils import clear_caches

from ampopt.engines.apart import Apart
from ampopt.engines.divided import Chain
from ampopt.engines.inductor_code import LoadedCode
from ampopt.errors import PassError
from ampopt.ir.aliases import joined
from ampopt.ir.graph import aten, calls, copy_of
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.model_copy import same_tensor
from ampopt.ir.program import Program
from ampopt.ir.transform import Pass, Rehearsed, Result, replay
from ampopt.passes import BakeAutocast, ChannelsLast, Compile, CudaGraph, FoldConvBn
from ampopt.passes.compile import keep_nan
from ampopt.search.rehearsal import Sandbox
from tests.helpers import (
    BF16,
    FP16,
    Model,
    Unpooling,
    apply_to_untouched,
    check_keeps_nan,
    check_outputs,
    eager_of,
    program_of,
    with_statistics,
)
from tests.support.compiler import look_at_processor, needs_compiler


class _Network(nn.Module):
    """Two outputs, the second of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.conv(x)).relu()
        return self.linear(y.mean((2, 3))), y.argmax(1)


class _Compiled(NamedTuple):
    model: nn.Module
    x: Tensor
    program: Program
    result: Result


@pytest.fixture(scope="module")
def compiled() -> Iterator[_Compiled]:
    """One compilation for all the tests that only look at it."""
    torch.manual_seed(1)  # not the seed of a test, which makes a network of its own
    model, x = with_statistics(_Network()), torch.randn(2, 3, 10, 10)
    program = program_of(model, x)
    yield _Compiled(model, x, program, apply_to_untouched(Compile(), program))
    torch._dynamo.reset()


def test_it_gives_the_program_an_engine_and_leaves_its_graph(compiled: _Compiled) -> None:
    assert compiled.result.rewrites == 1
    assert compiled.result.program.engine is not None
    assert compiled.result.program.graph is compiled.program.graph
    assert compiled.program.engine is None


def test_the_engine_computes_what_the_model_does(compiled: _Compiled) -> None:
    model, x, program, result = compiled
    check_outputs(Compile.numerics, program, result.program, model, [x], FP32)


def test_a_call_runs_inductors_code_itself(compiled: _Compiled) -> None:
    """What PyTorch puts around it takes longer than a small graph."""
    engine: Any = compiled.result.program.engine
    ran: list[int] = []
    code, inner = engine.inner.current_callable, engine.inner

    def counted(tensors: list[Tensor]) -> Any:
        ran.append(len(tensors))
        return code(tensors)

    assert isinstance(engine, LoadedCode)
    inner.current_callable = counted
    try:
        compiled.result.program.run(compiled.x)
    finally:
        inner.current_callable = code
    assert ran == [1]


def test_where_the_code_is_not_all_the_engine_around_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.passes.compile.is_whole", lambda *_: False)
    model, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    program = program_of(model, x)
    result = apply_to_untouched(Compile(), program)
    assert not isinstance(result.program.engine, LoadedCode)
    assert Compile().send(result.program) is None
    check_outputs(Compile.numerics, program, result.program, model, [x], FP32)


def test_equal_results_that_the_graph_has_apart_are_apart() -> None:
    model = Model(lambda m, x: ((y := x.relu() + 1), x.relu() + 1, y.view(-1), y * 2))
    x = torch.randn(3, 5)
    program = program_of(model, x)
    for each in (program, Compile().apply(program).program):
        assert joined(each.run(x)) == joined(model(x)) == {(0, 2)}
        assert all(map(torch.equal, each.run(x), model(x)))


@pytest.mark.parametrize(
    ("function", "shared"),
    [
        (lambda m, x: ((y := x.relu() + 1), y * 1, y.view(-1)), {(0, 2)}),
        (lambda m, x: ((y := x + 1), y.view(-1), (z := y * 1), z.view(5, 3)), {(0, 1), (2, 3)}),
    ],
)
def test_results_of_one_memory_stay_so_where_what_inductor_computes_once_is_copied(
    function: Any, shared: set[tuple[int, int]]
) -> None:
    model, x = Model(function), torch.randn(3, 5)
    compiled = Compile().apply(program_of(model, x)).program
    assert isinstance(compiled.engine, Apart)
    assert joined(compiled.run(x)) == joined(model(x)) == shared
    assert all(map(torch.equal, compiled.run(x), model(x)))
    assert [y.stride() for y in compiled.run(x)] == [y.stride() for y in model(x)]
    assert Compile().send(compiled) is not None  # the process that asked for a rehearsal makes the copies


def test_no_call_compiles_anything_more(compiled: _Compiled) -> None:
    _, x, _, result = compiled
    before = dict(counters["stats"])
    result.program.run(x)
    with torch.inference_mode():
        result.program.run(x)
    with torch.enable_grad():
        result.program.run(torch.randn_like(x))
    assert dict(counters["stats"]) == before


def test_the_check_catches_an_engine_of_another_program(compiled: _Compiled) -> None:
    _, x, _, result = compiled
    other = with_statistics(_Network())
    program = program_of(other, x)
    wrong = program.replace(engine=result.program.engine)
    with pytest.raises(AssertionError, match="the error is"):
        check_outputs(Compile.numerics, program, wrong, other, [x], FP32)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by a word whenever inductor compiles a trace."""
    compile_trace, order = compile_fx.compile_fx_inner, list[str]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        order.append("compiled")
        return compile_trace(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", noted)
    return order


def test_nothing_is_compiled_before_the_rehearsal_is_over(order: list[str]) -> None:
    program = program_of(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 4))

    def rehearsed() -> Rehearsed:
        order.append("rehearsed")
        return Rehearsed()

    result = Compile(warm_ups=0).apply_beside(program, rehearsed)
    assert order == ["rehearsed", "compiled"]
    assert result.program.engine is not None


def test_a_rehearsal_that_failed_is_the_reason_and_nothing_is_compiled(order: list[str]) -> None:
    program = program_of(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 4))

    def rehearsed() -> Rehearsed:
        raise PassError("it hung")

    with pytest.raises(PassError, match=r"^it hung$"):
        Compile().apply_beside(program, rehearsed)
    assert not order


def test_a_second_apply_does_nothing(compiled: _Compiled) -> None:
    assert apply_to_untouched(Compile(warm_ups=0), compiled.result.program).rewrites == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_was_compiled_once_is_found_again_and_keeps_no_weights(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    look_at_processor()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.randn(4, 3000, device=device)  # longer weights are not written into the code
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Model(lambda m, x: (x * m.w).sin() + m.w.exp(), w=nn.Parameter(torch.randn(3000))).to(device)
        before = counters["inductor"]["fxgraph_cache_hit"]
        program = replay((Compile(),), program_of(model, x))
        found.append(counters["inductor"]["fxgraph_cache_hit"] - before)
        check_outputs(Compile.numerics, program_of(model, x), program, model, [x], FP32)
    assert found == [0, 1]


@needs_compiler
def test_a_library_whose_compiler_was_killed_is_built_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    look_at_processor()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = Model(lambda m, x: x.sin() + x.cos() * m.w, w=nn.Parameter(torch.randn(7))), torch.randn(3, 7)
    replay((Compile(),), program_of(model, x))
    libraries = list(tmp_path.glob("*/*.main.so"))
    assert libraries
    for library in libraries:  # what a linker leaves that is killed at once
        library.unlink()
        library.touch()
        library.with_name(f"{library.stem}_CxxBuild").mkdir()
    clear_caches()  # what this process still remembers
    check_outputs(
        Compile.numerics, program_of(model, x), replay((Compile(),), program_of(model, x)), model, [x], FP32
    )
    assert all(library.stat().st_size > 0 for library in libraries)


def test_more_operators_are_expected_to_take_longer() -> None:
    small = program_of(nn.ReLU(), torch.randn(2, 4))
    large = program_of(nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)]), torch.randn(2, 4))
    assert 0 < Compile().expected_seconds(small) < Compile().expected_seconds(large) < 60


BOUNDED: list[Callable[[Tensor], Tensor]] = [
    F.relu,
    F.relu6,
    F.hardsigmoid,
    partial(F.hardtanh, min_val=-0.5, max_val=0.5),
    lambda v: v.clamp(-0.5, 0.5),
    lambda v: v.clamp(max=0.5),
    lambda v: v.clamp(0.5, -0.5),
]
"""Activations that bound; where the lower bound is above the upper one, that one holds."""


@pytest.mark.parametrize("function", BOUNDED)
def test_bounds_are_spelt_in_another_way_with_the_same_bits(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([[-9.0, -3.0, -0.25, 0.0, 0.25, 3.0, 9.0, float("inf"), -float("inf"), float("nan")]])
    module = copy_of(program_of(Model(lambda m, x: function(x)), x).graph)
    expected = module(x)
    keep_nan(module)
    assert same_tensor(module(x)[0], expected[0])
    assert not any(calls(module, [aten.relu.default, aten.hardtanh.default, aten.hardsigmoid.default]))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("lane", [FP32, BF16])
def test_it_keeps_nan(lane: Lane) -> None:
    """Of convolutions and linear layers, with and without an add, and what bounds behind them."""

    def forward(m: Any, x: Tensor) -> list[Tensor]:
        results = [F.max_pool2d(x.relu(), 2)]
        for f, conv, other, linear in zip(BOUNDED, m.convs, m.others, m.linears, strict=True):
            results += [f(conv(x)), f(other(x) + x), f(linear(x.mean((2, 3))))]
        return results

    members = {
        "convs": nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in BOUNDED),
        "others": nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in BOUNDED),
        "linears": nn.ModuleList(nn.Linear(16, 16) for _ in BOUNDED),
    }  # a bias of up to 8 numbers would be a kernel of its own
    model, x = Model(forward, **members), torch.randn(1, 16, 8, 8)
    program = program_of(model, x, lane=lane, on_top_of=[BakeAutocast()])
    result = Compile().apply(program)
    check_keeps_nan(result.program, model, [x], lane)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lane", "before"),
    [
        pytest.param(FP32, [FoldConvBn(), ChannelsLast()], id="folded channels_last"),
        pytest.param(BF16, [BakeAutocast(), FoldConvBn(), ChannelsLast()], id="baked"),
    ],
)
def test_it_runs_rewritten_programs_and_their_replays(lane: Lane, before: list[Pass]) -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Softmax(1)]
    model = with_statistics(nn.Sequential(*layers))
    for x in (torch.randn(2, 3, 10, 10), torch.randn(1, 3, 7, 9)):
        program = program_of(model, x, lane=lane, on_top_of=before)
        after = replay((Compile(),), program)
        assert after.engine is not None
        check_outputs(Compile.numerics, program, after, model, [x], lane)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lane", "before"),
    [
        pytest.param(FP32, [FoldConvBn()], id="fp32"),
        pytest.param(FP16, [BakeAutocast(), FoldConvBn(), ChannelsLast()], id="baked channels_last"),
    ],
)
def test_on_a_gpu_the_engine_is_right_with_and_without_a_cuda_graph(lane: Lane, before: list[Pass]) -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()]
    model, x = with_statistics(nn.Sequential(*layers)).cuda(), torch.randn(2, 3, 10, 10, device="cuda")
    program = program_of(model, x, lane=lane, on_top_of=before)
    engine = replay((Compile(),), program)
    assert engine.engine is not None
    check_outputs(Compile.numerics, program, engine, model, [x], lane)
    check_outputs(Compile.numerics, program, replay((CudaGraph(),), engine), model, [x], lane)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_of_several_nan_in_a_window_it_takes_the_one_that_eager_takes(device: str) -> None:
    model = Unpooling().to(device).eval()
    x = torch.randn(1, 3, 12, 12, device=device)
    result = Compile().apply(program_of(model, x))
    for rows, columns in ((slice(4, 7), slice(4, 6)), (slice(0, 3), slice(1, 9)), (slice(5, 6), slice(5, 6))):
        spoilt = x.clone()
        spoilt[:, :, rows, columns] = float("nan")
        expected, found = eager_of(model, [spoilt], FP32)[0], result.program.run(spoilt)[0]
        assert torch.equal(expected.isnan(), found.isnan())


class Residual(nn.Module):
    """Blocks of a convolution, activations and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + conv(x).sigmoid().tanh()
        return x


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lane", "before"),
    [(FP32, []), (FP16, [BakeAutocast(), ChannelsLast()])],
    ids=["fp32", "baked channels_last"],
)
def test_pieces_that_were_rehearsed_at_once_are_loaded_and_a_replay_makes_the_same(
    lane: Lane, before: list[Pass], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.search.rehearsal.how_many", lambda _: 3)
    device = torch.device("cuda", 0)
    model, x = Residual().to(device).eval(), torch.randn(1, 8, 32, 32, device=device)
    program = program_of(model, x, lane=lane, on_top_of=before)
    with Sandbox(device) as sandbox:
        counters.clear()
        result, why_not = sandbox.apply(Compile(), program, seconds=120)
        assert counters["aot_autograd"]["total"] == 0  # nothing was traced here
    assert why_not is None
    assert result.hints == ()
    assert result.replay == Compile(pieces=3)
    assert isinstance(result.program.engine, Chain)
    check_outputs(Compile.numerics, program, result.program, model, [x], lane)
    captured = CudaGraph().apply(result.program).program
    check_outputs(Compile.numerics, program, captured, model, [x], lane)
    again = Compile(pieces=3).apply(program)
    assert again.replay == Compile(pieces=3)
    for one, two in zip(again.program.run(x), result.program.run(x), strict=True):
        assert torch.equal(one, two)
