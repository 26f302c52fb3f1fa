"""Five faults that people plant without knowing: each is named with its line."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Counterfactual, Finding
from ampopt.diagnosis.findings import batch_norm, channels, graph_break, grouped, host_reads, training_mode
from ampopt.diagnosis.findings.input_device import left_behind
from ampopt.measure.sampling import gain
from tests.support.cases import case_of, every_remedy_helps, taking


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()  # type: ignore[no-any-return]


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max().item()
        return x / scale if scale > 1 else x


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 30, 3), nn.Conv2d(30, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x)  # type: ignore[no-any-return]


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3, padding=1, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)  # type: ignore[no-any-return]


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.conv.weight.device)
        return self.conv(x)  # type: ignore[no-any-return]


class Misaligned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(126, 126, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)  # type: ignore[no-any-return]


def line_of(model: type[nn.Module], text: str) -> str:
    """`test_planted_faults.py:27`, the line of a model's class that holds the text."""
    lines, first = inspect.getsourcelines(model)
    return f"test_planted_faults.py:{next(first + at for at, line in enumerate(lines) if text in line)}"


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_a_batch_norm_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    every_remedy_helps(monkeypatch)
    model = Normalized().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = only(list(training_mode.find(case_of(model, torch.randn(2, 3, 8, 8)))))
    assert found.name == "batch-norm-in-training-mode"
    assert found.is_fault
    assert "norm" in found.places[0]
    assert line_of(Normalized, "self.norm(self.conv") in found.places[0]
    assert found.counterfactual is not None
    assert "after model.eval()" in str(found.counterfactual)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Both(Normalized):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x))  # type: ignore[no-any-return]


def test_of_two_kinds_in_training_mode_each_has_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[tuple[bool, bool]]] = []

    def executed(self: Case, change: str, *calls: Callable[[], object]) -> Counterfactual:
        seen.clear()
        for call in calls:
            call()
        ran.append(list(seen))
        return Counterfactual(change, taking(2), taking(1), gain(taking(2), taking(1)))

    seen: list[tuple[bool, bool]] = []

    class Noting(Both):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.norm.training, self.drop.training))
            return super().forward(x)

    case = case_of(Both().train(), torch.randn(2, 3, 8, 8))
    monkeypatch.setattr(Case, "counterfactual", executed)
    found = list(training_mode.find(dataclasses.replace(case, model=Noting().train())))
    assert ran == [[(True, True), (False, True)], [(True, True), (True, False)]]
    assert [str(each.counterfactual).partition(",")[0] for each in found] == [
        "after eval() of its batch norms alone",
        "after eval() of its dropouts alone",
    ]


def test_no_module_in_evaluation_mode_is_named() -> None:
    assert not list(training_mode.find(case_of(Normalized().eval(), torch.randn(2, 3, 8, 8))))


@pytest.mark.slow
def test_item_in_forward() -> None:
    found = ampopt.diagnose(Branching(), torch.randn(1, 3, 8, 8), budget_s=3, progress=False)
    named = {finding.name: finding for finding in found.findings}
    assert line_of(Branching, ".item()") in named["host-read"].says
    assert ".item()" in named["host-read"].says
    assert line_of(Branching, "scale > 1") in named["graph-break"].says
    assert found.layers == ()
    assert str(found).startswith("verdict: FP32 ")


def test_channels_that_are_no_multiple_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    every_remedy_helps(monkeypatch)
    case = case_of(Odd(), torch.randn(1, 16, 8, 8))
    found = list(channels.find(case))
    lines = {finding.places[0] for finding in found if finding.lane == "fp32"}
    assert lines == {
        f"first, {line_of(Odd, 'self.first(x)')}",
        f"second, {line_of(Odd, 'self.second(x)')}",
    }
    assert "16 channels in and 30 out" in found[0].says
    assert found[0].share == pytest.approx(0.25)  # half of half of the operators' time


def test_aligned_channels_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    every_remedy_helps(monkeypatch)
    assert not list(channels.find(case_of(nn.Conv2d(16, 32, 3).eval(), torch.randn(1, 16, 8, 8))))


def test_channels_whose_padding_brings_nothing_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    every_remedy_helps(monkeypatch, times=1.0)
    assert not list(channels.find(case_of(Odd(), torch.randn(1, 16, 8, 8))))


def test_a_grouped_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    every_remedy_helps(monkeypatch)
    found = {each.lane: each for each in grouped.find(case_of(Grouped(), torch.randn(1, 64, 8, 8)))}
    assert found.keys() == {"fp32", "amp"}
    assert found["amp"].places == (f"conv, {line_of(Grouped, 'return self.conv')}",)
    assert "groups=32, 2 channels a group" in found["amp"].says


def test_an_input_on_another_device() -> None:
    tensors = [torch.zeros(1, 3), torch.zeros(2, device="meta")]
    assert left_behind(tensors, torch.device("meta")) == "input 0 (float32[1, 3], 1.2e-05 MB) is on cpu"
    assert left_behind(tensors[:1], torch.device("cpu")) == ""


def test_batch_norms_are_folded_as_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    every_remedy_helps(monkeypatch)
    found = list(batch_norm.find(case_of(Normalized(), torch.randn(1, 3, 8, 8))))
    assert {each.lane for each in found} == {"fp32", "amp"}
    assert found[0].says.startswith("1 batch norm follows a convolution")
    assert found[0].share == pytest.approx(0.5)


def test_a_graph_has_no_break() -> None:
    case = case_of(Normalized(), torch.randn(1, 3, 8, 8))
    assert not list(graph_break.find(case))
    assert not list(host_reads.find(case))


@pytest.mark.gpu
def test_groups_in_float16_miss_tensor_cores() -> None:
    model = Grouped().cuda().eval()
    x = torch.randn(8, 64, 64, 64, device="cuda")
    found = ampopt.diagnose(model, x, budget_s=20, progress=False)
    named = [each for each in found.findings if each.name == "grouped-convolution" and each.lane == "amp"]
    assert line_of(Grouped, "return self.conv") in named[0].places[0]
    assert "misses Tensor Cores: 2 in and 2 out a group" in named[0].says


@pytest.mark.gpu
def test_an_input_left_on_the_cpu() -> None:
    found = ampopt.diagnose(Moving().cuda().eval(), torch.randn(1, 3, 64, 64), budget_s=20, progress=False)
    named = {finding.name: finding for finding in found.findings}
    assert line_of(Moving, "x.to(") in named["input-on-another-device"].places[0]
    assert "input 0 (float32[1, 3, 64, 64], 0.0492 MB) is on cpu" in named["input-on-another-device"].says


@pytest.mark.gpu
def test_a_batch_norm_in_training_mode_on_a_gpu() -> None:
    model = Normalized().cuda().train()
    x = torch.randn(2, 3, 64, 64, device="cuda")
    found = ampopt.diagnose(model, x, budget_s=20, progress=False)
    assert found.findings[0].name == "batch-norm-in-training-mode"
    assert line_of(Normalized, "self.norm(self.conv") in found.findings[0].places[0]


@pytest.mark.gpu
def test_item_in_forward_on_a_gpu() -> None:
    found = ampopt.diagnose(Branching().cuda(), torch.randn(1, 3, 64, 64).cuda(), budget_s=20, progress=False)
    named = {finding.name: finding for finding in found.findings}
    assert line_of(Branching, ".item()") in named["host-read"].says
    assert ".item()" in named["host-read"].says


@pytest.mark.gpu
@pytest.mark.timing
def test_channels_that_are_no_multiple_of_8_on_a_gpu() -> None:
    model, x = Misaligned().cuda().eval(), torch.randn(1, 126, 64, 64, device="cuda")
    found = ampopt.diagnose(model, x, budget_s=20, progress=False)
    named = [each for each in found.findings if each.name == "misaligned-channels"]
    assert line_of(Misaligned, "return self.conv") in named[0].places[0]
    assert "126 channels in and 126 out, no multiples of 8: its kernel is" in named[0].says
    (layer,) = (each for each in found.layers if each.work.operator == "conv2d")
    longest = layer.spent["amp"].longest
    assert ("is not one of Tensor Cores" in named[0].says) is not longest.on_tensor_cores
    assert any("run no kernel of Tensor Cores" in note for note in found.notes) is not layer.tensor_cores(
        "amp"
    )
