"""The export of a graph to ONNX takes no stacks of Python's frames, and puts the switch for them back."""

from __future__ import annotations

import pytest
import torch
import torch.fx.config

from ampopt.engines.onnx_graph import to_onnx
from ampopt.engines.onnx_stacks import without_stacks
from tests.helpers import Model, program_of
from tests.support.exporting import X

pytest.importorskip("onnxscript")


SWITCH = "do_not_emit_stack_traces"
needs_the_switch = pytest.mark.skipif(
    not hasattr(torch.fx.config, SWITCH), reason=f"torch {torch.__version__} has no switch for stacks"
)


class _NoStack:
    @staticmethod
    def extract() -> None:
        """Refuse what costs more than the tracing itself."""
        raise AssertionError("a stack was taken")


@needs_the_switch
def test_an_export_of_a_program_takes_no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda m, x: x.relu().cumsum(1))
    program = program_of(model, X)
    monkeypatch.setattr("torch.fx.proxy.CapturedTraceback", _NoStack)
    to_onnx(program, io=None, target="onnxruntime", input_names=["x"], output_names=["y"], dims=({},))


@needs_the_switch
@pytest.mark.parametrize("before", [False, True])
def test_the_switch_is_as_it_was_also_after_an_error(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        assert getattr(torch.fx.config, SWITCH)
        raise ValueError("wrong")

    monkeypatch.setattr(torch.fx.config, SWITCH, before)
    with pytest.raises(ValueError, match="wrong"), without_stacks():
        fail()
    assert getattr(torch.fx.config, SWITCH) is before


def test_a_version_without_the_switch_has_none_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.fx.config, SWITCH, raising=False)
    with without_stacks():
        assert not hasattr(torch.fx.config, SWITCH)
    assert not hasattr(torch.fx.config, SWITCH)
