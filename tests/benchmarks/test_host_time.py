"""What a call costs beyond its kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampopt.passes import FoldConvBn
from benchmarks.host_time import beyond_replay
from tests.ampopt.planted import module_of
from tests.ampopt.small_net import PASSES, image, net


@pytest.mark.gpu
def test_the_call_of_a_captured_program_is_compared_with_the_replay_of_its_graph() -> None:
    x = image()
    fast = module_of(net(), x, passes=PASSES)
    found = beyond_replay(fast, (x,), x.device)
    assert found is not None
    assert abs(found) < 1e3


def test_there_is_nothing_to_say_of_programs_without_a_graph() -> None:
    x = torch.randn(1, 3, 8, 8)
    fast = module_of(nn.Conv2d(3, 4, 1), x, passes=(FoldConvBn(),))
    assert beyond_replay(fast, (x,), x.device) is None
