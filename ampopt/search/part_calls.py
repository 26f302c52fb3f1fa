"""The calls that submodules get in a call of a model, and whether they are all that there is between them.

An optimized submodule takes the arguments and gives the results of a call, and does nothing else: it writes
no attribute, runs no hook inside of it, and its constants stay what they are. So a submodule can be a part
only if nothing that it reaches (attributes of its modules, what its hooks and closures hold, class
attributes, global variables that its code names) is ever another than it was before the first call.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from ampopt.errors import CaptureError, first_line
from ampopt.ir.asked import watching_calls
from ampopt.ir.device_asserts import asserts_raised
from ampopt.ir.model_copy import device_of, same_tensor, untouched_rng, working_copy
from ampopt.ir.moments import Moment
from ampopt.ir.numerics import fresh_draw
from ampopt.ir.outside import variables_kept
from ampopt.ir.plain_tensors import is_transformed
from ampopt.ir.run_code import RunCode
from ampopt.ir.signature import call_key, copied, exactly_copied, flatten_call, map_tensors
from ampopt.system.interrupts import check_interrupted

Call = tuple[tuple[Any, ...], dict[str, Any]]

MOST_LOOKS = 32
"""Number of calls of one submodule, in one call of the model, around which is looked for changes."""

_PLAIN = (Tensor, int, float, bool, str, type(None))
"""Arguments whose whole value stands in a call's key; a region that takes others is not captured."""


def _is_plain(leaf: object) -> bool:
    return isinstance(leaf, _PLAIN) and not (isinstance(leaf, Tensor) and leaf.is_nested)


@dataclasses.dataclass(frozen=True)
class PartCalls:
    """The different calls of a submodule, and why it cannot be a part; None if it can."""

    calls: list[Call]
    why_not: str | None


def calls_of_parts(
    model: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, PartCalls]:
    """What is seen of these submodules, none inside of another, in two calls of a copy of the model.

    The second call gets other inputs, so that what depends on them is told from what is computed anew in
    every call. Where the model fails with them, or has no inputs that can vary, everything that is computed
    anew counts as a change. Raises CaptureError where the model fails then, too: when it is called again, or
    because it is watched, as PyTorch's encoder layers do if hooks are where nested tensors come.
    """
    leaves, spec = flatten_call(args, kwargs)
    generator = torch.Generator().manual_seed(11)
    others = map_tensors(lambda tensor: fresh_draw(tensor, generator), leaves, {})[0]
    vary = any(isinstance(a, Tensor) and not same_tensor(a, b) for a, b in zip(leaves, others, strict=True))
    if vary:
        with contextlib.suppress(_FailedError):
            return _watched(model, names, [leaves, others], spec, by_value=True)
    try:
        return _watched(model, names, [leaves, leaves], spec, by_value=False)
    except _FailedError as failed:
        cause = failed.__cause__
        reason = first_line(cause) if isinstance(cause, Exception) else str(failed)
        raise CaptureError(f"the model fails in two calls that are watched: {reason}") from cause


class _FailedError(Exception):
    """The model fails in one of the calls, with the error that is the cause."""


def _watched(
    model: nn.Module,
    names: Sequence[str],
    rows: list[Sequence[Any]],
    spec: pytree.TreeSpec,
    *,
    by_value: bool,
) -> dict[str, PartCalls]:
    code, refused = RunCode(), dict[str, str]()
    with variables_kept(model):  # what a first call sets is a change that is to be seen
        _call(working_copy(model), rows[0], spec, code)
    while True:
        seen = _watched_with(code, model, names, rows, spec, by_value=by_value)
        refused = {name: part.why_not for name, part in seen.items() if part.why_not is not None} | refused
        if not code.learn():  # else functions ran that were not looked into
            return {name: PartCalls(part.calls, refused.get(name)) for name, part in seen.items()}


def _watched_with(
    code: RunCode,
    model: nn.Module,
    names: Sequence[str],
    rows: list[Sequence[Any]],
    spec: pytree.TreeSpec,
    *,
    by_value: bool,
) -> dict[str, PartCalls]:
    """The same, where of the functions of libraries those matter that the `code` counts."""
    model = working_copy(model)
    code.code_of(model)  # functions whose results are cached count from now on
    with contextlib.ExitStack() as stack:
        modules = {name: model.get_submodule(name) for name in names}
        watches = {
            name: _Watch(module, stack, by_value, code)
            for name, module in modules.items()
            if not isinstance(module, torch.jit.ScriptModule)  # it takes no such hook
        }
        for watch in watches.values():
            watch.begin()
        for leaves in rows:
            _call(model, leaves, spec, code)
            for watch in watches.values():
                watch.end_of_call()
    return {name: PartCalls(list(w.calls.values()), w.why_not) for name, w in watches.items() if w.calls}


def _call(model: nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec, code: RunCode) -> None:
    """Call a copy of the model, and note what runs. Raises _FailedError where it fails."""
    device = device_of(model, leaves)
    args, kwargs = pytree.tree_unflatten(map_tensors(copied, leaves, {})[0], spec)
    try:
        with torch.no_grad(), untouched_rng(device), asserts_raised(device), code.noted():
            model(*args, **kwargs)
    except Exception as error:
        check_interrupted(error)
        raise _FailedError from error


class _Watch:
    """Hooks around one submodule, which record its calls and look at what it reaches."""

    def __init__(self, module: nn.Module, stack: contextlib.ExitStack, by_value: bool, code: RunCode) -> None:
        self._module, self._by_value, self._code = module, by_value, code
        self.calls: dict[object, Call] = {}
        self.why_not: str | None = None
        self._is_first, self._looks = True, 0
        self._given: tuple[list[Any], pytree.TreeSpec] | None = None
        # Hooks of its own run before and after the optimized code: this looks between them and that.
        before = module.register_forward_pre_hook(_Look(self.before), with_kwargs=True)
        after = module.register_forward_hook(_Look(self.after), with_kwargs=True, prepend=True)
        stack.callback(before.remove)
        stack.callback(after.remove)

    def begin(self) -> None:
        """Look at what the submodule reaches before the first call."""
        self._first = self._now()

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call that begins."""
        self._given = None
        if is_transformed():  # its tensors end with the transform, within which the original answers
            return
        leaves, spec = flatten_call(args, kwargs)
        self._given = leaves, spec
        if self._is_first and all(map(_is_plain, leaves)):
            self.calls.setdefault(call_key(leaves, spec), map_tensors(exactly_copied, args, kwargs))
        self._looks += 1
        if self._looks <= MOST_LOOKS:
            self._look("before it is called")

    def after(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Look at what a call has left."""
        if self._given is None:
            return
        leaves, spec = flatten_call(args, kwargs)
        if self.why_not is None:
            given, as_given = self._given
            if spec != as_given or any(a is not b for a, b in zip(leaves, given, strict=True)):
                self.why_not = "it changes a container that it is called with"
        if self._looks <= MOST_LOOKS:
            self._look("when it is called")

    def end_of_call(self) -> None:
        """Look at what a call of the whole model has left."""
        self._look("after it is called")
        self._is_first, self._looks = False, 0

    def _look(self, when: str) -> None:
        if self.why_not is None:
            changed = self._first.change_until(self._now(), by_value=self._by_value)
            if changed is not None:
                self.why_not = f"{changed} changes {when}{_as_in_training(self._module, changed)}"

    def _now(self) -> Moment:
        own = (self._module._forward_hooks, self._module._forward_pre_hooks)
        return Moment(
            self._module,
            lambda part: isinstance(part, _Look) or any(part is each for each in own),
            runs=self._code.counts,
        )


def _as_in_training(module: nn.Module, changed: str) -> str:
    """What to do about a norm that changes its running statistics, which this is an attribute of; else ""."""
    holder, _, _ = changed.rpartition(".")
    norm = dict(module.named_modules()).get(holder)
    if not isinstance(norm, _NormBase) or not norm.training:
        return ""
    name = f"{holder} ({type(norm).__name__})" if holder else "it"
    return f": {name} normalizes by its input, as in training, and does not in evaluation mode"


class _Look:
    """A hook of this module, which is no part of what it looks at."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        """Look, which is no code of the model's."""
        with watching_calls(None):
            self._hook(*args)
