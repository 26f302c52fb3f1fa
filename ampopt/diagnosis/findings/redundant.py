"""redundant-algebra: operators that compute nothing new, or the same in every call."""

from __future__ import annotations

from collections.abc import Iterator

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding, saved
from ampopt.ir.lanes import FP32
from ampopt.passes import FoldConstants, MergeLinearChain, RemoveInferenceNoops

_PASSES = {
    RemoveInferenceNoops(): "{} operators do nothing in inference",
    FoldConstants(): "{} operators compute the same in every call",
    MergeLinearChain(): "{} linear layers follow another with nothing between them",
}


def find(case: Case) -> Iterator[Finding]:
    """What the passes of the algebra find to rewrite; executed: the rewritten graph."""
    for step, says in _PASSES.items():
        ran = case.rewritten(f"without them ({step.name})", FP32, step)
        if ran is None or not ran[0].helps:
            continue
        yield Finding(
            step.name,
            says.format(ran[1]),
            advice=f"ampopt.optimize rewrites them ({step.name})",
            share=saved(ran[0]),
            counterfactual=ran[0],
        )
