"""training-mode: what a call computes as in training: batch norms, dropouts, and whatever changes results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ampopt.diagnosis.case import Case, eager_call, trial_s
from ampopt.diagnosis.finding import Counterfactual, Finding, saved
from ampopt.diagnosis.training_acts import BATCH_NORM, DROPOUT, RRELU, Act, Ran, ran
from ampopt.errors import first_line
from ampopt.ir.lanes import FP32
from ampopt.ir.model_copy import exact_copy, is_training, private_copy
from ampopt.measure.results import IncomparableError, distance
from ampopt.system.interrupts import check_interrupted

_DOES = {
    BATCH_NORM: "normalizes with this batch's statistics",
    DROPOUT: "drops values at random",
    RRELU: "takes random slopes",
}

OTHER = "other module"

ADVICE = "model.eval() before inference"

DIFFERENT, ROUNDINGS = 1e-5, 4
"""From this relative error on results are others than in evaluation mode, or from so many roundings on."""


def find(case: Case) -> Iterator[Finding]:
    """Executed: a call of the model as it is, and one after `eval()`, with the same random numbers.

    What both do as in training, such as a dropout whose `training` was forgotten, is told with its line. What
    only the first one does is told by kind, with the modules' lines; where the results still differ without
    these, by the classes of modules whose mode changes them; not where the model has other results in each
    call, whatever its mode. Then each kind is timed after `eval()`, where there are several after that of
    each alone, so that none has the others' share; not where its modules are not known.
    """
    modules = dict(case.model.named_modules())
    classes = set(map(_class_of, modules.values()))
    needed_s = (5 + len(classes)) * case.latency["fp32"].median
    if not case.has_time("whether it computes anything as in training", needed_s):
        yield from _findings(case, _by_their_flags(modules), modules)
        return
    evaluated = _evaluated(case)
    yield from map(_in_evaluation, evaluated.acts)
    if not any(map(is_training, modules.values())):
        return
    try:
        given = _called(case, ())
    except Exception as error:
        check_interrupted(error)
        says = f"the model is in training mode, in which its call fails: {first_line(error)}"
        yield Finding("training-mode", says, advice=ADVICE, is_fault=True)
        return
    yield from _findings(case, _kinds(case, given, evaluated, modules), modules)


def _findings(
    case: Case, found: Mapping[str, list[str]], modules: Mapping[str, nn.Module]
) -> Iterator[Finding]:
    for kind, paths in found.items():
        if len(found) == 1:
            timed = _executed(case, "after model.eval()", None)
        else:
            timed = _executed(case, f"after eval() of its {kind}s alone", paths) if paths else None
        name = "training-mode" if kind == OTHER else f"{kind.replace(' ', '-').lower()}-in-training-mode"
        yield Finding(
            name,
            _told(kind, paths, modules),
            places=tuple(case.watched.place(path) for path in paths[:3] if path),
            advice=ADVICE,
            share=0.0 if timed is None else saved(timed),
            is_fault=True,
            counterfactual=timed,
        )


def _told(kind: str, paths: Sequence[str], modules: Mapping[str, nn.Module]) -> str:
    keeps = ", and changes its own" if kind == BATCH_NORM else ""
    does = f"{_DOES.get(kind, 'gives other results than in evaluation mode')}{keeps}"
    if not paths:
        return f"in training mode the model {does}"
    named = f"{paths[0] or 'the model'} ({_class_of(modules[paths[0]])})"
    if len(paths) == 1:
        return f"in training mode {named} {does}: results depend on it"
    return f"in training mode each of {len(paths)} modules, {named} first, {does}: results depend on it"


def _class_of(module: nn.Module) -> str:
    """The name of its class, of TorchScript that of the class that was compiled."""
    is_script = isinstance(module, torch.jit.ScriptModule)
    return str(module.original_name) if is_script else type(module).__name__


def _in_evaluation(act: Act) -> Finding:
    """What is done as in training after `eval()`, too: a fault where it is random, or changes the model."""
    by = act.place or act.module or "the model"
    advice = {
        BATCH_NORM: "give batch norms running statistics, and F.batch_norm training=self.training",
        DROPOUT: "give F.dropout training=self.training, and attention no dropout_p then",
        RRELU: "give F.rrelu training=self.training",
    }
    keeps = ", and changes the running ones" if act.is_kept else ""
    return Finding(
        f"{act.kind.replace(' ', '-').lower()}-in-evaluation-mode",
        f"{by} {_DOES[act.kind]}{keeps} in evaluation mode, too: results depend on it",
        places=tuple(part for part in (act.module,) if part),
        advice=advice[act.kind],
        is_fault=act.kind != BATCH_NORM or act.is_kept,
    )


def _kinds(case: Case, given: Ran, evaluated: Ran, modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """The modules, by their paths, that behave otherwise in training mode, by kind.

    Under `OTHER` are those whose results differ for a reason that no function tells; none of these, where no
    class alone is one, or where a call in training mode has other results each time.
    """
    found: dict[str, list[str]] = {}
    for act in given.acts:
        if act not in evaluated.acts and act.module not in found.get(act.kind, ()):
            found.setdefault(act.kind, []).append(act.module)
    known = [path for paths in found.values() for path in paths]
    rest = _called(case, known)
    if not _differ(case, rest, evaluated):
        return found
    if _differ(case, evaluated, _evaluated(case)):
        case.notes.append(
            "whether other modules compute anything as in training is not known: calls with the same inputs "
            "and random numbers have different results"
        )
        return found
    if _differ(case, rest, _called(case, known)):
        return {**found, OTHER: []}
    by_class: dict[str, list[str]] = {}
    for path, module in modules.items():
        if is_training(module) and path in given.called and path not in known:
            by_class.setdefault(_class_of(module), []).append(path)
    guilty = [
        path
        for paths in by_class.values()
        if _differ(case, _called(case, [*known, *paths]), rest)
        for path in paths
    ]
    return {**found, OTHER: guilty}


def _by_their_flags(modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """The batch norms and dropouts that would behave as in training, where there is no time to call them."""
    found: dict[str, list[str]] = {}
    for path, module in modules.items():
        if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
            found.setdefault(BATCH_NORM, []).append(path)
        elif isinstance(module, _DropoutNd) and module.training and module.p > 0:
            found.setdefault(DROPOUT, []).append(path)
    return found


def _evaluated(case: Case) -> Ran:
    """A call of the model in evaluation mode."""
    return ran(private_copy(case.model, case.device), case.args, case.kwargs, case.device)


def _called(case: Case, evaluated: Sequence[str]) -> Ran:
    """A call of the model as it is, but some modules, by their paths, in evaluation mode."""
    return ran(_copy(case, evaluated), case.args, case.kwargs, case.device)


def _copy(case: Case, evaluated: Sequence[str] = ()) -> nn.Module:
    copied = exact_copy(case.model).to(case.device)
    modules = dict(copied.named_modules())
    for path in evaluated:
        modules[path].training = False
    return copied


def _differ(case: Case, one: Ran, other: Ran) -> bool:
    floats = (weight.dtype for weight in case.original.parameters() if weight.is_floating_point())
    epsilon = max((torch.finfo(dtype).eps for dtype in floats), default=0.0)
    try:
        return not distance(one.result, other.result).error <= max(DIFFERENT, ROUNDINGS * epsilon)
    except IncomparableError:
        return False


def _executed(case: Case, change: str, paths: Sequence[str] | None) -> Counterfactual | None:
    """The model as it is against it with some modules in evaluation mode, all for None; None without time."""
    if not case.has_time(change, trial_s(case.latency["fp32"].median)):
        return None
    as_it_is = _copy(case)
    after = private_copy(case.model, case.device) if paths is None else _copy(case, paths)
    calls = (eager_call(model, case.args, case.kwargs, case.device, FP32) for model in (as_it_is, after))
    return case.counterfactual(change, *calls)
