"""`ampopt.load`: loads a bundle, selects the fastest backend on this machine, and runs its self-test."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampopt import robot
from ampopt.bundle.files import BundleFiles, naming, open_bundle
from ampopt.deploy.bundle_read import read_bundle
from ampopt.deploy.carried_exports import exports_of
from ampopt.deploy.known_backend import BackendCache, KnownBackend, fastest, known_from
from ampopt.deploy.loaded_model import LoadedModel, SelfTestCall, Way, run_self_test, with_state
from ampopt.deploy.onnx_verify import to_numpy
from ampopt.deploy.runtime import OptimizedModule
from ampopt.deploy.sized_program import replayed
from ampopt.engines.executable import executable
from ampopt.engines.onnx_cache import Exports, exports_in
from ampopt.errors import AmpoptError, BundleError, InputError
from ampopt.ir.asked import Asked
from ampopt.ir.capture import Captured
from ampopt.ir.lane_io import FLOATING, LaneIO
from ampopt.ir.program import Program
from ampopt.ir.settings import autocast_scope
from ampopt.ir.signature import describe, flatten_call, tensors_of
from ampopt.ir.symbolic_capture import standing_for_all
from ampopt.ir.transform import Engine, Recipe, replay
from ampopt.measure.headline import is_busy
from ampopt.measure.ledger import Ledger
from ampopt.ort.knobs import thread_counts
from ampopt.ort.options import CUDA, SessionOptions
from ampopt.search.optimizer import Optimizer
from ampopt.search.options import Options
from ampopt.system.environment import environment
from ampopt.system.memory import release
from ampopt.system.plain_files import path_of
from ampopt.system.process_state import process_kept
from ampopt.system.wording import argument

logger = logging.getLogger("ampopt")

BACKENDS = ("auto", "ampopt", "onnxruntime", "openvino", "original")

_MACHINE = ("ampopt", "device", "torch", "cuda", "cudnn", "driver", "threads", "instructions")
"""Facts of the fingerprint that a recipe's measurements hold for."""


class _Restored(nn.Module):
    """The captured graph as the module that it was captured from, without the conversions of `io="lane"`."""

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self._captured = [captured]
        self.graph = captured.program.graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Flatten, run, put the result together."""
        captured = self._captured[0]
        entered = tensors_of(flatten_call(args, kwargs)[0])
        return captured.layout.restore(list(self.graph(*entered)))


def _restored(captured: Captured) -> nn.Module:
    """The module that a bundle's program was captured from: it takes and gives what the bundle's does."""
    model, program = _Restored(captured), captured.program
    dtypes = {tensor.dtype for tensor in program.examples} | {border.dtype for border in program.exit}
    outside = {dtype for dtype in dtypes if dtype in FLOATING}
    if len(outside) != 1:
        return model
    entry = iter(program.entry)
    taken = [next(entry).dtype if isinstance(leaf, Tensor) else None for leaf in captured.leaves]
    own = [dtype if dtype in FLOATING else None for dtype in taken]
    return LaneIO(model, outside.pop(), captured.spec, own)


def _without_autocast(model: nn.Module, device: torch.device) -> Callable[..., Any]:
    """The module, whose graph has all casts that were captured, also in a caller's autocast."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with autocast_scope(device, None):
            return model(*args, **kwargs)

    return call


@process_kept()
def load(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    device: torch.device | str | None = None,
    verify_key: str | os.PathLike[str] | None = None,
    budget_s: float | None = None,
    types: Sequence[type] = (),
) -> LoadedModel:
    """Load the bundle at `path`. Nothing in it is unpickled or evaluated, so that untrusted files are safe.

    Args:
        path: a bundle that `OptimizedModule.save` wrote.
        backend: "ampopt", "onnxruntime", "openvino", "original", or "auto": the best of the first two that
            are available, and of OpenVINO if the bundle was fastest in it, by median latency, tail latency
            and threads (`ampopt.ort.backend_choice`). That is measured for two seconds when a bundle is
            saved, and for another machine or other libraries at the first load there; on one that is not
            busy it is kept in the cache folder, for each `budget_s`.
        device: "cpu" or "cuda"; None: a GPU if there is one.
        verify_key: a public Ed25519 key in PEM that the bundle must be signed with. Where it was saved on a
            machine like this one, what else takes seconds is then left out: to try its program on tensors
            without memory, and to export that anew for an engine.
        budget_s: seconds for measuring the passes again on a machine that differs from the bundle's
            fingerprint. None: as for `ampopt.optimize`, 60 s, or what 600 calls of the model take if that is
            more, and at most 600 s.
        types: the model's namedtuple classes, if it returns any: else results have one of the same name and
            fields.

    Raises BundleError if the bundle is damaged or malicious, does not load, or fails its self-test (for
    "auto": on every backend), or may not run in OpenVINO, see `ampopt.robot.load`; InputError for unknown
    arguments or devices.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend={backend!r}: choose from {', '.join(BACKENDS)}")
    where = _device(device)
    files = open_bundle(path, verify_key=None if verify_key is None else path_of(verify_key))
    cache = BackendCache(files.manifest, where, _available(files), budget_s)
    known = cache.find() if backend == "auto" else None
    told = known_from(files, where, cache.backends) if known is None else None
    is_trusted = told is not None and verify_key is not None
    with _refusing(path):
        was_tried = known is not None or is_trusted
        captured, recipe, tests = read_bundle(files, where, types, was_tried=was_tried)
        exports = Exports() if verify_key is None else exports_of(files)
        state = tests[0].state
        inside = with_state(captured, len(state)) if state else captured
    if known is None and backend == "auto":
        known = told
    threads = torch.get_num_threads() if where.type == "cpu" else 1
    makers: dict[str, Callable[[list[str]], Way]] = {
        "ampopt": lambda notes: Way(_own(files, inside, recipe, exports, budget_s, notes), threads),
        **{
            name: functools.partial(_onnx, path, verify_key, inside, name)
            for name in ("onnxruntime", "openvino")
        },
        "original": lambda _notes: Way(_without_autocast(_restored(inside), where), threads),
    }

    def made(name: str, notes: list[str]) -> LoadedModel:
        with _refusing(path):
            model = LoadedModel(files, captured, makers[name](notes), name, state)
            for test in tests:
                run_self_test(model, test, files.manifest["tolerance"])
        return model

    notes: list[str] = []
    if backend != "auto":
        chosen = made(backend, notes)
    else:
        chosen = _chosen(cache, known, made, notes, tests[0], where)
        release(where)  # of the ways that were not chosen
    chosen.notes.extend(notes)
    for note in notes:
        logger.warning("ampopt: %s: %s", os.fspath(path), note)
    return chosen


def _chosen(
    cache: BackendCache,
    known: KnownBackend | None,
    make: Callable[[str, list[str]], LoadedModel],
    notes: list[str],
    test: SelfTestCall,
    device: torch.device,
) -> LoadedModel:
    """The backend that is known, or the best of all that can be made; `notes` get the rest.

    Raises BundleError if none can be made.
    """
    if known is not None:
        told: list[str] = []
        try:
            model = make(known.backend, told)
        except BundleError:
            cache.forget()  # the others are asked, too, and all tell why not
        else:
            notes += told
            model.choice = known.measured
            cache.store(known)
            return model
    loaded: list[LoadedModel] = []
    for name in cache.backends:
        try:
            loaded.append(make(name, notes))
        except BundleError as error:
            notes.append(f"{name} is not used: {error}")
    if not loaded:
        raise BundleError("; ".join(notes))
    was_busy = is_busy()  # which measuring may make the machine
    chosen = _best(loaded, test, device)
    if len(loaded) == len(cache.backends) > 1:
        if was_busy:
            logger.debug("ampopt: the machine is busy: the choice of %s is not kept", chosen.backend)
        else:
            cache.store(KnownBackend(chosen.backend, chosen.choice))
    return chosen


def _available(files: BundleFiles) -> list[str]:
    """The backends that "auto" chooses from."""
    if robot.MODEL not in files.names:
        return ["ampopt"]
    return ["ampopt", "onnxruntime", *(["openvino"] if "openvino" in files.manifest["onnx"] else [])]


def _device(device: torch.device | str | None) -> torch.device:
    """The device that is asked for, or a GPU where there is one. InputError where there is none such."""
    has_gpu = torch.cuda.is_available()
    try:
        where = torch.device(device or ("cuda" if has_gpu else "cpu"))
    except RuntimeError as error:
        raise InputError(f"{argument('device', device)} is no device: choose 'cpu' or 'cuda'") from error
    if where.type == "cpu":
        return torch.device("cpu")
    index = torch.cuda.current_device() if has_gpu and where.index is None else where.index or 0
    if where.type != "cuda" or index >= (torch.cuda.device_count() if has_gpu else 0):
        raise InputError(f"{argument('device', device)} is not on this machine: leave it out, or use 'cpu'")
    return torch.device("cuda", index)


@contextlib.contextmanager
def _refusing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever a bundle's contents make PyTorch raise is a reason to refuse the bundle."""
    try:
        with naming(path):
            yield
    except BundleError:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, AmpoptError) else f"{type(error).__name__}: {error}"
        raise BundleError(f"{os.fspath(path)} does not load on this machine: {text[:500]}") from error


def _own(
    files: BundleFiles,
    captured: Captured,
    recipe: Recipe,
    exports: Exports,
    budget_s: float | None,
    notes: list[str],
) -> OptimizedModule:
    """ampopt's program: the recipe replayed, or measured anew on a machine that it was not made on.

    `exports` are those that its engines may take without a question.
    """
    name, device = files.manifest["model"]["name"], captured.program.device
    original = _restored(captured)
    here = environment(device)
    changed = _changed(files.manifest["fingerprint"], here)
    if captured.program.sizes:
        return _for_sizes(captured, recipe, name, changed, notes)
    if changed is not None:
        made, what = changed
        notes.append(f"{made}, so measured anew: {what} ({argument('budget_s')} limits how long)")
        lane = files.manifest["lane"]["name"]
        low = recipe.lane.autocast if device.type == "cpu" else None
        options = Options(precision=lane, tolerance=recipe.tolerance, amp_dtype=low).within(budget_s)
        optimizer = Optimizer(
            original, captured, options, name=name, started=time.perf_counter(), max_captures=0
        )
        return optimizer.run()
    with exports_in(exports):
        program = replay(recipe.passes, recipe.lane.start(captured.program))
    notes.extend(_left_out(recipe, program))
    report = Ledger(name, here, tuple(describe(t) for t in captured.program.examples))
    return OptimizedModule(
        original, captured, program, recipe, report, ready=executable(program), max_captures=0
    )


def _changed(there: Mapping[str, str], here: Mapping[str, str]) -> tuple[str, str] | None:
    """What a bundle was made on or with, and the facts of it that are others here; None if none is."""
    facts = [fact for fact in _MACHINE if here.get(fact) != there.get(fact)]
    if not facts:
        return None
    made = "made on another machine" if "device" in facts else "made with other versions or settings"
    return made, ", ".join(f"{fact} {there.get(fact)} → {here.get(fact)}" for fact in facts)


def _for_sizes(
    captured: Captured, recipe: Recipe, name: str, changed: tuple[str, str] | None, notes: list[str]
) -> OptimizedModule:
    """The program for a range of sizes: the recipe replayed on any machine."""
    if changed is not None:
        made, what = changed
        notes.append(f"{made}, whose best passes these are: {what}")
    program = captured.program
    examples = standing_for_all(program.examples, program.sizes)
    sized = replayed(captured, examples, recipe.passes, recipe.lane, program.sizes, Asked())
    notes.extend(_left_out(recipe, sized.program))
    own = tuple(describe(t) for t in program.examples)
    report = Ledger(name, environment(program.device), own)
    return OptimizedModule(
        _restored(captured),
        captured,
        sized.program,
        recipe,
        report,
        ready=sized.run,
        max_captures=0,
        sized=sized,
    )


def _left_out(recipe: Recipe, program: Program) -> list[str]:
    """Why an engine of the recipe does not run the program here, such as a package that is missing."""
    kept = {step.name for step in program.recipe}
    engines = [step for step in recipe.passes if isinstance(step, Engine) and step.name not in kept]
    return [f"{step.name} is left out: {step.why_not(program) or 'it changes nothing'}" for step in engines]


def _onnx(
    path: str | os.PathLike[str], verify_key: Any, captured: Captured, engine: str, notes: list[str]
) -> Way:
    """The ONNX model in ONNX Runtime or OpenVINO, with the original's call around it."""
    model = robot.load(path, verify_key=verify_key, engine=engine)
    notes.extend(model.notes)
    device = captured.program.device

    def call(*args: Any, **kwargs: Any) -> Any:
        arrays = [to_numpy(tensor) for tensor in tensors_of(flatten_call(args, kwargs)[0])]
        found = [torch.from_numpy(array) for array in model.step(*arrays)]
        exits = captured.program.exit
        outputs = [y.to(device, border.dtype) for y, border in zip(found, exits, strict=True)]
        return captured.layout.restore(outputs)

    options = model.options
    on_gpu = isinstance(options, SessionOptions) and options.provider == CUDA
    original = _without_autocast(_restored(captured), device)
    return Way(call, 1 if on_gpu else options.threads or thread_counts()[-1], original)


def _best(loaded: Sequence[LoadedModel], test: SelfTestCall, device: torch.device) -> LoadedModel:
    """The backend that serves best here, with what was measured of each as its `choice`."""
    if len(loaded) == 1:
        return loaded[0]
    calls = {
        each.backend: (functools.partial(each.step, test.state, test.args, test.kwargs), each.threads)
        for each in loaded
    }
    found = fastest(calls, device)
    (model,) = (each for each in loaded if each.backend == found.backend)
    model.choice = found.measured
    return model
