"""Operators of ours that call PyTorch's where a place may be out of range, so that it is PyTorch that checks.

Inductor checks it in the loop that it makes of the operator. If several threads share the loop, as on a CPU,
what the check raises in one of them ends the process.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from ampopt.ir.graph import aten, calls, finish
from ampopt.ir.index_ranges import may_miss
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.system.once import once

_CHECKED = (
    *(aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default),
    *(aten.take.default, aten.put.default, aten.index_put.default, aten.index_add.default),
    *(aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_fill.int_Tensor),
    *(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter_add.default),
    *(aten.scatter_reduce.two, aten.max_unpool2d.default, aten.max_unpool3d.default),
)
"""The operators with places among their arguments that graphs have."""


_LIBRARY = torch.library.Library("ampopt", "FRAGMENT")
"""Where they are registered: a call costs 3 µs more than PyTorch's own, and 36 with `custom_op`."""


@once
def checked_operators() -> dict[Any, torch._ops.OpOverload]:
    """For each of those operators, ours; registered with PyTorch at the first call."""
    made: dict[Any, torch._ops.OpOverload] = {}
    for theirs in _CHECKED:
        name = theirs._schema.name.removeprefix("aten::") + f"_{theirs._overloadname}"
        text = str(theirs._schema)
        _LIBRARY.define(name + text[text.index("(") :], tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, theirs, "CPU")
        torch.library.register_fake(f"ampopt::{name}", functools.partial(_call, theirs), lib=_LIBRARY)
        made[theirs] = getattr(torch.ops.ampopt, name).default
    return made


def _call(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


def keep_checks(module: fx.GraphModule, program: Program) -> None:
    """Use these operators in a copy of a program's graph wherever a place may be out of range."""
    if not (nodes := list(calls(module, _CHECKED))):
        return
    names = {node.name for node in may_miss(record_shapes(program))}
    for node in nodes:
        if node.name in names:
            node.target = checked_operators()[node.target]
    finish(module)
