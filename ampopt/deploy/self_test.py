"""The self-test of a bundle: inputs, and what the original makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ampopt.bundle.stored_sizes import in_corner
from ampopt.deploy.onnx_verify import OnnxVerifier
from ampopt.engines.executable import executable
from ampopt.errors import VerificationError
from ampopt.ir import numerics
from ampopt.ir.capture import Captured
from ampopt.ir.choosers import makes_choices
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.program import Program
from ampopt.measure.draws import Draw
from ampopt.measure.tied_values import tells_places
from ampopt.system.wording import argument

OTHERS = 2
"""Number of inputs like the example that may take its place in a self-test."""

LARGEST_TOLERANCE = 0.5
"""Largest tolerance of a self-test: with a larger one, outputs of zeros would pass."""


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """Inputs and the original's outputs by name, and the largest relative error of an output that passes.

    `corners` holds the same of other sizes, for a program for a range of them.
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    tolerance: float
    corners: tuple[SelfTest, ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for safetensors: contiguous copies on the CPU.

        bfloat16, which NumPy does not have, is stored as float32.
        """
        named = {f"input.{name}": t for name, t in self.inputs.items()}
        named |= {f"output.{name}": t for name, t in self.outputs.items()}
        own = {name: storable(tensor) for name, tensor in named.items()}
        for number, corner in enumerate(self.corners):
            own |= {in_corner(number, name): tensor for name, tensor in corner.tensors().items()}
        return own


def self_test_of(
    original: nn.Module,
    calls: Sequence[Captured],
    inputs: Sequence[str],
    outputs: Sequence[str],
    lanes: set[Lane],
    tolerance: float | None,
) -> SelfTest:
    """The inputs of calls, the first of which is the example's, with the original's outputs.

    These are computed in float64, and rounded to the dtypes that the original returns. Inputs like the
    example take its place where an output of it hangs on the order of equal values.
    """
    tests, bounds = [], [0.0]
    for call in calls:
        verifier = OnnxVerifier(original, call, draws=OTHERS if tells_places(call.program) else 0)
        draw = verifier.ties.first_without()
        examples = (*draw.calls[0], *call.initial_state)
        own = verifier.eager(FP32)(*examples)
        expected = [
            exact.to(mine.dtype) if mine.is_floating_point() else mine
            for exact, mine in zip(verifier.reference(draw)[0], own, strict=True)
        ]
        named = dict(zip(inputs, examples, strict=True)), dict(zip(outputs, expected, strict=True))
        tests.append(named)
        if tolerance is None:
            bounds += [lane.limits.allowed(_usual_error(verifier, lane, draw)) for lane in lanes]
    allowed = min(max(bounds), LARGEST_TOLERANCE) if tolerance is None else tolerance
    example, *corners = [SelfTest(*named, allowed) for named in tests]
    return dataclasses.replace(example, corners=tuple(corners))


def _usual_error(verifier: OnnxVerifier, lane: Lane, draw: Draw) -> float:
    """Eager's largest error on a draw in a lane, or what rounding changes there; overflow is none."""
    own = verifier.own_errors(lane, draw)
    jumps = (verifier.largest_jump(lane, draw, output) for output in range(len(own)))
    return max([*jumps, *(error for error in own if error < 1.0)], default=0.0)


def pass_test(program: Program, test: SelfTest) -> None:
    """Raise VerificationError where a program would not pass its bundle's self-test, and so not be loaded."""
    outputs = executable(program)(*test.inputs.values())
    for (name, expected), output in zip(test.outputs.items(), outputs, strict=True):
        error = numerics.relative_error(output, expected)
        if not error <= test.tolerance:
            raise VerificationError(
                f"a bundle of this model would not load, and was not written: on inputs of {_shapes(test)}, "
                f"output {name!r} of its program has an error of {error:.2g} against the model in float64, "
                f"over {test.tolerance:.2g}; {_advice(program)}"
            )


def _advice(program: Program) -> str:
    """What to do about a program that does not pass."""
    larger = f"optimize with a larger {argument('tolerance=')}"
    if program.lane.is_mixed and makes_choices(program.graph):
        return (
            f"{larger}, or with {argument('precision', FP32.name)}: the model takes the places of the "
            f"largest values, which may be others in {program.lane.name}, and a self-test holds one result"
        )
    return f"{larger} to accept that"


def _shapes(test: SelfTest) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in test.inputs.values())


def storable(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu().contiguous().clone()
    return plain.float() if plain.dtype is torch.bfloat16 else plain
