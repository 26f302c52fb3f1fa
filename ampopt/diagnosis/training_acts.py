"""What a call computes as in training, each with its line: this batch's statistics, dropouts, random slopes.

Functions are seen as they are called, with their `training` and probability, whatever the modules' flags are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ampopt.diagnosis.case import own_tensors
from ampopt.diagnosis.module_calls import modules_inside
from ampopt.ir.model_copy import seed_all, untouched_rng
from ampopt.ir.place_in_code import place_of_call
from ampopt.ir.settings import Settings

BATCH_NORM, DROPOUT, RRELU = "batch norm", "dropout", "RReLU"

_DROPOUTS = [
    getattr(torch, name + end)
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for end in ("", "_")
]

_NAMES: dict[Any, tuple[str, ...]] = {
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training"),
    **dict.fromkeys(_DROPOUTS, ("input", "p", "train")),
    **dict.fromkeys((torch.rrelu, torch.rrelu_), ("input", "lower", "upper", "training")),
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p"),
}
"""The names of the arguments of functions that are not written in Python."""

Given = Mapping[str, Any]
"""The arguments of a call by their names."""


@dataclasses.dataclass(frozen=True)
class Act:
    """One thing that a call does as in training.

    `module` is the path of the module that does it, "" for the model itself, `place` the line of the user's
    code, and `is_kept`: it changes the running statistics.
    """

    kind: str
    module: str
    place: str
    is_kept: bool = False


@dataclasses.dataclass(frozen=True)
class Ran:
    """A call's result, what it did as in training, and the paths of the modules that it called."""

    result: Any
    acts: tuple[Act, ...]
    called: frozenset[str]


def ran(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> Ran:
    """Call a model, a copy that nothing else uses, with seeded random generators, which are put back.

    Raises what the model does.
    """
    called = {path for path, each in model.named_modules() if isinstance(each, torch.jit.ScriptModule)}
    args, kwargs = own_tensors(args, kwargs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(untouched_rng(device))
        stack.enter_context(torch.no_grad())
        stack.enter_context(Settings().scope(device))
        inside = stack.enter_context(modules_inside(model, called.add))
        seed_all(0, device)
        watching = stack.enter_context(_Functions(lambda: inside[-1] if inside else ""))
        result = model(*args, **kwargs)
    return Ran(result, tuple(watching.acts), frozenset(called))


class _Functions(TorchFunctionMode):
    """Notes the functions that are told to behave as in training, and do."""

    def __init__(self, module: Callable[[], str]) -> None:
        super().__init__()
        self._module = module
        self.acts: dict[Act, None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See the class."""
        kind, acts = _KINDS.get(func, ("", None))
        given = {} if acts is None else _given(func, args, kwargs or {})
        if acts is not None and acts(given):
            is_kept = given.get("running_mean") is not None
            self.acts[Act(kind, self._module(), place_of_call(ran.__code__) or "", is_kept)] = None
        return func(*args, **(kwargs or {}))


def _given(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
    if func in _RECURRENT:
        return _of_recurrent(args)
    if func in _NAMES:
        return {**dict(zip(_NAMES[func], args, strict=False)), **kwargs}
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _of_recurrent(args: tuple[Any, ...]) -> Given:
    """`…, has_biases, num_layers, dropout, train, …`, after three other arguments or, if packed, four."""
    first = next((place for place, each in enumerate(args) if isinstance(each, bool)), len(args))
    names = ("num_layers", "p", "train")
    found = dict(zip(names, args[first + 1 : first + 4], strict=False))
    return found if found.get("num_layers", 1) > 1 else {**found, "p": 0.0}  # it drops between layers


def _trains(given: Given) -> bool:
    return bool(given.get("training", given.get("train")))


def _drops(given: Given) -> bool:
    return _trains(given) and given.get("p", given.get("dropout_p", 0.0)) > 0


def _drops_weights(given: Given) -> bool:
    return bool(given.get("dropout_p"))


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)

_KINDS: dict[Any, tuple[str, Callable[[Given], bool]]] = {
    **dict.fromkeys((F.batch_norm, torch.batch_norm), (BATCH_NORM, _trains)),
    **dict.fromkeys(
        (
            *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
            *_DROPOUTS,
            *_RECURRENT,
            F.multi_head_attention_forward,
        ),
        (DROPOUT, _drops),
    ),
    F.scaled_dot_product_attention: (DROPOUT, _drops_weights),
    **dict.fromkeys((F.rrelu, torch.rrelu, torch.rrelu_), (RRELU, _trains)),
}
"""What is noted of which functions, and when: a mode sees no function inside another that it has seen."""
