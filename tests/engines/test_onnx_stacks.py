"""The export of a graph to ONNX takes no stacks of Python's frames, and puts the switch for them back."""

from __future__ import annotations

import pytest
from torch import fx

from ampopt.engines.onnx_graph import to_onnx
from ampopt.engines.onnx_stacks import without_stacks
from tests.helpers import Model, program_of
from tests.support.exporting import X

pytest.importorskip("onnxscript")


class _NoStack:
    @staticmethod
    def extract() -> None:
        """Refuse what costs more than the tracing itself."""
        raise AssertionError("a stack was taken")


def test_an_export_of_a_program_takes_no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda m, x: x.relu().cumsum(1))
    program = program_of(model, X)
    monkeypatch.setattr("torch.fx.proxy.CapturedTraceback", _NoStack)
    to_onnx(program, io=None, target="onnxruntime", input_names=["x"], output_names=["y"], dims=({},))


@pytest.mark.parametrize("before", [False, True])
def test_the_switch_is_as_it_was_also_after_an_error(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        assert fx.config.do_not_emit_stack_traces
        raise ValueError("wrong")

    monkeypatch.setattr(fx.config, "do_not_emit_stack_traces", before)
    with pytest.raises(ValueError, match="wrong"), without_stacks():
        fail()
    assert fx.config.do_not_emit_stack_traces is before
