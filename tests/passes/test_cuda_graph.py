"""cuda-graph: what can be captured, and on a GPU that replays are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.engines.cuda_graphs import CapturedGraph
from ampopt.engines.executable import executable
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.program import Program
from ampopt.ir.settings import Settings
from ampopt.ir.transform import Numerics, Pass, Result
from ampopt.passes import AllowTf32, BakeAutocast, ChannelsLast, CudaGraph, FoldConvBn
from tests.helpers import FP16, Model, apply_to_untouched, check_pass, error_of, program_of, with_statistics

CUDA = torch.device("cuda")


def _network() -> nn.Module:
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(5),
    ]
    model = nn.Sequential(*layers)
    model(torch.randn(2, 3, 12, 12))
    return with_statistics(model)


def test_a_cpu_is_refused() -> None:
    assert CudaGraph().why_not(program_of(nn.ReLU(), torch.randn(3))) == "there is no CUDA device"


@pytest.mark.parametrize(
    ("function", "node"),
    [
        pytest.param(lambda m, x: torch.nonzero(x > 0), "nonzero", id="nonzero"),
        pytest.param(lambda m, x: x * x.sum().item(), "item", id="item"),
        pytest.param(lambda m, x: torch.masked_select(x, x > 0), "masked_select", id="masked_select"),
        pytest.param(lambda m, x: torch.unique(x), "_unique2", id="unique"),
        pytest.param(lambda m, x: x[x > 0].sum(), "index", id="boolean mask as an index"),
    ],
)
def test_an_operator_that_waits_for_the_host_is_refused(function: Callable[..., Tensor], node: str) -> None:
    program = program_of(Model(function), torch.randn(4, 4)).replace(device=CUDA)
    assert CudaGraph().why_not(program) == f"{node} needs a value on the host"


@pytest.mark.parametrize(
    "model",
    [
        _network(),
        Model(lambda m, x: x.flatten(1)[:, m.index], index=torch.tensor([2, 0])),
        Model(lambda m, x: torch.where(x > 0, x, x.mean()).topk(3).values),
    ],
    ids=["network", "integer index", "where"],
)
def test_what_stays_on_the_device_is_taken(model: nn.Module) -> None:
    program = program_of(model, torch.randn(2, 3, 12, 12)).replace(device=CUDA)
    assert CudaGraph().why_not(program) is None


def test_it_marks_the_program_and_a_second_apply_does_nothing() -> None:
    program = program_of(_network(), torch.randn(2, 3, 12, 12))
    result = apply_to_untouched(CudaGraph(), program)
    assert result.rewrites == 1
    assert result.program.cuda_graph
    assert not program.cuda_graph
    assert result.program.graph is program.graph
    assert apply_to_untouched(CudaGraph(), result.program).rewrites == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lane", "before"),
    [
        pytest.param(FP32, [], id="fp32"),
        pytest.param(FP32, [FoldConvBn(), ChannelsLast()], id="folded channels_last"),
        pytest.param(FP16, [], id="under autocast"),
        pytest.param(FP16, [BakeAutocast(), FoldConvBn(), ChannelsLast()], id="baked"),
    ],
)
def test_on_a_gpu_a_replay_gives_the_bits_of_the_program(lane: Lane, before: list[Pass]) -> None:
    x = torch.randn(2, 3, 12, 12, device="cuda")
    check_pass(CudaGraph(), _network().cuda(), x, rewrites=1, lane=lane, on_top_of=before)


@pytest.mark.gpu
def test_on_a_gpu_it_is_captured_for_other_shapes_too() -> None:
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())).cuda()
    x, elsewhere = torch.randn(2, 3, 12, 12, device="cuda"), [torch.randn(1, 3, 9, 17, device="cuda")]
    check_pass(CudaGraph(), model, x, rewrites=1, elsewhere=elsewhere)


@pytest.mark.gpu
def test_on_a_gpu_several_inputs_and_outputs_of_several_dtypes_are_carried() -> None:
    model = Model(
        lambda m, x, index: (F.embedding(index, m.table), x > 0, {"sum": x.sum(), "top": tuple(x.topk(2))}),
        table=torch.randn(6, 4),
    ).cuda()
    inputs = torch.randn(3, 4, device="cuda"), torch.tensor([5, 0, 2], device="cuda")
    check_pass(CudaGraph(), model, *inputs, rewrites=1)


@pytest.mark.gpu
def test_on_a_gpu_every_replay_reads_its_own_input_and_keeps_earlier_outputs() -> None:
    model = _network().cuda()
    run = executable(CudaGraph().apply(program_of(model, torch.randn(2, 3, 12, 12, device="cuda"))).program)
    assert isinstance(run, CapturedGraph)
    draws = [torch.randn(2, 3, 12, 12, device="cuda") for _ in range(4)]
    outputs = [run(x)[0] for x in draws]
    for x, output in zip(draws, outputs, strict=True):
        assert torch.equal(output, run(x)[0])
    assert len({output.data_ptr() for output in outputs}) == 4


@pytest.mark.gpu
def test_on_a_gpu_a_capture_keeps_the_programs_switches() -> None:
    model, x = nn.Linear(256, 256).cuda(), torch.randn(64, 256, device="cuda")
    before = [AllowTf32()] if AllowTf32().why_not(program_of(model, x)) is None else []
    program = program_of(model, x, on_top_of=before)
    captured = CudaGraph().apply(program).program
    assert torch.equal(executable(captured)(x)[0], program.run(x)[0])


class _GivesBackTheFirstCallsResult(CudaGraph):
    """A capture that misses the input: what happens where an address was not the one that is written to."""

    def apply(self, program: Program) -> Result:
        result = super().apply(program)
        stale = program.run(*program.examples)

        def engine(*tensors: Tensor) -> list[Tensor]:
            return [t.clone() for t in stale]

        return Result(result.program.replace(engine=engine), result.rewrites)


@pytest.mark.gpu
def test_on_a_gpu_the_check_catches_a_replay_that_does_not_read_its_input() -> None:
    x = torch.randn(2, 3, 12, 12, device="cuda")
    with pytest.raises(AssertionError, match="bits of an output changed"):
        check_pass(_GivesBackTheFirstCallsResult(), _network().cuda(), x, rewrites=1)


@pytest.mark.gpu
def test_on_a_gpu_error_of_runs_the_captured_graph() -> None:
    model, x = _network().cuda(), torch.randn(2, 3, 12, 12, device="cuda")
    captured = CudaGraph().apply(program_of(model, x)).program
    assert error_of(captured, model, [x]) < 2e-6


def test_every_bit_stays_unless_algorithms_are_searched_at_the_capture() -> None:
    program = program_of(nn.Linear(3, 2), torch.randn(1, 3))
    searching = program.replace(settings=Settings(search_algorithms=True))
    assert CudaGraph().numerics_on(program) is Numerics.BITWISE
    assert CudaGraph().numerics_on(searching) is Numerics.REASSOCIATED
    searching.run(torch.randn(1, 3))  # this thread may keep its plans: a capture is made in another one
    assert CudaGraph().numerics_on(program) is Numerics.REASSOCIATED
    assert CudaGraph().numerics_on(program.replace(lane=FP16)) is Numerics.BITWISE
