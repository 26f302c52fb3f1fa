"""training-mode: batch norms or dropouts that behave as in training."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ampopt.diagnosis.case import Case, eager_call, trial_s
from ampopt.diagnosis.finding import Finding, saved
from ampopt.ir.lanes import FP32
from ampopt.ir.model_copy import exact_copy

_KINDS: dict[str, tuple[type[nn.Module], str]] = {
    "batch norm": (_BatchNorm, "normalizes with this batch's statistics, and changes its own"),
    "dropout": (_DropoutNd, "drops values at random"),
}


def find(case: Case) -> Iterator[Finding]:
    """Each kind, with its modules' lines; executed: the model after `eval()`."""
    for kind, (of, does) in _KINDS.items():
        found = [
            path for path, module in case.model.named_modules() if isinstance(module, of) and module.training
        ]
        if not found:
            continue
        as_it_is = exact_copy(case.model).to(case.device)
        ran = None
        if case.has_time("after model.eval()", trial_s(case.latency["fp32"].median)):
            before = eager_call(as_it_is, case.args, case.kwargs, case.device, FP32)
            ran = case.counterfactual("after model.eval()", before, case.eager())
        count = f"{len(found)} modules are" if len(found) > 1 else f"{found[0]} is"
        yield Finding(
            f"{kind.replace(' ', '-')}-in-training-mode",
            f"{count} a {kind} in training mode, which {does}: results depend on it, and it is not folded"
            if len(found) == 1
            else f"{len(found)} modules are {kind}s in training mode: each {does}",
            places=tuple(case.watched.place(path) for path in found[:3]),
            advice="model.eval() before inference",
            share=0.0 if ran is None else saved(ran),
            is_fault=True,
            counterfactual=ran,
        )
