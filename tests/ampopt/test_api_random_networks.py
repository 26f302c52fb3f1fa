"""optimize on random small networks: with every correct pass kept, fresh inputs get the right answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ampopt
from ampopt.numerics import relative_error
from tests.ampopt.planted import optimize
from tests.helpers import BF16, FP32, eager_of, largest_error, reference_of, with_statistics

CHANNELS = 4
KINDS = (
    *("conv", "conv", "bn", "bn", "relu", "relu_", "silu_", "maxpool", "avgpool", "residual"),
    *("grouped", "depthwise", "concat", "dropout", "view_write", "transposed", "pad", "same_conv"),
)


class RandomNetwork(nn.Module):
    """A chain of layers by their kinds; one conv and its batch norm are shared by all `same_conv`."""

    def __init__(self, kinds: list[str], bias: bool) -> None:
        super().__init__()
        self.kinds, c = kinds, CHANNELS
        self.shared = nn.Conv2d(c, c, 1, bias=bias)
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        made: dict[str, Callable[[], nn.Module]] = {
            "conv": lambda: nn.Conv2d(c, c, 3, padding=1, bias=bias),
            "bn": lambda: nn.BatchNorm2d(c),
            "relu": nn.ReLU,
            "relu_": lambda: nn.ReLU(inplace=True),
            "silu_": lambda: nn.SiLU(inplace=True),
            "maxpool": lambda: nn.MaxPool2d(2, ceil_mode=True),
            "avgpool": lambda: nn.AvgPool2d(3, 1, 1),
            "residual": lambda: nn.Conv2d(c, c, 1, bias=bias),
            "grouped": lambda: nn.Conv2d(c, c, 3, padding=1, groups=2, bias=bias),
            "depthwise": lambda: nn.Conv2d(c, c, 3, padding=1, groups=c, bias=bias),
            "concat": lambda: nn.Conv2d(2 * c, c, 1, bias=bias),
            "transposed": lambda: nn.ConvTranspose2d(c, c, 2, groups=2, bias=bias),
            "pad": lambda: nn.ReflectionPad2d(0),
            "dropout": lambda: nn.Dropout(0.5),
        }
        self.layers = nn.ModuleList(made.get(kind, nn.Identity)() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stem(x)
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind == "residual":
                z = layer(y)
                z += y
                y = z
            elif kind == "concat":
                y = layer(torch.cat([y, y.relu()], 1))
            elif kind == "view_write":
                y = y.clone()
                y[:, 0] += 1
                y[:, 1:3].mul_(0.5)
            elif kind == "same_conv":
                y = self.shared(y)
            else:
                y = layer(y)
        return y


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=9),
    bias=st.booleans(),
    precision=st.sampled_from(["fp32", "amp"]),
    side=st.sampled_from([9, 16]),
    seed=st.integers(0, 2**16),
)
def test_a_random_network_with_every_pass_kept_is_right_on_fresh_inputs(
    all_kept: contextlib.AbstractContextManager[None],
    kinds: list[str],
    bias: bool,
    precision: str,
    side: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    model = with_statistics(RandomNetwork(kinds, bias))
    x = torch.randn(2, 3, side, side)
    with all_kept:
        fast = optimize(model, x, precision=precision)
    assert isinstance(fast, ampopt.OptimizedModule)
    lane, floor = (FP32, 1e-5) if precision == "fp32" else (BF16, 2.0**-6)
    for fresh in (x, torch.randn_like(x), torch.randn(1, 3, side + 1, side)):
        reference = reference_of(model, [fresh])
        own = largest_error(eager_of(model, [fresh], lane), reference)
        assert relative_error(fast(fresh), reference[0]) <= max(6 * own, floor), fast.report
