"""What is found in a training step: its faults, and what other ways to run it brought."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampopt.diagnosis.case import LEAST_GAPS
from ampopt.diagnosis.finding import Counterfactual, Finding, milliseconds
from ampopt.diagnosis.findings.host_reads import at_first, told
from ampopt.diagnosis.findings.memory_layout import is_permute
from ampopt.diagnosis.step_findings import STEP_FINDINGS
from ampopt.diagnosis.training import YOURS, TrainingCase
from ampopt.diagnosis.verdict import on_which_machine
from ampopt.errors import first_line
from ampopt.measure.report import interval
from ampopt.system.interrupts import check_interrupted

FORGETS = 0.5
"""From this momentum on, running statistics are mostly those of the last batch."""

SLOWER = 1.05
"""Parts that take this many times longer in AMP are told."""

NAMED = 3


def find_in_training(case: TrainingCase) -> list[Finding]:
    """Every finding; what fails while it looks is a note."""
    found: list[Finding] = []
    for find in FINDINGS:
        try:
            found += find(case)
        except Exception as error:
            check_interrupted(error)
            case.notes.append(f"{find.__name__} could not be examined: {first_line(error)}")
    return found


def batch_norm_momentum(case: TrainingCase) -> Iterator[Finding]:
    """Running statistics that never change, or are those of the last batch."""
    model = case.subject.model
    norms = {path: m for path, m in model.named_modules() if _learns(m, is_frozen=model.training)}
    for rule, says in _MOMENTA.items():
        paths = [path for path, norm in norms.items() if norm.momentum is not None and rule(norm.momentum)]
        if paths:
            momentum = norms[paths[0]].momentum
            share = f"{len(paths)} of {len(norms)} batch norms have momentum={momentum:g}"
            yield Finding(
                "batch-norm-momentum",
                f"{share}: {says.format(momentum)}",
                tuple(case.called.place(path) for path in paths[:NAMED]),
                "PyTorch's momentum is the weight of the new batch (0.1); other frameworks' is 1 minus that",
                is_fault=True,
            )


_MOMENTA: dict[Callable[[float], bool], str] = {
    lambda momentum: momentum == 0: "their running statistics never change",
    lambda momentum: momentum > FORGETS: "in evaluation mode they are {:.0%} those of the last batch",
}


def _learns(module: nn.Module, *, is_frozen: bool) -> bool:
    """Whether a module learns running statistics; `is_frozen`: in evaluation mode it does not, on purpose."""
    is_off = is_frozen and not module.training
    return isinstance(module, _BatchNorm) and module.track_running_stats and not is_off


def host_reads(case: TrainingCase) -> Iterator[Finding]:
    """Lines of the step, or of the model, at which the host waits for a value, or which copy across."""
    lane = "fp32" if case.steps is None else YOURS
    reads = case.called.reads if case.steps is None else case.steps.reads
    if case.steps is None:
        case.notes += at_first(case.called)
    for read in reads:
        if lane in case.times:
            whole_s, instead = case.times[lane].step.median, _READ_LESS[read.is_own]
            yield told(read, case.device, whole_s, lane=lane, each="step", instead=instead)


_READ_LESS = {
    True: "make the optimizer with fused=True: it looks at overflows and counts its steps on the device",
    False: "keep it on the device (total += loss.detach()), and read or print it every hundredth step",
}
"""What to do about a read, by whether PyTorch's optimizer or `GradScaler` makes it."""


def mixed_precision(case: TrainingCase) -> Iterator[Finding]:
    """AMP against FP32, both executed, with their parts."""
    low = case.lane.name
    pays, harms = case.compared(f"in {low.upper()}", "fp32", low), case.compared("in FP32", low, "fp32")
    if pays is None or harms is None:
        return
    if pays.gain.is_vague and pays.gain.low <= 1 <= pays.gain.high:
        told = interval(pays.gain)
        case.notes.append(f"the times vary too much to tell whether {low.upper()} is faster: {told}")
    elif pays.gain.is_real:
        yield _remedy("amp-pays", f"{low.upper()} is {pays.gain.ratio:.2f}x faster", "fp32", pays)
    elif harms.gain.is_real:
        says = f"{low.upper()} is {harms.gain.ratio:.2f}x slower than FP32{_which_part(case)}"
        yield _remedy("amp-harmful", says, low, harms, "stay in FP32 here, unless memory is short")
    else:
        says = f"{low.upper()} is no faster than FP32"
        yield Finding("amp-useless", says, advice="stay in FP32 here, unless memory is short", lane=low)


def _which_part(case: TrainingCase) -> str:
    """`: its forward takes 3.1 ms for 2.2`, the parts that are slower in AMP; empty where none is."""
    mine, other = case.times[case.lane.name].parts, case.times["fp32"].parts
    slower = [name for name in mine if mine[name] > SLOWER * other[name]]
    slower.sort(key=lambda name: other[name] - mine[name])
    told = [f"its {n} takes {milliseconds(mine[n])} ms for {milliseconds(other[n])}" for n in slower]
    return f": {', '.join(told)}" if told else ""


def memory_layout(case: TrainingCase) -> Iterator[Finding]:
    """Executed: AMP in channels_last."""
    low = case.lane.name
    ran = case.compared("in channels_last", low, f"{low} + channels_last")
    if ran is None or not ran.helps:
        return
    permutes = [kernel for kernel in case.kernels.get(low, []) if is_permute(kernel.name)]
    spent_ms = 1e3 * sum(kernel.seconds for kernel in permutes)
    says = (
        f"{len(permutes)} kernels only permute between NCHW and NHWC and take {spent_ms:.3g} ms"
        if permutes
        else "the convolutions are faster with the channel innermost in memory"
    )
    advice = "model.to(memory_format=torch.channels_last), and the inputs, too"
    yield _remedy("memory-layout", says, low, ran, advice)


def optimizer(case: TrainingCase) -> Iterator[Finding]:
    """Executed: the optimizer's other implementations."""
    parts = case.times["fp32"].parts
    share = parts["optimizer"] / sum(parts.values())
    tried = [(flag, case.compared(f"with {flag}=True", "fp32", f"fp32 + {flag}")) for flag in _FLAGS]
    helping = [(flag, ran) for flag, ran in tried if ran is not None and ran.helps]
    for flag, ran in sorted(helping, key=lambda each: -each[1].gain.ratio)[:1]:
        says = f"the optimizer's step takes {share:.0%} of the time, {_FLAGS[flag]}"
        yield _remedy("optimizer", says, "fp32", ran, f"make the optimizer with {flag}=True")


_FLAGS = {
    "fused": "because it goes over the weights once for each operation",
    "foreach": "because it goes over the weights one by one",
}


def launch_bound(case: TrainingCase) -> Iterator[Finding]:
    """The share of a step in which no kernel runs; executed: the whole step as one CUDA graph."""
    for name, kernels in case.kernels.items():
        ran = case.compared("as one CUDA graph", name, f"{name} + CUDA graph")
        if ran is None or not ran.helps or not kernels:
            continue
        busy_s = sum(kernel.seconds for kernel in kernels)
        gaps = 1 - busy_s / ran.before.median
        if gaps < LEAST_GAPS:
            continue
        says = (
            f"{gaps:.0%} of the {milliseconds(ran.before.median)} ms is gaps between launches "
            f"({len(kernels)} kernels, mean {1e6 * busy_s / len(kernels):.3g} µs)"
        )
        advice = "torch.cuda.make_graphed_callables, or the whole step in a torch.cuda.CUDAGraph"
        yield _remedy("launch-bound", says, name, ran, advice)


def _remedy(name: str, says: str, lane: str, ran: Counterfactual, advice: str = "") -> Finding:
    return Finding(name, says, advice=advice, lane=lane, share=1 - 1 / ran.gain.ratio, counterfactual=ran)


FINDINGS: tuple[Callable[[TrainingCase], Iterator[Finding]], ...] = (
    *STEP_FINDINGS,
    batch_norm_momentum,
    host_reads,
    mixed_precision,
    memory_layout,
    optimizer,
    launch_bound,
)


def _taken(case: TrainingCase, way: str) -> str:
    times = case.times[way]
    of = f" ({times.loss})" if times.loss else ""
    return f"{way.upper()} {milliseconds(times.step.median)} ms{of}"


def verdict_of(case: TrainingCase, findings: tuple[Finding, ...]) -> str:
    """How long a step takes in each precision, where its time goes, and what costs most of it."""
    shown = [name for name in (YOURS, "fp32", case.lane.name) if name in case.times]
    taken = ", ".join(_taken(case, way) for way in shown)
    telling = next((each for each in findings if each.is_fault or each.share > 0), None)
    parts = case.times["fp32"].parts
    total = sum(parts.values())
    goes = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items())
    why = f"{telling.says} [{telling.lane}]" if telling is not None else "nothing was found to be faster"
    ran = telling.counterfactual if telling is not None else None
    taken += f" a training step{on_which_machine(case.load)}"
    return f"{taken} ({goes}): {why}{f'; {ran}' if ran is not None else ''}."
