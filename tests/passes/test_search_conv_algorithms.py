"""search-conv-algorithms: a switch for the time of a call."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from ampopt.ir.settings import Settings
from ampopt.passes import BakeAutocast, ChannelsLast, SearchConvAlgorithms
from tests.helpers import FP16, apply_to_untouched, check_pass, program_of


def _three() -> nn.Module:
    """Three convolutions, one of them transposed."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ConvTranspose2d(8, 4, 2, 2)]
    return nn.Sequential(*layers)


def test_a_cpu_is_refused() -> None:
    program = program_of(_three(), torch.randn(1, 3, 8, 8))
    assert SearchConvAlgorithms().why_not(program) == "only cuDNN's convolutions can be searched"
    assert SearchConvAlgorithms().why_not(program.replace(device=torch.device("cuda"))) is None


def test_it_sets_the_one_switch_and_counts_the_convolutions() -> None:
    program = program_of(_three(), torch.randn(1, 3, 8, 8))
    result = apply_to_untouched(SearchConvAlgorithms(), program)
    assert result.rewrites == 3
    assert result.program.settings == dataclasses.replace(program.settings, search_algorithms=True)
    assert result.program.graph is program.graph
    assert program.settings == Settings()


def test_a_second_apply_does_nothing() -> None:
    program = program_of(_three(), torch.randn(1, 3, 8, 8))
    once = SearchConvAlgorithms().apply(program).program
    assert apply_to_untouched(SearchConvAlgorithms(), once).rewrites == 0


def test_a_program_without_convolutions_is_left_alone() -> None:
    program = program_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))
    assert apply_to_untouched(SearchConvAlgorithms(), program).rewrites == 0


@pytest.mark.gpu
@pytest.mark.parametrize("wanted_by_the_user", [False, True])
def test_on_a_gpu_the_switch_is_on_inside_the_programs_calls_only(
    wanted_by_the_user: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", wanted_by_the_user)
    x = torch.randn(1, 3, 16, 16, device="cuda")
    program = program_of(_three().cuda(), x)
    searching = SearchConvAlgorithms().apply(program).program
    with searching.scope():
        assert torch.backends.cudnn.benchmark is True
    searching.run(x)
    assert torch.backends.cudnn.benchmark is wanted_by_the_user
    with program.scope():
        assert torch.backends.cudnn.benchmark is False
    assert torch.backends.cudnn.benchmark is wanted_by_the_user


@pytest.mark.gpu
def test_on_a_gpu_whatever_it_finds_is_right() -> None:
    x, elsewhere = torch.randn(2, 3, 32, 32, device="cuda"), [torch.randn(1, 3, 17, 23, device="cuda")]
    check_pass(SearchConvAlgorithms(), _three().cuda(), x, rewrites=3, elsewhere=elsewhere, limit=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_whatever_it_finds_is_right_in_half_precision_and_channels_last() -> None:
    x, before = torch.randn(2, 3, 32, 32, device="cuda"), [BakeAutocast(), ChannelsLast()]
    check_pass(SearchConvAlgorithms(), _three().cuda(), x, rewrites=3, lane=FP16, on_top_of=before)
