"""batch-norm: normalizations that the weights of the layer before them could hold."""

from __future__ import annotations

from collections.abc import Iterator

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding, counted, saved
from ampopt.passes import FoldConvBn


def find(case: Case) -> Iterator[Finding]:
    """How many there are, and their time; executed: folded (the pass fold-conv-bn)."""
    rows = [layer for layer in case.layers if layer.work.operator == "batch_norm"]
    if not rows:
        return
    for name, lane in case.lanes.items():
        ran = case.rewritten("with its batch norms folded", lane, FoldConvBn())
        if ran is None or not ran[0].helps:
            continue
        spent_ms = 1e3 * sum(layer.seconds(name) for layer in rows)
        slowest = sorted(rows, key=lambda layer: -layer.seconds(name))
        yield Finding(
            "batch-norm",
            f"{counted(ran[1], 'batch norm follows', 'batch norms follow')} a convolution or linear layer "
            f"whose weights could hold that; batch norms take {spent_ms:.3g} ms in all",
            places=tuple(layer.work.place for layer in slowest[:3] if layer.work.place),
            advice="fold them into the layer before: ampopt.optimize does (fold-conv-bn)",
            lane=name,
            share=saved(ran[0]),
            counterfactual=ran[0],
        )
