"""An operator of the user's that writes to its arguments, which a graph has in a higher-order operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import ExportError
from ampopt.ir.cuda_autocast import with_widening_casts
from ampopt.ir.emulated_half import EmulatedHalf
from ampopt.ir.graph import aten, calls
from ampopt.passes import BakeAutocast
from tests.helpers import BF16, Model, eager_of, program_of
from tests.support.planted import module_of

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@torch.library.custom_op("test_writing_operators::clamped", mutates_args={"x"})
def clamped(x: Tensor) -> None:
    """Clamps its argument where it lies, in any dtype."""
    x.clamp_(-0.5, 0.5)


def net() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.first(x) * 2
        clamped(y)
        return torch.softmax(m.second(y), 1)

    torch.manual_seed(0)
    return Model(forward, first=nn.Conv2d(3, 4, 3), second=nn.Conv2d(4, 5, 1)).eval()


@pytest.mark.parametrize("policy", ["amp", "O1", "O2", "half"])
def test_it_has_a_lane_of_mixed_precision(policy: str) -> None:
    program = BakeAutocast(policy).apply(BF16.start(program_of(net(), X))).program
    assert not program.under_autocast
    assert {weight.dtype for weight in program.graph.state_dict().values()} == {torch.bfloat16}
    (found,), (expected,) = program.run(X), eager_of(net(), [X], BF16)
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.02, atol=0.01)


def test_float16_autocast_is_followed_through_it() -> None:
    program = program_of(net(), X)
    (softmax,) = calls(with_widening_casts(program).graph, [aten.softmax.int])
    assert softmax.all_input_nodes[0].target is aten._to_copy.default


def test_it_runs_where_float16_is_computed_in_float32() -> None:
    program = program_of(net(), X)
    expected = program.run(X)[0]
    with EmulatedHalf():
        assert torch.equal(program.run(X)[0], expected)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_it_is_no_operator_of_onnx(precision: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"ONNX cannot express .*test_writing_operators"):
        module_of(net(), X).export_onnx(tmp_path / "m.onnx", precision=precision)
    assert list(tmp_path.iterdir()) == []
