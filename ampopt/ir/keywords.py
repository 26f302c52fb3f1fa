"""The order of keyword arguments: kept where a model can see it, and of no account where it cannot.

`forward(self, **sensors)` sees the order of its sensors. `forward(self, image, mask)` takes each argument by
its name, so that two calls that differ in the order alone are one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn


def taken_by_name(model: nn.Module) -> frozenset[str]:
    """The keyword arguments whose order a model cannot see: those that its `forward` names.

    There are none where more than `forward` sees the call: a `__call__` of its own, a hook that takes keyword
    arguments, a decorator of `forward`.
    """
    seen_by_hooks = model._forward_pre_hooks_with_kwargs or model._forward_hooks_with_kwargs
    if type(model).__call__ is not nn.Module.__call__ or seen_by_hooks:
        return frozenset()
    try:
        parameters = inspect.signature(model.forward, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # code without a signature, as TorchScript's
        return frozenset()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(name for name, parameter in parameters.items() if parameter.kind in kinds)


def in_order(kwargs: Mapping[str, Any], by_name: frozenset[str]) -> dict[str, Any]:
    """Keyword arguments in the one order for all calls that a model cannot tell apart.

    They are sorted, except that several which are not taken by name come last, in the caller's order.
    """
    if len(kwargs) > 1 and not by_name.issuperset(kwargs):
        others = [name for name in kwargs if name not in by_name]
        if len(others) > 1:  # one alone has no order
            return {name: kwargs[name] for name in (*sorted(kwargs.keys() & by_name), *others)}
    return dict(sorted(kwargs.items()))
