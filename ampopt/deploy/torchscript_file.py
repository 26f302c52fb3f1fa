"""Writes a program as a TorchScript file for C++ that contains its own self-test.

TorchScript archives contain pickles: C++ code reads this file, from a trusted source; ampopt never does.
"""

import io
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ampopt.errors import ExportError
from ampopt.ir.capturing import capturing
from ampopt.ir.graph import calls, where
from ampopt.ir.numerics import relative_error
from ampopt.ir.program import Program
from ampopt.ir.signature import describe
from ampopt.ir.traced_forms import graph_to_trace

# No `from __future__ import annotations` here: TorchScript reads the types of `_File.forward`.

ATTRIBUTES = ("self_test_inputs", "self_test_outputs", "tolerance", "device", "tf32", "search_algorithms")
"""Attributes that C++ reads along with `forward`: two tensor lists, float, "cpu" or "cuda", two booleans."""

CALLS = 3
"""The number of calls of the self-test before a file is written: a call may change what later ones read."""


class _Bordered(nn.Module):
    """A program's graph with the conversions of its border: a list of tensors to a list of tensors."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._entry, self._exit = program.entry, program.exit
        self.graph = graph_to_trace(program)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        entered = [border.convert(t) for border, t in zip(self._entry, inputs, strict=True)]
        outputs = self.graph(*entered)
        return [border.convert(t) for border, t in zip(self._exit, outputs, strict=True)]


class _File(nn.Module):
    """What is written: a traced program, and the attributes that C++ reads."""

    def __init__(
        self,
        traced: torch.jit.ScriptModule,
        program: Program,
        inputs: list[Tensor],
        outputs: list[Tensor],
        tolerance: float,
    ) -> None:
        super().__init__()
        self.program = traced
        self.self_test_inputs = inputs
        self.self_test_outputs = outputs
        self.tolerance = tolerance
        self.device = program.device.type
        self.tf32 = program.settings.tf32
        self.search_algorithms = program.settings.search_algorithms

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        outputs: list[Tensor] = self.program(inputs)
        return outputs


def write_torchscript(
    program: Program, inputs: Sequence[Tensor], outputs: Sequence[Tensor], tolerance: float
) -> bytes:
    """The bytes of a TorchScript file whose `forward(List[Tensor]) -> List[Tensor]` is the program.

    The flat tensors are those at the program's border, and the file includes the border's conversions of
    dtype and memory format; an output that depends on no input is a constant of the file, which callers must
    not write to. The engine or CUDA graph of this process is not stored. `inputs` and `outputs` become the
    file's self-test: an output's relative error, as `numerics.relative_error` defines it, may be at most
    `tolerance`. The file is read back and has to pass its own test.

    Raises ExportError if TorchScript or C++ cannot run the program, the self-test does not fit it, or the
    file does not pass.
    """
    if reason := why_not_torchscript(program) or _misfit(program, inputs, outputs):
        raise ExportError(f"no TorchScript file can be written of this program: {reason}")
    kept = [tensor.detach().cpu().clone() for tensor in inputs]
    expected = [tensor.detach().cpu().clone() for tensor in outputs]
    try:
        data = _serialized(program, kept, expected, float(tolerance))
        with program.scope():
            loaded = torch.jit.load(io.BytesIO(data))
            results = [loaded([t.to(program.device) for t in kept]) for _ in range(CALLS)]
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ExportError(f"TorchScript cannot run this program: {reason}") from error
    pairs = [both for found in results for both in zip(found, expected, strict=True)]
    error_found = max(relative_error(y.cpu(), ref) for y, ref in pairs)
    if not error_found <= tolerance:
        raise ExportError(
            f"the TorchScript file fails its own self-test: the error is {error_found:.2g}, over the "
            f"tolerance {tolerance:.2g}. Were inputs and outputs those of this program?"
        )
    return data


def _serialized(program: Program, inputs: list[Tensor], outputs: list[Tensor], tolerance: float) -> bytes:
    """Trace in the program's settings, which convolutions keep as constants; freeze; save."""
    with capturing(), program.scope():
        traced = torch.jit.trace(
            _Bordered(program), ([example.clone() for example in program.examples],), check_trace=False
        )
        module = torch.jit.script(_File(traced, program, inputs, outputs, tolerance).eval())
        # The passes have made the choices that "numerics" would make anew.
        frozen = torch.jit.freeze(module, preserved_attrs=list(ATTRIBUTES), optimize_numerics=False)
        buffer = io.BytesIO()
        torch.jit.save(frozen, buffer)
    return buffer.getvalue()


def why_not_torchscript(program: Program) -> str | None:
    """Why C++ could not run the trace of the program."""
    if program.under_autocast:
        return "it still runs under autocast, which a trace does not see (bake-autocast writes its casts out)"
    if any(buffer.is_mkldnn for buffer in program.graph.buffers()):
        return "its weights are packed for oneDNN, which a trace cannot hold: give its portable form"
    for node in calls(program.graph):
        overload = node.target
        if isinstance(overload, torch._ops.OpOverload) and overload.namespace != "aten":
            return f"LibTorch does not have the operator {overload} of {where(node)}: give its portable form"
    return None if program.entry and program.exit else "it has no tensor as an input, or none as an output"


def _misfit(program: Program, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str | None:
    """Why the self-test is not one for this program."""
    for name, given, wanted in (("input", inputs, program.entry), ("output", outputs, program.exit)):
        if len(given) != len(wanted):
            return f"the self-test has {len(given)} {name} tensors, and the program {len(wanted)}"
    for index, (tensor, example) in enumerate(zip(inputs, program.examples, strict=True)):
        if tensor.shape != example.shape:
            return f"input {index} of the self-test is {describe(tensor)}, the program's {describe(example)}"
    return None
