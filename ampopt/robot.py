"""Loads a bundle with NumPy and ONNX Runtime or OpenVINO only; PyTorch is not needed.

`python -m ampopt.robot robot.ampopt --hz 30 --seconds 10` loads a bundle, runs its self-test, and measures
its latency at a camera's frame rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampopt.bundle.external_weights import external_files
from ampopt.bundle.files import BundleFiles, naming, open_bundle
from ampopt.bundle.robot_model import RobotModel, self_test_tensors
from ampopt.bundle.robot_openvino import ComputedOtherwiseError, openvino_runner, why_not_openvino
from ampopt.errors import AmpoptError, BundleError, InputError
from ampopt.measure.field_test import field_test
from ampopt.ort.knobs import thread_counts
from ampopt.ort.openvino_session import OpenVinoRunner
from ampopt.ort.openvino_tuning import tune_openvino
from ampopt.ort.options import OPENVINO, PREFERRED
from ampopt.ort.session import OnnxRunner, SessionError, SessionOptions, onnxruntime
from ampopt.ort.tuning import tune
from ampopt.system.heap import trim_heap
from ampopt.system.standard_streams import lasting_streams
from ampopt.system.wording import argument, in_options

__all__ = ["RobotModel", "load", "main"]

MODEL, WEIGHTS = "model.onnx", "model.onnx.data"

logger = logging.getLogger(__name__)

REFUSED = 2
"""The exit code where the bundle is refused, or not everything could be printed: 1 is that of late frames."""

ENGINES = (None, "onnxruntime", "openvino")

Runner = OnnxRunner | OpenVinoRunner

Choice = tuple[SessionOptions, str | None]
"""Session options, and why they differ from the bundle's."""


def load(
    path: str | os.PathLike[str],
    *,
    verify_key: str | Path | None = None,
    engine: str | None = None,
    provider: str | None = None,
    retune_seconds: float = 0.0,
) -> RobotModel:
    """Load the bundle at `path` and run its self-test.

    `engine` is "onnxruntime" or "openvino". Without it a bundle whose fastest program ran in OpenVINO runs in
    OpenVINO, and where that is not installed or does not load it, in ONNX Runtime, with a warning. A model
    that OpenVINO computes otherwise than PyTorch does not run in it, nor in that provider of ONNX Runtime's:
    the manifest has the reason; of an older bundle without it every operator has to be a known one.

    The bundle's options are used if they were measured with the same version of the engine and the same
    provider. Otherwise a warning is logged, and the options are the defaults or, with `retune_seconds`, the
    result of a sweep of that length. `provider` selects one of ONNX Runtime's, such as CPUExecutionProvider;
    without it the bundle's provider is tried first, then CUDA, OpenVINO, the CPU. `verify_key` is the public
    key of the required signature.

    Raises BundleError if the bundle is damaged, does not load on this machine, may not run in the engine that
    is asked for, or fails its self-test;
    InputError for an unknown engine, or OpenVINO with a provider.
    """
    if engine not in ENGINES:
        raise InputError(f"{argument('engine', engine)}: choose 'onnxruntime', 'openvino', or None")
    if engine == "openvino" and provider is not None:
        given, alone = argument("provider", provider), argument("engine", "openvino")
        raise InputError(f"{given} is ONNX Runtime's: leave it out, or {alone}")
    files = open_bundle(path, verify_key=verify_key)
    if MODEL not in files.names:
        raise BundleError(f"{os.fspath(path)} holds no {MODEL}: save it again with its ONNX model")
    with naming(path), _model(files) as model:
        try:
            runner, notes = _running(model, files.manifest["onnx"], engine, provider)
            if notes and retune_seconds > 0:
                runner = _retuned(model, runner, files, retune_seconds)
                notes.append(f"measured anew: {runner.options}")
        except ComputedOtherwiseError as e:
            raise BundleError(str(e)) from e
        except SessionError as e:
            raise BundleError(f"{os.fspath(path)} does not load on this machine: {e}") from e
    for note in notes:
        logger.warning("%s: %s", os.fspath(path), note)
    with naming(path):
        loaded = RobotModel(files, runner, notes)
    trim_heap()
    return loaded


@contextlib.contextmanager
def _model(files: BundleFiles) -> Iterator[bytes | Path]:
    """The ONNX model as ONNX Runtime reads it: by path where its weights lie beside it.

    Raises BundleError where it takes weights from other files.
    """
    data, own = files.read(MODEL), {WEIGHTS} & set(files.names)
    try:
        others = external_files(data) - own
    except ValueError as e:
        raise BundleError(f"{MODEL} is no ONNX model: {e}") from e
    if others:
        raise BundleError(f"{MODEL} takes weights from {min(others)!r:.200}, which is no file of the bundle")
    if own:
        with files.extracted(MODEL, WEIGHTS) as folder:
            yield folder / MODEL
    else:
        yield data


def _running(
    model: bytes | Path, onnx: Mapping[str, Any], engine: str | None, provider: str | None
) -> tuple[Runner, list[str]]:
    """The model in the engine that is wanted, or that the bundle is fastest in; and what there is to say."""
    failed: list[str] = []
    if engine == "openvino":
        return openvino_runner(model, onnx)
    if engine is None and "openvino" in onnx and provider is None:
        try:
            return openvino_runner(model, onnx)
        except SessionError as e:
            failed = [f"ONNX Runtime runs what was faster in OpenVINO: {e}"]
    runner, notes = _started(model, _choices(model, onnx, provider))
    return runner, [*failed, *notes]


def _choices(model: bytes | Path, onnx: Mapping[str, Any], provider: str | None) -> list[Choice]:
    """What to try, in order. Raises BundleError where the stored options are none.

    OpenVINO's provider is left out where OpenVINO must not run the model; ComputedOtherwiseError if it is
    asked for.
    """
    ort, session = onnxruntime(), onnx["session"]
    tuned_for = session.get("onnxruntime")
    stored = SessionOptions.from_dict({k: v for k, v in session.items() if k != "onnxruntime"})
    there = [name for name in PREFERRED if name in ort.get_available_providers()]
    why_not = why_not_openvino(model, onnx) if OPENVINO in (provider, stored.provider, *there) else None
    if why_not is not None and provider == OPENVINO:
        raise ComputedOtherwiseError(why_not)
    choices: list[Choice] = []
    if tuned_for is None:
        reason = "the bundle was saved without options"
    elif tuned_for != ort.__version__:
        reason = f"the bundle's own hold for onnxruntime {tuned_for}, and this is {ort.__version__}"
    elif (stored.threads or 1) > (most := thread_counts()[-1]):
        reason = f"the bundle's own take {stored.threads} threads, and there are {most} here"
    elif provider not in (None, stored.provider):
        reason = f"the bundle's own are for {stored.provider}"
    elif why_not is not None and stored.provider == OPENVINO:
        reason = f"the bundle's own are for {OPENVINO}, which may not run it: {why_not}"
    else:
        reason = "the bundle's own do not load here"
        choices.append((stored, None))
    wanted = [provider] if provider else [stored.provider, *there] if tuned_for else there
    defaults = [
        (SessionOptions.default(name, tf32=_is_half(onnx)), f"{name} runs with default options: {reason}")
        for name in dict.fromkeys(wanted)
        if name != OPENVINO or why_not is None
    ]
    return [*choices, *defaults]


def _is_half(onnx: Mapping[str, Any]) -> bool:
    return bool(onnx["precision"] == "fp16")


def _started(model: bytes | Path, choices: Sequence[Choice]) -> tuple[OnnxRunner, list[str]]:
    """The first choice that loads, and what there is to say. Raises the first SessionError if none does."""
    failures: list[SessionError] = []
    for options, note in choices:
        try:
            runner = OnnxRunner(model, options)
        except SessionError as e:
            failures.append(e)
        else:
            return runner, [] if note is None else [note, *map(str, failures[:1])]
    raise failures[0]


def _retuned(model: bytes | Path, runner: Runner, files: BundleFiles, seconds: float) -> Runner:
    example = self_test_tensors(files, "input", runner.inputs)
    inputs = [example[info.name].astype(info.dtype, copy=False) for info in runner.inputs]
    if isinstance(runner, OpenVinoRunner):
        return tune_openvino(runner, model, inputs, seconds=seconds).runner
    providers, tolerance = [runner.options.provider], files.manifest["tolerance"]
    tuning = tune(
        model,
        inputs,
        seconds=seconds,
        providers=providers,
        tolerance=tolerance,
        tf32=_is_half(files.manifest["onnx"]),
    )
    return OnnxRunner(model, tuning.best)


@in_options()
def main(arguments: Sequence[str] | None = None) -> int:
    """Load a bundle, measure it, print JSON; exit code 0: passed, 1: frames too late, 2: refused.

    It is 2, too, where not everything could be printed.
    """
    parser = argparse.ArgumentParser(prog="python -m ampopt.robot", description=main.__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--hz", type=float, default=30.0, help="the camera's rate")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long frames come")
    parser.add_argument("--deadline-ms", type=float, help="by default the time from frame to frame")
    parser.add_argument("--engine", choices=("onnxruntime", "openvino"), help="by default the bundle's")
    parser.add_argument("--provider", help="such as CPUExecutionProvider")
    parser.add_argument("--verify-key", help="the public key of whom the bundle must be signed by")
    parser.add_argument("--retune-seconds", type=float, default=0.0, help="where its options do not fit")
    parser.add_argument("--slack", type=float, default=0.25, help="share by which it may be slower")
    parser.add_argument(
        "--strict", action="store_true", help="fail, too, where calls back to back are slower than promised"
    )
    given = parser.parse_args(arguments)
    try:
        robot = load(
            given.bundle,
            verify_key=given.verify_key,
            engine=given.engine,
            provider=given.provider,
            retune_seconds=given.retune_seconds,
        )
        report = field_test(
            lambda: robot(**robot.example), hz=given.hz, seconds=given.seconds, deadline_ms=given.deadline_ms
        )
        judgment = report.judge(robot.expected, slack=given.slack, strict=given.strict)
    except AmpoptError as e:
        print(f"refused: {e}", file=sys.stderr)
        return REFUSED
    facts = {
        "bundle": given.bundle,
        "model": robot.manifest["model"],
        "engine": robot.engine,
        "options": robot.options.to_dict(),
        "notes": robot.notes,
        "self_test_error": robot.error,
        **report.to_dict(),
        **judgment.to_dict(),
    }
    print(json.dumps(facts, indent=1))
    return 0 if judgment.passed else 1


if __name__ == "__main__":
    with lasting_streams(REFUSED):
        sys.exit(main())
