"""graph-break: why the model is not one graph, and at which line."""

from __future__ import annotations

from collections.abc import Iterator

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding


def find(case: Case) -> Iterator[Finding]:
    """What the capture says; there is no counterfactual without changing the model's code."""
    if case.not_a_graph is not None:
        yield Finding(
            "graph-break",
            f"the model is not one graph: {case.not_a_graph}",
            advice="ampopt.optimize optimizes the parts that are; the whole needs this line changed",
        )
