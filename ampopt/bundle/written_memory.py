"""Memory that a model asks for and then writes to (`torch.empty`): in a file it holds zeros at first.

A file with memory that nothing has written could show what another program has left there, so that no reader
takes such an operator.
"""

from __future__ import annotations

import torch
from torch import fx

from ampopt.ir.graph import aten, calls, copy_of, finish, insert_call, replace

_FORMS = {
    aten.empty.memory_format: (aten.full.default, 1),
    aten.new_empty.default: (aten.new_full.default, 2),
    aten.empty_like.default: (aten.full_like.default, 1),
}
"""For each operator the one that fills, and the number of arguments before the value."""


def with_written_memory(module: fx.GraphModule) -> fx.GraphModule:
    """A graph in which such memory is filled: empty(size) → full(size, 0.0).

    Requires that both lay out the memory alike: `empty` with another memory format stays as it is, and the
    file refuses it. Correct because `empty` promises no values, so zeros are right wherever it is; the dtype
    is that of the call, or else the default one for both, because the value has a fraction. Costs the time
    to fill.
    """
    if not any(calls(module, _FORMS)):
        return module
    module = copy_of(module)
    for node in calls(module, _FORMS):
        target, places = _FORMS[node.target]  # type: ignore[index]
        kwargs, formats = dict(node.kwargs), {None, torch.contiguous_format}
        if node.target is aten.empty.memory_format and kwargs.pop("memory_format", None) not in formats:
            continue
        if len(node.args) == places:
            replace(node, insert_call(module, node, target, *node.args, 0.0, **kwargs))
    return finish(module)
