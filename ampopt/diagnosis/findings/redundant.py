"""redundant-algebra: operators that compute nothing new, or the same in every call."""

from __future__ import annotations

from collections.abc import Iterator

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding, counted, saved
from ampopt.ir.lanes import FP32
from ampopt.passes import FoldConstants, MergeLinearChain, RemoveInferenceNoops

_PASSES = {
    RemoveInferenceNoops(): ("operator does", "operators do", "nothing in inference"),
    FoldConstants(): ("operator computes", "operators compute", "the same in every call"),
    MergeLinearChain(): (
        *("linear layer follows", "linear layers follow"),
        "another with nothing between them",
    ),
}
"""What each finds: words for one, for several, and for what they do."""


def find(case: Case) -> Iterator[Finding]:
    """What the passes of the algebra find to rewrite; executed: the rewritten graph."""
    for step, (one, many, does) in _PASSES.items():
        ran = case.rewritten(f"without them ({step.name})", FP32, step)
        if ran is None or not ran[0].helps:
            continue
        yield Finding(
            step.name,
            f"{counted(ran[1], one, many)} {does}",
            advice=f"ampopt.optimize rewrites them ({step.name})",
            share=saved(ran[0]),
            counterfactual=ran[0],
        )
