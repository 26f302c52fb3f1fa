"""mixed-precision: whether AMP pays here, and why not where it does not."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ampopt.diagnosis.case import Case
from ampopt.diagnosis.finding import Counterfactual, Finding, counted, milliseconds
from ampopt.diagnosis.findings.grouped import grouped
from ampopt.diagnosis.layers import Layer
from ampopt.diagnosis.verdict import where_time_goes
from ampopt.ir.lanes import Lane
from ampopt.measure.report import interval
from ampopt.measure.sampling import gain

FAST = 1.5
"""A lower precision whose products are less than this many times faster than FP32's is not fast here."""

OFTEN = 0.5
"""What takes more than this share of the time, such as a kind of operators, decides about the whole."""


SLOWER = 1.1
"""Operators that take this many times longer in a lane are told."""


def find(case: Case) -> Iterator[Finding]:
    """AMP against FP32, both executed, with the reason that the measurements give."""
    for name, lane in case.lanes.items():
        if not lane.is_mixed:
            continue
        reasons = ", and ".join(why_amp_gains_little(case, lane))
        if name in case.too_slow:
            times = case.too_slow[name] / case.latency["fp32"].median
            says = f"AMP takes over {times:.0f} times as long as FP32"
            yield Finding(
                "amp-harmful",
                _with(says, reasons),
                advice="stay in FP32 here",
                lane=name,
                share=1 - 1 / times,
            )
            continue
        if name not in case.latency:
            continue
        yield from _compared(case, lane, reasons)


def _compared(case: Case, lane: Lane, reasons: str) -> Iterator[Finding]:
    fp32, amp = case.latency["fp32"], case.latency[lane.name]
    gained, lost = gain(fp32, amp), gain(amp, fp32)
    if gained.is_vague and gained.low <= 1 <= gained.high:
        case.notes.append(f"the times vary too much to tell whether AMP is faster: {interval(gained)}")
    elif gained.is_real:
        ran = Counterfactual("in AMP", fp32, amp, gained)
        yield Finding(
            "amp-pays",
            _with(f"AMP is {ran.times}faster", where_time_goes(case) if case.layers else ""),
            advice="torch.autocast, if its error is small enough: see the errors by layer",
            share=1 - 1 / gained.ratio,
            counterfactual=ran,
        )
    else:
        ran = Counterfactual("in FP32", amp, fp32, lost)
        says = f"{ran.times}slower" if lost.is_real else "no faster"
        yield Finding(
            "amp-harmful" if lost.is_real else "amp-useless",
            _with(f"AMP is {says} than FP32", reasons),
            advice="stay in FP32; ampopt.optimize tries whether AMP pays without its overhead",
            lane=lane.name,
            share=1 - 1 / lost.ratio if lost.is_real else 0.0,
            counterfactual=ran,
        )


def _with(says: str, reasons: str) -> str:
    return f"{says}: {reasons}" if reasons else says


def why_amp_gains_little(case: Case, lane: Lane) -> Iterator[str]:
    """Reasons that are measured; none if there are none."""
    low, rates = str(lane.dtype).removeprefix("torch."), case.ceilings.rates
    if low in rates and rates[low] < FAST * rates["fp32"]:
        lacks = "" if case.device.type == "cuda" or has_bfloat16() else " (it has no bfloat16 instructions)"
        yield (
            f"this device reaches {rates[low] / 1e12:.2g} TFLOP/s in {low} and "
            f"{rates['fp32'] / 1e12:.2g} in FP32{lacks}"
        )
    total = sum(layer.seconds("fp32") for layer in case.layers) or 1.0
    launched = (layer for layer in case.layers if _is_launch(layer))
    launch = sum(layer.seconds("fp32") for layer in launched) / total
    if launch > OFTEN:
        yield f"{launch:.0%} of the operators' time is in operators so small that their launch costs most"
    deep = {name for name, (conv, _) in grouped(case) if conv.weight_shape[1] == 1}
    share = sum(layer.seconds("fp32") for layer in case.layers if layer.name in deep) / total
    if share > OFTEN:
        yield f"{share:.0%} of the time is in depthwise convolutions, which have no fast path"
    casts = [layer.spent[lane.name] for layer in case.layers if lane.name in layer.spent]
    spent, whole = sum(each.casts_s for each in casts), sum(each.seconds for each in casts)
    if casts and spent > 0.1 * whole:
        number = counted(sum(each.casts for each in casts), "cast takes", "casts take")
        yield f"its {number} {spent / whole:.0%} of the operators' time"
    yield from _slower_operators(case, lane)


def _is_launch(layer: Layer) -> bool:
    """Whether most of an operator's time is what it costs to launch it, and not only more than its work."""
    return layer.bounds.get("fp32") == "launch" and layer.reached["fp32"] >= OFTEN


def _slower_operators(case: Case, lane: Lane) -> Iterator[str]:
    """The operators that take longer in a lane themselves, without its casts; the worst by name."""
    both = [(layer, layer.spent[lane.name]) for layer in case.layers if lane.name in layer.spent]
    mine = sum(spent.seconds - spent.casts_s for _, spent in both)
    fp32 = sum(layer.seconds("fp32") for layer, _ in both)
    if not fp32 or mine < SLOWER * fp32:
        return
    worst, spent = max(both, key=lambda each: each[1].seconds - each[1].casts_s - each[0].seconds("fp32"))
    longest = max(spent.kernels, key=lambda kernel: kernel.seconds, default=None)
    by = f", by {longest.name[:60]}" if longest is not None else ""
    yield (
        f"without casts its operators take {milliseconds(mine)} ms for {milliseconds(fp32)}, the worst "
        f"{worst.name} ({worst.work.place or worst.work.operator}) "
        f"{milliseconds(spent.seconds - spent.casts_s)} for {milliseconds(worst.seconds('fp32'))}{by}"
    )


def has_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16, as far as PyTorch can tell."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
