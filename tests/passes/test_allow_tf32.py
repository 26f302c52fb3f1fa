"""allow-tf32: a switch for the time of a call."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.settings import Settings
from ampopt.passes import AllowTf32
from tests.helpers import BF16, FP16, Model, apply_to_untouched, check_pass, program_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("lane", "device", "capability", "reason"),
    [
        (FP16, CUDA, (9, 0), "the lane already computes in a lower precision"),
        (BF16, CPU, (0, 0), "the lane already computes in a lower precision"),
        (FP32, CPU, (0, 0), "TF32 is a format of NVIDIA's Tensor Cores"),
        (FP32, CUDA, (7, 5), "this GPU has no TF32 (compute capability below 8.0)"),
        (FP32, CUDA, (8, 0), None),
        (FP32, CUDA, (9, 0), None),
    ],
)
def test_only_full_precision_on_ampere_or_later_can_use_it(
    lane: Lane,
    device: torch.device,
    capability: tuple[int, int],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    program = program_of(nn.Linear(4, 4), torch.randn(2, 4), lane=lane).replace(device=device)
    assert AllowTf32().why_not(program) == reason


def test_it_sets_the_one_switch_and_a_second_apply_nothing() -> None:
    program = program_of(nn.Linear(4, 4), torch.randn(2, 4))
    result = apply_to_untouched(AllowTf32(), program)
    assert result.rewrites == 1
    assert result.program.settings == dataclasses.replace(program.settings, tf32=True)
    assert result.program.graph is program.graph
    assert program.settings == Settings()
    assert apply_to_untouched(AllowTf32(), result.program).rewrites == 0


def _precisions() -> list[str]:
    backends = torch.backends
    return [
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        backends.cudnn.rnn.fp32_precision,  # type: ignore[attr-defined]
    ]


@pytest.mark.gpu
def test_on_a_gpu_the_switch_is_on_inside_the_programs_calls_only() -> None:
    x = torch.randn(8, 64, device="cuda")
    program = program_of(nn.Linear(64, 64).cuda(), x)
    before = _precisions()
    faster = AllowTf32().apply(program).program
    assert _precisions() == before
    with faster.scope():
        assert _precisions() == ["tf32"] * 3
    faster.run(x)
    assert _precisions() == before
    with program.scope():
        assert _precisions() == ["ieee"] * 3
    assert _precisions() == before


@pytest.mark.gpu
def test_on_a_gpu_the_switch_goes_back_when_a_call_fails() -> None:
    x, before = torch.randn(8, 64, device="cuda"), _precisions()
    program = AllowTf32().apply(program_of(nn.Linear(64, 64).cuda(), x)).program
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        program.run(torch.randn(8, 63, device="cuda"))
    assert _precisions() == before


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs a GPU with TF32",
)
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)), (64, 256)),
        (nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 32, 3)), (4, 64, 32, 32)),
        (Model(lambda m, x: x @ x.mT), (4, 128, 128)),
    ],
    ids=["linear", "convolutions", "matrix product"],
)
def test_on_a_gpu_inputs_are_rounded_to_ten_bits_and_no_more(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    x, elsewhere = torch.randn(shape, device="cuda"), [torch.randn(2, *shape[1:], device="cuda")]
    result = check_pass(AllowTf32(), model.cuda(), x, rewrites=1, elsewhere=elsewhere, limit=2.0**-10)
    exact = program_of(model.cuda(), x).run(x)[0]
    assert not torch.equal(result.program.run(x)[0], exact), "TF32 was not used"
