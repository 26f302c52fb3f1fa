"""The verdict: one sentence from the latencies and the first finding."""

from __future__ import annotations

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Finding, milliseconds
from ampopt.diagnosis.layers import LITTLE
from ampopt.measure.headline import Load


def verdict(case: Case, findings: tuple[Finding, ...]) -> str:
    """How long a call takes in each lane, and what costs most of it."""
    found = [f"{name.upper()} {milliseconds(measured.median)} ms" for name, measured in case.latency.items()]
    found += [f"{name.upper()} over {1e3 * seconds:.0f} ms" for name, seconds in case.too_slow.items()]
    telling = next((each for each in findings if each.is_fault or each.share > 0), None)
    why = where_time_goes(case) if telling is None else f"{telling.says} [{telling.lane}]"
    ran = telling.counterfactual if telling is not None else None
    taken = f"{', '.join(found)} a call{on_which_machine(case.load)}"
    return f"{taken}: {why}{f'; {ran}' if ran is not None else ''}."


def on_which_machine(load: Load | None) -> str:
    """Whose times a verdict tells, where the machine was busy; empty where it was not."""
    return "" if load is None or not load.is_high else f" on a busy machine ({load})"


def where_time_goes(case: Case, lane: str = "fp32") -> str:
    """`71 % of the operators' time is bound by compute, at 62 % of what this device reaches`.

    It is told of what explains most of the time. The largest of three limits is no cause where the operators
    are far from it, too: then it is said that none is.
    """
    total = sum(layer.seconds(lane) for layer in case.layers)
    if not total:
        return "no operator could be timed"
    by_bound: dict[str, float] = {}
    reached: dict[str, float] = {}
    for layer in case.layers:
        if lane in layer.spent:
            bound = layer.bounds[lane]
            by_bound[bound] = by_bound.get(bound, 0.0) + layer.seconds(lane)
            reached[bound] = reached.get(bound, 0.0) + layer.seconds(lane) * layer.reached[lane]
    most = max(reached, key=lambda bound: reached[bound])
    ceiling = reached[most] / by_bound[most] if by_bound[most] else 0.0
    if ceiling < LITTLE:
        return (
            f"none of compute, memory and launches explains the operators' time: of the nearest, {most}, "
            f"they reach {ceiling:.0%}"
        )
    return (
        f"{by_bound[most] / total:.0%} of the operators' time is bound by {most}, at {ceiling:.0%} of what "
        "this device reaches"
    )
