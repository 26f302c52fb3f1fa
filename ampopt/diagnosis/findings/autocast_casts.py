"""autocast-casts: conversions that autocast makes in every call."""

from __future__ import annotations

from collections.abc import Iterator

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding, counted, saved
from ampopt.passes import BakeAutocast


def find(case: Case) -> Iterator[Finding]:
    """How many casts autocast makes, and their time; executed: weights stored in the lane's dtype."""
    for name, lane in case.lanes.items():
        if not lane.is_mixed:
            continue
        casting = [layer for layer in case.layers if name in layer.spent and layer.spent[name].casts]
        if not casting:
            continue
        spent = [layer.spent[name] for layer in casting]
        count, seconds = sum(each.casts for each in spent), sum(each.casts_s for each in spent)
        ran = case.rewritten("with the casts in the graph and the weights cast once", lane, BakeAutocast())
        if ran is None or not ran[0].helps:
            continue
        worst = sorted(casting, key=lambda layer: -layer.spent[lane.name].casts_s)
        yield Finding(
            "autocast-casts",
            f"autocast makes {counted(count, 'cast, which takes', 'casts, which take')} {1e3 * seconds:.3g} "
            "ms of every call, and decides about casts at every operator: the remedy saves both",
            places=tuple(layer.work.place for layer in worst[:3] if layer.work.place),
            advice="cast the weights once: ampopt.optimize bakes autocast into the graph",
            lane=name,
            share=saved(ran[0]),
            counterfactual=ran[0],
        )
