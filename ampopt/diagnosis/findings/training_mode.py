"""training-mode: batch norms or dropouts that behave as in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ampopt.diagnosis.case import Case, eager_call, trial_s
from ampopt.diagnosis.finding import Counterfactual, Finding, saved
from ampopt.ir.lanes import FP32
from ampopt.ir.model_copy import exact_copy

_KINDS: dict[str, tuple[type[nn.Module], str]] = {
    "batch norm": (_BatchNorm, "normalizes with this batch's statistics, and changes its own"),
    "dropout": (_DropoutNd, "drops values at random"),
}


def find(case: Case) -> Iterator[Finding]:
    """Each kind, with its modules' lines; executed: the model after `eval()`, or where both kinds are in
    training mode, after that of each kind alone, so that none has the other's share.
    """
    found = {kind: paths for kind, (of, _) in _KINDS.items() if (paths := training(case.model, of))}
    for kind, paths in found.items():
        change = "after model.eval()" if len(found) == 1 else f"after eval() of its {kind}s alone"
        ran = _executed(case, change, None if len(found) == 1 else paths)
        does = f"{kind} in training mode, which {_KINDS[kind][1]}"
        yield Finding(
            f"{kind.replace(' ', '-')}-in-training-mode",
            f"{paths[0]} is a {does}: results depend on it, and it is not folded"
            if len(paths) == 1
            else f"{len(paths)} modules are {kind}s in training mode: each {_KINDS[kind][1]}",
            places=tuple(case.watched.place(path) for path in paths[:3]),
            advice="model.eval() before inference",
            share=0.0 if ran is None else saved(ran),
            is_fault=True,
            counterfactual=ran,
        )


def training(model: nn.Module, of: type[nn.Module]) -> list[str]:
    """The paths of a model's modules of a class that are in training mode."""
    return [path for path, module in model.named_modules() if isinstance(module, of) and module.training]


def _executed(case: Case, change: str, paths: Sequence[str] | None) -> Counterfactual | None:
    """The model as it is against it with some modules in evaluation mode, all for None; None without time."""
    if not case.has_time(change, trial_s(case.latency["fp32"].median)):
        return None
    as_it_is = exact_copy(case.model).to(case.device)
    after = exact_copy(as_it_is)
    for path in ("",) if paths is None else paths:
        after.get_submodule(path).eval()
    calls = (eager_call(model, case.args, case.kwargs, case.device, FP32) for model in (as_it_is, after))
    return case.counterfactual(change, *calls)
