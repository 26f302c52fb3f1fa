"""Verifies an ONNX file on every installed provider against the original in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.deploy.portable import autocast_program
from ampopt.engines.onnx_choices import FileChoices
from ampopt.engines.onnx_nan import losing_operators
from ampopt.ir.capture import Captured
from ampopt.ir.choices import SeenChoices, kept_to_tell
from ampopt.ir.choosers import makes_choices
from ampopt.ir.emulated_half import EmulatedHalf
from ampopt.ir.lanes import Lane
from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.ir.unmarked import array_of
from ampopt.measure.draws import Draw
from ampopt.measure.followed import Judged
from ampopt.measure.metric import Metric
from ampopt.measure.original import Run
from ampopt.measure.own_errors import LEAST_NORM
from ampopt.measure.tied_values import TiedValues
from ampopt.measure.verify import Verifier
from ampopt.ort.knobs import changed
from ampopt.ort.openvino_options import OpenVinoOptions
from ampopt.ort.openvino_session import OpenVinoRunner, openvino_version
from ampopt.ort.options import CPU, CUDA, OPENVINO, SessionError, SessionOptions
from ampopt.ort.session import Array, Node, OnnxRunner, onnxruntime

_ONCE: dict[str, dict[str, Any]] = {
    CPU: {},
    CUDA: {"provider_options": {"cudnn_conv_algo_search": "HEURISTIC"}},
    OPENVINO: {},
}
"""What differs from the default options: no search over algorithms that are used once."""

TORCH = "torch"
"""The provider name for the portable program itself, run by PyTorch."""

ON_CPU_FP16 = (
    "ONNX Runtime's CPU provider leaves float16 roundings out: its rows prove the file's structure, and the "
    "rows of torch, which rounds after every operator as a GPU does, the accuracy of float16"
)


@dataclasses.dataclass(frozen=True)
class OutputCheck:
    """One output on one provider: its worst relative error ‖y - ref‖ / ‖ref‖, eager's own, the limit.

    `inputs` names the inputs: the example, random ones, or some outside of the example's range.
    """

    name: str
    provider: str
    error: float
    eager_error: float
    limit: float
    inputs: str = "the example"

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit."""
        return math.isfinite(self.error) and self.error <= self.limit


@dataclasses.dataclass(frozen=True)
class OnnxCheck:
    """The result for a file: every output on every provider, and what is wrong (None: nothing).

    `metric` is the user's metric, the worst over providers; `nodes_off_gpu` are the nodes that ONNX Runtime
    did not place on the GPU, or None if no CUDA provider is installed or it does not report them (before
    1.24).
    """

    outputs: tuple[OutputCheck, ...]
    metric: float | None
    reason: str | None
    providers: tuple[str, ...]
    nodes_off_gpu: tuple[str, ...] | None
    notes: tuple[str, ...]

    @property
    def error(self) -> float:
        """The largest error of an output over all providers."""
        return max((check.error for check in self.outputs), default=0.0)


class OnnxVerifier(Verifier):
    """A Verifier that reports every output of a run, and uses CUDA's float16 autocast rules on a CPU, too.

    Runtimes have orders of their own for equal values, so a file's errors may be what another order makes of
    the outputs, see `TiedValues`. What runs in the original's place has no such licence: its choices have to
    be seen, see `measure.followed`.
    """

    def eager(self, lane: Lane, model: nn.Module | None = None) -> Run:
        """As `Verifier.eager`; on a CPU, float16 autocast uses CUDA's rules and is computed quickly.

        A model other than the captured one runs under the CPU's own rules.
        """
        if lane.autocast is not torch.float16 or self.device.type != "cpu":
            return super().eager(lane, model)
        return emulated(self._cuda_autocast if model is None else super().eager(lane, model))

    @functools.cached_property
    def _cuda_autocast(self) -> Run:
        return autocast_program(self.captured).run

    @functools.cached_property
    def ties(self) -> TiedValues:
        """The original with equal values in other orders."""
        return TiedValues(self, self.draws, least_norm=LEAST_NORM)

    def judged(self, run: Run, lane: Lane, draw: Draw) -> Judged:
        """As `Verifier.judged`, with the order of equal values that a run may have."""
        judged = super().judged(run, lane, draw)
        if judged.passed or not math.isfinite(judged.error):
            return judged
        return Judged(self.ties.judged(self.steps(run, draw), lane, draw, judged.found))

    def outputs(self, run: Run, lane: Lane, names: Sequence[str], provider: str) -> list[OutputCheck]:
        """For each output the draw with the largest error relative to its limit."""
        worst: dict[str, OutputCheck] = {}
        with kept_to_tell():
            judged = [(draw, self.judged(run, lane, draw)) for draw in (*self.draws, *self.range_draws(lane))]
        for draw, each in judged:
            for index, error, limit in each.found:
                name, own = names[index], self.own_errors(lane, draw)[index]
                check = OutputCheck(name, provider, error, own, limit, draw.name)
                if name not in worst or not _excess(check) <= _excess(worst[name]):
                    worst[name] = check
        return list(worst.values())


def emulated(run: Run) -> Run:
    """A run whose float16 products on a CPU are computed in float32 and rounded."""

    def call(*tensors: Tensor) -> Sequence[Tensor]:
        with EmulatedHalf():
            return run(*tensors)

    return call


def _excess(check: OutputCheck) -> float:
    return check.error / check.limit if check.limit > 0 else math.inf if check.error > 0 else 0.0


def providers() -> tuple[str, ...]:
    """The providers of this ONNX Runtime installation on which ampopt verifies."""
    available = onnxruntime().get_available_providers()
    return tuple(name for name in _ONCE if name in available)


def to_numpy(tensor: Tensor) -> Array:
    """A contiguous array of a tensor on any device; bfloat16, which NumPy does not have, becomes float32."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    array: Array = array_of((plain.float() if plain.dtype is torch.bfloat16 else plain).contiguous())
    return array


def run_onnx(runner: OnnxRunner | OpenVinoRunner, *tensors: Tensor) -> list[Tensor]:
    """Run a file on tensors of any device; they are converted to the file's input dtypes."""
    arrays = (
        to_numpy(tensor).astype(info.dtype, copy=False)
        for info, tensor in zip(runner.inputs, tensors, strict=True)
    )
    device = tensors[0].device if tensors else None
    return [torch.from_numpy(array).to(device) for array in runner(*arrays)]


def _telling(run: Run, choices: FileChoices) -> Run:
    """A run of a file whose choices are told to who watches it."""

    def call(*tensors: Tensor) -> Sequence[Tensor]:
        if (watching := SeenChoices.watching()) is not None:
            watching.add(functools.partial(choices, tensors))
        return run(*tensors)

    return call


def nodes_off(nodes: Mapping[str, Sequence[Node]], provider: str) -> tuple[str, ...]:
    """The nodes that run on a provider other than this one, as `name (operator)`."""
    others = (found for name, found in nodes.items() if name != provider)
    return tuple(f"{node.name} ({node.op})" for found in others for node in found)


def verify_onnx(
    path: Path,
    model: nn.Module,
    calls: Sequence[Captured],
    lane: Lane,
    output_names: Sequence[str],
    *,
    small: Sequence[Captured] = (),
    tolerance: float | None = None,
    metric: Metric | None = None,
    program: Run | None = None,
    in_openvino: bool = False,
    chooses: Program | None = None,
) -> OnnxCheck:
    """Run the file on every installed provider, on each call's example inputs and on other draws.

    These are random, outside of the examples' range, and of integers that the examples do not have.

    `small` calls, of sizes of 1, are in the examples' range alone: few numbers, far outside of it, may have
    an error by chance.

    `model` is the original (a private copy). The limits of `lane` apply: float16 if the file computes in it,
    or has inputs and outputs in it. A metric decides alone, at most `tolerance`; without one, each output's
    error decides. `program` is the program that the file was made from; if given, it is verified, too.
    `in_openvino`: so is the file in a plain session of OpenVINO, where that is installed. `chooses`: the
    program that the file was made of, if the choices of its graph are to be followed.
    """
    verify = functools.partial(OnnxVerifier, model, tolerance=tolerance, metric=metric, draws=1)
    verifiers = [verify(call) for call in (*calls, *small)]
    for verifier in verifiers[len(calls) :]:
        verifier.all_range_draws = []
    tally = _Tally(verifiers, lane, output_names)
    if program is not None:
        tally.add(TORCH, program)
    used: list[str] = []
    off_gpu: tuple[str, ...] | None = None
    notes = [verifier.note for verifier in verifiers if verifier.note]
    for provider in providers():
        options = SessionOptions.default(provider, tf32=lane.is_mixed)
        try:
            runner = OnnxRunner(path, changed(options, _ONCE[provider]))
        except SessionError as error:
            if provider == CPU:
                tally.reasons.append(str(error))
            else:
                notes.append(f"nothing was verified on {provider}: {error}")
            continue
        used.append(provider)
        run: Run = functools.partial(run_onnx, runner)
        if chooses is not None and makes_choices(chooses.graph):
            run = _telling(run, FileChoices(chooses, path, runner.options))
        tally.add(provider, run)
        notes += [] if tally.reasons else _lost_faults(verifiers[0], run, lane, provider, path)
        if provider == CUDA and runner.nodes is not None:
            off_gpu = nodes_off(runner.nodes, CUDA)
    if lane.is_mixed and used == [CPU]:
        notes.append(ON_CPU_FP16)
    if in_openvino and openvino_version() is not None:
        used += _add_openvino(path, tally, verifiers[0], lane, notes)
    reason = tally.reasons[0] if tally.reasons else None
    worst = max(tally.metrics) if tally.metrics else None
    return OnnxCheck(tuple(tally.rows), worst, reason, tuple(used), off_gpu, tuple(notes))


def _add_openvino(
    path: Path, tally: _Tally, verifier: OnnxVerifier, lane: Lane, notes: list[str]
) -> list[str]:
    """Verify the file in OpenVINO itself, without the repairs of this package; returns the name if it ran."""
    options = OpenVinoOptions()
    try:
        run = functools.partial(run_onnx, OpenVinoRunner(path, options, repaired=False))
    except SessionError as error:
        tally.reasons.append(str(error))
        return []
    tally.add(options.provider, run)
    with contextlib.suppress(Exception):  # a model that does not take NaN
        if not tally.reasons and (lost := verifier.lost_fault(run, lane)):
            notes.append(f"{options.provider}: {lost}")
    return [options.provider]


def _lost_faults(verifier: OnnxVerifier, run: Run, lane: Lane, provider: str, path: Path) -> list[str]:
    """A note where a provider makes numbers of NaN, which is its own doing, and with which operators."""
    with contextlib.suppress(Exception):  # a model that does not take NaN
        if lost := verifier.lost_fault(run, lane):
            names = losing_operators(path)
            by = f" (ONNX Runtime's {', '.join(names)} may take NaN for a number)" if names else ""
            return [f"{provider}: {lost}{by}"]
    return []


class _Tally:
    """Collects the errors of one way to run after another, and what is wrong with them."""

    def __init__(self, verifiers: Sequence[OnnxVerifier], lane: Lane, names: Sequence[str]) -> None:
        self._verifiers, self._lane, self._names = verifiers, lane, names
        self.rows: list[OutputCheck] = []
        self.metrics: list[float] = []
        self.reasons: list[str] = []

    def add(self, provider: str, run: Run) -> None:
        """Verify one way to run; one that fails is a reason, too."""
        for verifier in self._verifiers:
            shapes = [list(tensor.shape) for tensor in verifier.captured.program.examples]
            sized = f" of {', '.join(map(str, shapes))}" if len(self._verifiers) > 1 else ""
            try:
                rows = verifier.outputs(run, self._lane, self._names, provider)
                rows = [dataclasses.replace(row, inputs=f"{row.inputs}{sized}") for row in rows]
                check = verifier.check_metric(run) if verifier.metric is not None else None
            except Exception as error:  # ONNX Runtime raises whatever its kernels and bindings do
                short = textwrap.shorten(str(error), 300, placeholder=" …")
                inputs = f" with inputs{sized}" if sized else ""
                self.reasons.append(f"{provider} cannot run the model{inputs}: {short}")
                return
            self.rows.extend(rows)
            if check is None:
                self.reasons.extend(_why_failed(row) for row in rows if not row.passed)
                integers = verifier.check_integers(run, self._lane, Check(0.0, math.inf, None))
                self.reasons.extend([f"{provider}{sized}: {integers.reason}"] if integers.reason else [])
                continue
            self.metrics.append(check.error)
            self.reasons.extend([f"{provider}: {check.reason}"] if check.reason else [])


def _why_failed(row: OutputCheck) -> str:
    return (
        f"output {row.name!r} has error {row.error:.2g} on {row.provider} with {row.inputs}, over "
        f"{row.limit:.2g} (eager's own: {row.eager_error:.2g})"
    )
