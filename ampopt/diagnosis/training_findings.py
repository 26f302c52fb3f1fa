"""What is found in a training step: faults of the user's own step, and what other ways to run it brought."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampopt.diagnosis.case import LEAST_GAPS
from ampopt.diagnosis.finding import Counterfactual, Finding, milliseconds
from ampopt.diagnosis.findings.host_reads import at_first, told
from ampopt.diagnosis.findings.memory_layout import is_permute
from ampopt.diagnosis.step_watch import Update
from ampopt.diagnosis.training import ONCE, YOURS, TrainingCase
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


def repeated_updates(case: TrainingCase) -> Iterator[Finding]:
    """A batch's gradients are applied twice, as by `optimizer.step()` after `scaler.step(optimizer)`.

    Executed: the step without the second update.
    """
    updates = case.steps.updates if case.steps else []
    for at, second in enumerate(updates):
        earlier = [each for each in updates[:at] if each.weights & second.weights]
        first = earlier[-1] if earlier else None
        if second.refused_by:
            says = (
                f"{second.place} updates the weights with gradients that {second.refused_by} has refused "
                "because they overflow, and else has applied already"
            )
            places = (second.place, second.refused_by)
        elif not second.is_fresh and first is not None:
            says = f"{second.place} applies the gradients again that {first.place} has applied"
            says += _far(first, second)
            places = (second.place, first.place)
        else:
            continue
        ran = case.compared("with one update for each backward pass", YOURS, ONCE)
        by_scaler = second.refused_by or (first is not None and first.by_scaler)
        yield Finding(
            "repeated-update",
            says,
            places,
            "remove it: scaler.step(optimizer) calls optimizer.step()" if by_scaler else "remove one of them",
            lane=YOURS,
            is_fault=True,
            counterfactual=None if ran is None or ran.gain.is_vague else ran,
        )
        return


def _far(first: Update, second: Update) -> str:
    if not first.moved:
        return ""
    return f", and moves the weights {second.moved / first.moved:.0%} as far again"


def scaled_gradients(case: TrainingCase) -> Iterator[Finding]:
    """An update with gradients of a scaled loss, which `optimizer.step()` does not divide."""
    updates = case.steps.updates if case.steps else []
    wrong = next((update for update in updates if update.is_scaled), None)
    if wrong is not None:
        yield Finding(
            "scaled-gradients",
            f"{wrong.place} updates the weights with gradients of the scaled loss",
            (wrong.place,),
            "scaler.step(optimizer) in its place: it divides by the scale first",
            lane=YOURS,
            is_fault=True,
        )


def stale_gradients(case: TrainingCase) -> Iterator[Finding]:
    """Gradients that are never reset add up over all batches."""
    updates = case.steps.updates if case.steps else []
    stale = [update for update in updates if update.is_stale]
    if stale:
        same = [update for update in updates if update.weights == stale[-1].weights]
        first, number = same[0], 1 + max(at for at, update in enumerate(same) if update.is_stale)
        ratio = stale[-1].moved / first.moved if first.moved and not first.is_stale else 0.0
        moves = f": update {number} moves the weights {ratio:.1f} times as far as the first"
        yield Finding(
            "stale-gradients",
            "the gradients of a batch are added to those of the batches before it"
            + (moves if ratio > 1 else ""),
            (stale[0].place,),
            "optimizer.zero_grad() before each backward pass (or after each update)",
            lane=YOURS,
            is_fault=True,
        )


def no_update(case: TrainingCase) -> Iterator[Finding]:
    """A step that never updates the weights, and weights that never get a gradient."""
    if case.steps is None:
        return
    if not (case.steps.updates or case.steps.idle):
        yield Finding(
            "no-update",
            "no step has updated the weights",
            advice="scaler.step(optimizer) and scaler.update(), or optimizer.step(), in each step",
            lane=YOURS,
            is_fault=True,
        )
    elif case.steps.unused:
        names = case.steps.unused
        case.notes.append(f"{len(names)} weights of the optimizer never get a gradient: {_few(names)}")


def evaluation_mode(case: TrainingCase) -> Iterator[Finding]:
    """The user's step calls the model in evaluation mode: no dropout, and no statistics are learnt."""
    seen = case.steps
    if seen is not None and seen.evaluated:
        yield Finding(
            "evaluation-mode-in-training",
            f"the model is in evaluation mode in {seen.evaluated} of {seen.forwards} calls of a training "
            "step: dropouts do nothing, and batch norms neither use nor learn this batch's statistics",
            (seen.evaluated_at,) if seen.evaluated_at else (),
            "model.train() before training; freeze single batch norms by their own eval()",
            lane=YOURS,
            is_fault=True,
        )


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


def _few(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


FINDINGS: tuple[Callable[[TrainingCase], Iterator[Finding]], ...] = (
    repeated_updates,
    scaled_gradients,
    stale_gradients,
    no_update,
    evaluation_mode,
    batch_norm_momentum,
    host_reads,
    mixed_precision,
    memory_layout,
    optimizer,
    launch_bound,
)


def verdict_of(case: TrainingCase, findings: tuple[Finding, ...]) -> str:
    """How long a step takes in each precision, where its time goes, and what costs most of it."""
    shown = [name for name in (YOURS, "fp32", case.lane.name) if name in case.times]
    taken = ", ".join(f"{n.upper()} {milliseconds(case.times[n].step.median)} ms" for n in shown)
    telling = next((each for each in findings if each.is_fault or each.share > 0), None)
    parts = case.times["fp32"].parts
    total = sum(parts.values())
    goes = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items())
    why = f"{telling.says} [{telling.lane}]" if telling is not None else "nothing was found to be faster"
    ran = telling.counterfactual if telling is not None else None
    return f"{taken} a training step ({goes}): {why}{f'; {ran}' if ran is not None else ''}."
