"""What the profiler records, and that it leaves nothing of itself behind."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import ampopt
from ampopt.diagnosis.operators import recording
from ampopt.engines.graph_capture import ReplayedProgram
from ampopt.measure.clocks import latency
from ampopt.measure.sampling import interleave
from tests.helpers import Model, program_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def kernels(recorded: profile) -> int:
    return sum(event.device_type == DeviceType.CUDA for event in recorded.events() or ())


@pytest.mark.parametrize("level", [None, "3"])
def test_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch, level: str | None) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("KINETO_LOG_LEVEL", level)
    with recording(CPU) as recorded:
        assert os.environ["KINETO_LOG_LEVEL"] == (level or "99")
        torch.ones(2) + 1
    assert os.environ.get("KINETO_LOG_LEVEL") == level
    assert any(event.name == "aten::add" for event in recorded.events() or ())


def test_an_error_in_the_block_ends_the_recording() -> None:
    with pytest.raises(ValueError, match="half-way"), recording(CPU):
        raise ValueError("half-way")
    with recording(CPU) as recorded:
        torch.ones(2) + 1
    assert any(event.name == "aten::add" for event in recorded.events() or ())


@pytest.mark.parametrize("train", [False, True])
def test_a_recording_of_the_users_is_not_lost_to_a_diagnosis(train: bool) -> None:
    """PyTorch has one profiler for the process: the inner recording would end the outer one."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.ones(2) + 1
        with pytest.raises(ampopt.InputError, match="PyTorch's profiler is recording"):
            ampopt.diagnose(nn.Linear(2, 2), torch.ones(1, 2), train=train)
    assert any(event.name == "aten::add" for event in recorded.events() or ())


@pytest.mark.gpu
def test_each_recording_has_its_kernels_also_after_one_that_stayed_attached() -> None:
    x = torch.ones(8, device=CUDA)
    for attached in (False, False, True, True, False):
        if attached:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
                torch.cuda.synchronize()
        with recording(CUDA) as recorded:
            for _ in range(5):
                x = x + 1
            torch.cuda.synchronize()
        assert kernels(recorded) == 5


@pytest.mark.gpu
@pytest.mark.timing
def test_a_recording_makes_no_later_launch_slower() -> None:
    """A profiler that stays attached makes each replay of a graph take a fifth longer."""

    def function(_: object, x: torch.Tensor) -> torch.Tensor:
        for _ in range(300):
            x = x + 1
        return x

    graph = ReplayedProgram(program_of(Model(function), torch.ones(8, device=CUDA)))

    def replays() -> float:
        timed = interleave({"replay": latency(graph.replay, CUDA)}, seconds=0.5, least=50)
        return timed["replay"].median

    replays()
    before = min(replays() for _ in range(4))
    with recording(CUDA) as recorded:
        graph.replay()
        torch.cuda.synchronize()
    after = min(replays() for _ in range(4))
    assert kernels(recorded) >= 300
    assert after < 1.08 * before
