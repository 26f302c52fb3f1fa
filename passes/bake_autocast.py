"""bake-autocast: write mixed-precision casts into the graph, so that autocast is not needed in each call."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from ampopt.errors import PassError
from ampopt.ir.casting import POLICIES, Decisions, decide, record_autocast, result_dtypes
from ampopt.ir.graph import add_rounded, arguments, aten, calls, copy_of, finish, insert_call
from ampopt.ir.narrow_convs import keep_narrow_convs_in_fp32
from ampopt.ir.program import Border, Program
from ampopt.ir.transform import Family, Numerics, Pass, Result


@dataclasses.dataclass(frozen=True)
class BakeAutocast(Pass):
    """Write mixed precision into the graph: `op(x, w)` under autocast -> `op(cast(x), w')`.

    Rewrites: each operator gets its inputs in the dtype that the policy (`amp`, `O1`, `O2`, `half`) decides:
    weights are stored in it, model inputs that are only read in it, or given in it, enter in it, and a
    result is cast once for all its readers.
    Requires: a program of an AMP lane that still runs under autocast.
    Declines: other programs. Recurrent layers, parts that the model excludes from autocast
    (`torch.autocast(..., enabled=False)`), and on a CPU the convolutions that PyTorch computes wrongly below
    FP32 (`ampopt.ir.narrow_convs`, whose results are cast) stay in FP32, or in their weights' dtype; the
    graph's own casts do not change.
    Correct because: for `amp`, the graph is run once under autocast itself and every cast of an operator's
    input is noted; the shapes are constants and the graph has no control flow, so every later call would make
    the same casts. Where autocast asks an operator for another result dtype (softmax in FP32), its `dtype`
    argument says so; the result dtypes are compared with autocast's afterwards, and any difference is an
    error. The other policies choose casts by operator; each is a valid precision assignment. Outputs are
    returned in the original model's dtypes.
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
        """Declines programs that do not run under autocast."""
        return "the lane does not compute in mixed precision" if not program.under_autocast else None

    def apply(self, program: Program) -> Result:
        """Choose dtypes, insert casts, compare the result dtypes with autocast's; see the class."""
        dtype = program.lane.dtype
        module = copy_of(program.graph)
        plain = program.replace(under_autocast=False)
        keep_narrow_convs_in_fp32(program, module)
        decisions = decide(self.policy, plain, module, dtype)
        expected = record_autocast(plain, module, dtype)[1] if self.policy == "amp" else {}
        expected_by_name = {node.name: want for node, want in expected.items() if node.op == "call_function"}
        entry = tuple(_lower_inputs(module, decisions, program))
        rewrites = max(1, _bake(module, decisions))  # at the least, autocast itself is gone
        baked = plain.with_graph(finish(module)).replace(entry=entry)
        return Result(_with_result_dtypes(baked, expected_by_name), rewrites)


def _lower_inputs(module: fx.GraphModule, decisions: Decisions, program: Program) -> list[Border]:
    """The borders of the inputs; one that every reader wants in the same other dtype enters in it.

    An input that is given in a dtype that one reader wants enters as it is, and is cast for the others.
    """
    borders = []
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, border, example in zip(placeholders, program.entry, program.examples, strict=True):
        wanted = {decisions.get(user, {}).get(node) for user in node.users}
        if len(wanted) > 1 and example.dtype in wanted:
            for user in node.users:
                decisions.setdefault(user, {}).setdefault(node, border.dtype)
            wanted = {example.dtype}
        if len(wanted) == 1 and (dtype := wanted.pop()) is not None:
            for user in node.users:
                if decisions[user][node] is dtype:
                    del decisions[user][node]
            border = dataclasses.replace(border, dtype=dtype)
        borders.append(border)
    return borders


def _bake(module: fx.GraphModule, decisions: Decisions) -> int:
    """Give each call its inputs as decided; count the inputs that changed."""
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    count = 0
    for node in calls(module):
        for source, dtype in decisions.get(node, {}).items():
            if (source, dtype) not in made:
                made[source, dtype] = _cast(module, source, dtype, first_reader=node)
            node.replace_input_with(source, made[source, dtype])
            count += 1
    return count


def _cast(module: fx.GraphModule, source: fx.Node, dtype: torch.dtype, first_reader: fx.Node) -> fx.Node:
    if source.op == "get_attr":
        weight = getattr(module, str(source.target))
        return add_rounded(module, f"{source.name}_{dtype}".replace("torch.", ""), weight, dtype, source)
    return insert_call(module, first_reader, aten._to_copy.default, source, dtype=dtype)


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
