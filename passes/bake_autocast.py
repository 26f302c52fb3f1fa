"""bake-autocast: mixed precision written into the graph instead of decided anew in every call."""

from __future__ import annotations

import dataclasses

import torch

from ampopt.casting import POLICIES, decide, lower_inputs, record_autocast, result_dtypes, write_casts
from ampopt.errors import PassError
from ampopt.graph import arguments, calls, copy_of, finish
from ampopt.program import Program
from ampopt.transform import Family, Numerics, Pass, Result


@dataclasses.dataclass(frozen=True)
class BakeAutocast(Pass):
    """Write mixed precision into the graph: `op(x, w)` under autocast -> `op(cast(x), w')`.

    Rewrites: each operator gets its inputs in the dtype that the policy (`amp`, `O1`, `O2`, `half`) decides:
    weights are stored in it, inputs of the model that are only read in it enter in it, a result is cast
    once for all who want it so.
    Requires: a program of an AMP lane that still runs under autocast.
    Declines: other programs; recurrent layers, and what the model itself takes out of autocast
    (`torch.autocast(..., enabled=False)`), stay in FP32.
    Correct because: for `amp`, the graph is run once under autocast itself and every cast of an operator's
    input is noted; the shapes are constants and the graph has no control flow, so every later call would
    make the same casts. Where autocast asks an operator for another result dtype (softmax in FP32), its
    `dtype` argument says so; the result dtypes are compared with autocast's afterwards, and any difference
    is an error. The other policies choose casts by operator; each is a valid precision assignment.
    Outputs are given back in the original model's dtypes.
    Cost: a copy of the weights in the lower precision; the unrounded ones are kept for passes that compute
    new weights from them.
    """

    numerics = Numerics.APPROXIMATE
    family = Family.PLACEMENT
    portable = False
    enables_others = True

    policy: str = "amp"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise PassError(f"unknown precision policy {self.policy!r}: choose from {', '.join(POLICIES)}")

    def why_not(self, program: Program) -> str | None:
        """Only a program that runs under autocast has something to bake."""
        return "the lane does not compute in mixed precision" if program.settings.autocast is None else None

    def apply(self, program: Program) -> Result:
        """Decide, cast, compare the result dtypes; see the class."""
        dtype = program.lane_dtype
        module = copy_of(program.graph)
        plain = program.replace(settings=dataclasses.replace(program.settings, autocast=None))
        decisions = decide(self.policy, plain, module, dtype)
        expected = record_autocast(plain, module, dtype)[1] if self.policy == "amp" else {}
        expected_by_name = {node.name: want for node, want in expected.items() if node.op == "call_function"}
        entry = tuple(lower_inputs(module, decisions, program.entry))
        rewrites = max(1, write_casts(module, decisions))  # at the least, autocast itself is gone
        baked = plain.with_graph(finish(module)).replace(entry=entry)
        return Result(_with_result_dtypes(baked, expected_by_name), rewrites)


def _with_result_dtypes(program: Program, expected: dict[str, torch.dtype]) -> Program:
    """Set `dtype=` on operators whose result autocast asks for in another dtype than they give."""
    if not expected:
        return program
    module = copy_of(program.graph)
    for _ in range(2):  # the second run proves the first run's repairs
        got = {n.name: d for n, d in result_dtypes(program, module).items()}
        wrong = [n for n in calls(module) if n.name in expected and got.get(n.name) is not expected[n.name]]
        if not wrong:
            return program.with_graph(finish(module))
        for node in wrong:
            if isinstance(node.target, torch._ops.OpOverload) and "dtype" in arguments(node):
                node.update_kwarg("dtype", expected[node.name])
        module.recompile()
    names = ", ".join(node.name for node in wrong[:3])
    raise PassError(f"autocast gives {names} another result dtype than casts of their inputs can")
