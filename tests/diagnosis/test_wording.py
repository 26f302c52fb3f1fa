"""What findings say: numbers in the singular, causes only where they are ones, figures that fit together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from ampopt.diagnosis.finding import Counterfactual
from ampopt.diagnosis.findings import FINDINGS, cpu_threads, in_order, mixed_precision
from ampopt.diagnosis.operators import Spent
from ampopt.diagnosis.verdict import on_which_machine, verdict, where_time_goes
from ampopt.measure.headline import Load
from ampopt.measure.sampling import Measurement, gain
from tests.support.cases import case_of, every_remedy_helps

X = torch.randn(2, 3, 12, 12)


class OfEachOne(nn.Module):
    """Has one of each thing that findings count."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4)
        self.groups, self.drop = nn.Conv2d(4, 4, 3, groups=4), nn.Dropout(0.5)
        self.first, self.second = nn.Linear(4, 9), nn.Linear(9, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.groups(self.norm(self.conv(x)).relu()).mean((2, 3))
        return self.drop(self.second(self.first(x)) * (self.scale * 2))  # type: ignore[no-any-return]


def test_what_is_one_is_told_in_the_singular(monkeypatch: pytest.MonkeyPatch) -> None:
    every_remedy_helps(monkeypatch)
    times = {"conv2d": Spent(1e-3, casts=1), "conv2d_1": Spent(1e-2)}
    case = case_of(OfEachOne(), X[:, :1], spent=lambda name: times.get(name, Spent(1e-3)))
    told = [each.says for find in FINDINGS for each in find(case)]
    for one in (
        "1 batch norm follows a convolution",
        "autocast makes 1 cast, which takes",
        "1 grouped convolution takes",
        "depthwise, 1 channel a group",
        "conv2d has 1 channel in and 4 out",
        "1 operator does nothing in inference",
        "1 operator computes the same in every call",
        "1 linear layer follows another",
    ):
        assert any(one in says for says in told), one


@pytest.mark.parametrize(("load", "is_busy"), [(None, False), (Load(2.0, 2), False), (Load(4.5, 2), True)])
def test_a_busy_machine_is_told_in_the_verdict_and_its_threads_are_tried_first(
    load: Load | None, is_busy: bool
) -> None:
    case = dataclasses.replace(case_of(OfEachOne(), X[:, :1], spent=lambda name: Spent(1e-3)), load=load)
    said = " on a busy machine (load average 4.5 on 2 cores)"
    assert on_which_machine(load) == (said if is_busy else "")
    assert f" ms a call{on_which_machine(load)}: " in verdict(case, ())
    order = in_order(is_busy=case.is_busy)
    assert (order[0] is cpu_threads.find) is is_busy
    assert set(order) == set(FINDINGS)
    assert len(order) == len(FINDINGS)


@pytest.mark.parametrize(
    ("seconds", "said", "is_launch"),
    [
        (1e-3, "none of compute, memory and launches explains the operators' time: of the nearest, ", False),
        (3e-6, "100% of the operators' time is bound by launch, at 33% of what this device reaches", False),
        (1.5e-6, "100% of the operators' time is bound by launch, at 67% of what this device reaches", True),
    ],
)
def test_the_largest_of_three_limits_is_a_cause_only_where_it_is_near(
    seconds: float, said: str, is_launch: bool
) -> None:
    case = case_of(nn.ReLU(), X[:1, :1], latency_ms={"fp32": 5, "amp": 10}, spent=lambda name: Spent(seconds))
    assert where_time_goes(case).startswith(said)
    (found,) = mixed_precision.find(case)
    assert ("their launch costs most" in found.says) is is_launch
    assert [layer.cause("fp32") for layer in case.layers] == [None if seconds == 1e-3 else "launch"]


STEADY = Measurement((1e-3,) * 20)
"""A call that takes 1 ms."""


def of_two_loads(times: float) -> tuple[Measurement, Measurement]:
    """Two ways in turn, the second `times` faster, on a machine that becomes slower in the midst.

    So many of the second way's samples are slow, too, that the medians come from different sides of that.
    """
    fast = [1e-3] * 9 + [2e-3] * 11
    slow = [times * each for each in fast]
    fast[9:11] = [1e-3] * 2
    return Measurement(tuple(slow)), Measurement(tuple(fast))


def test_medians_that_have_another_ratio_than_the_pairs_are_told_without_a_figure() -> None:
    slow, fast = of_two_loads(1.11)
    ran = Counterfactual("in FP32", slow, fast, gain(slow, fast))
    assert not ran.fits
    assert str(ran) == (
        "in FP32, a call takes 1 ms instead of 2.22 in the median; pair by pair it is 1.11 to "
        "1.11 times as fast"
    )
    case = case_of(nn.ReLU(), X)
    case.latency = {"fp32": fast, "amp": slow}
    (found,) = mixed_precision.find(case)
    assert found.says.startswith("AMP is slower than FP32")
    case.latency = {"fp32": slow, "amp": fast}
    (found,) = mixed_precision.find(case)
    assert found.says.startswith("AMP is faster: ")


def test_medians_that_fit_have_the_figure() -> None:
    slow = Measurement(tuple(2e-3 * (1 + place % 5 / 100) for place in range(20)))
    ran = Counterfactual("folded", slow, STEADY, gain(slow, STEADY))
    assert ran.fits
    assert str(ran).startswith("folded, a call takes 1 ms instead of 2.04 (2.04x, ")
    assert ran.times == "2.04x "
