"""tf32: products in strict FP32 on a GPU that has TF32."""

from __future__ import annotations

from collections.abc import Iterator

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding, saved
from ampopt.ir.lanes import FP32
from ampopt.passes import AllowTf32, SearchConvAlgorithms

_PASSES = {
    AllowTf32(): ("products do not use TF32", "in TF32", 'torch.set_float32_matmul_precision("high")'),
    SearchConvAlgorithms(): (
        "cuDNN takes the algorithms of its heuristic",
        "with searched algorithms",
        "torch.backends.cudnn.benchmark = True, if shapes do not vary",
    ),
}


def find(case: Case) -> Iterator[Finding]:
    """Executed: the graph with TF32, and with cuDNN's algorithm search."""
    if case.device.type != "cuda":
        return
    for step, (says, change, advice) in _PASSES.items():
        ran = case.with_passes(change, FP32, step)
        if ran is not None and ran[0].helps:
            yield Finding(step.name, says, advice=advice, share=saved(ran[0]), counterfactual=ran[0])
