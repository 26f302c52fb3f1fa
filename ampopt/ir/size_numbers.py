"""Numbers that sizes make, as operands of tensors, for ONNX, whose exporter takes many of them for constants.

`x % width` has no ONNX form where the width varies, nor has `x ** width`, and the forms of `stable_forms` ask
for the dtype of what is no tensor. So such a number is written as a tensor of one number, for PyTorch's own
overload of the operator for tensors. Rolls and repetitions by sizes are written as slices and expansions.

Correct because: the tensor has the dtype in which the operator takes the number, which is that of its result,
or, where this is a truth, the one in which it compares. A roll by s begins at the place -s modulo the size.
What is repeated n times is n wide in a dimension of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.passes.shape_prop import ShapeProp

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import (
    arguments,
    aten,
    calls,
    copy_of,
    dtype_of,
    finish,
    gives_a_tensor,
    insert_call,
    replace,
    shape_of,
)

_END = 2**63 - 1


def is_number(value: Any) -> bool:
    """Whether an argument is a number that a graph computes of sizes; its shapes are recorded."""
    return isinstance(value, fx.Node) and value.meta.get("type") in (int, float, bool)


def with_numbers_as_tensors(module: fx.GraphModule, examples: Sequence[Tensor]) -> fx.GraphModule:
    """The graph with tensors for numbers made of sizes, where operators take those, and `FORMS`.

    `examples` are inputs of the graph: a run on them tells dtypes, and what is a number.
    """
    changed = copy_of(module)
    ShapeProp(changed).propagate(*examples)
    for node in calls(changed):
        if not isinstance(node.target, OpOverload) or not any(map(is_number, node.all_input_nodes)):
            continue
        form: Callable[..., Any] = FORMS.get(node.target, partial(_with_tensors, device=examples[0].device))
        made = form(partial(insert_call, changed, node), node)
        if made is not None:
            made.meta["tensor_meta"] = node.meta["tensor_meta"]
            replace(node, made)
    return finish(changed)


def _with_tensors(call: Call, node: fx.Node, device: torch.device) -> Any:
    """The call with tensors for its numbers; None where there is none, or no operator that takes tensors."""
    values, called = arguments(node), node.target
    assert isinstance(called, OpOverload)
    kinds = _kinds(called)
    made_of_sizes = {name for name, value in values.items() if is_number(value)}
    made_of_sizes = {name for name in made_of_sizes if kinds[name] in ("number", "Tensor")}
    target = _for_tensors(called, made_of_sizes)
    if not made_of_sizes or target is None:
        return None
    wanted = _kinds(target)

    def as_tensor(name: str, value: Any) -> Any:
        if wanted[name] != "Tensor" or not _is_scalar(value):
            return value
        return call(aten.scalar_tensor.default, value, dtype=_dtype(node, value), device=device)

    given = {**dict(zip(wanted, node.args, strict=False)), **node.kwargs}
    given = {name: as_tensor(name, value) for name, value in given.items()}
    named = {each.name for each in target._schema.arguments if each.kwarg_only} | node.kwargs.keys()
    positional = [value for name, value in given.items() if name not in named]
    return call(target, *positional, **{name: value for name, value in given.items() if name in named})


def _is_scalar(value: Any) -> bool:
    return is_number(value) or isinstance(value, int | float)


def _for_tensors(target: OpOverload, names: set[str]) -> OpOverload | None:
    """The overload that has tensors for these arguments, and maybe for other numbers; None: there is none."""
    kinds = _kinds(target)
    packet = target.overloadpacket
    others: list[OpOverload] = [getattr(packet, each) for each in packet.overloads()]
    for other in (target, *others):
        found = _kinds(other)
        is_alike = found.keys() == kinds.keys() and all(
            found[name] == "Tensor" if name in names else found[name] in (kind, "Tensor")
            for name, kind in kinds.items()
        )
        if is_alike:
            return other
    return None


def _kinds(target: OpOverload) -> dict[str, str]:
    """The types of an operator's arguments, whether they may be left out or not, by their names in order."""
    return {
        argument.name: str(argument.type).removeprefix("Optional[").removesuffix("]")
        for argument in target._schema.arguments
    }


def _dtype(node: fx.Node, number: Any) -> torch.dtype:
    """The dtype in which a call takes a number."""
    if dtype_of(node) is not torch.bool:
        return dtype_of(node)
    tensor = next(each for each in node.all_input_nodes if gives_a_tensor(each))
    kind = number.meta["type"] if is_number(number) else type(number)
    like = torch.empty(shape_of(tensor), dtype=dtype_of(tensor), device="meta")
    return torch.result_type(like, kind(1))


def _rolled(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    source, dims = values["self"], values["dims"]
    result = source if dims else call(aten.flatten.using_ints, source)
    for shift, dim in zip(_listed(values["shifts"]), _listed(dims or [0]), strict=True):
        size = call(aten.sym_size.int, result, dim)
        begin = call(operator.mod, call(operator.neg, shift), size)
        first = call(aten.slice.Tensor, result, dim, begin, _END)
        result = call(aten.cat.default, [first, call(aten.slice.Tensor, result, dim, 0, begin)], dim)
    return result if dims else call(aten.view_as.default, result, source)


def _repeated(call: Call, node: fx.Node) -> Any:
    values = arguments(node)
    source, dim, rank = values["self"], values["dim"], len(shape_of(values["self"]))
    if dim is None:
        source, dim, rank = call(aten.flatten.using_ints, source), 0, 1
    after = dim % rank + 1
    sizes = [-1] * after + [values["repeats"]] + [-1] * (rank - after)
    wide = call(aten.expand.default, call(aten.unsqueeze.default, source, after), sizes)
    return call(aten.flatten.using_ints, wide, after - 1, after)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, Sequence) else [value]


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.roll.default: _rolled,
    aten.repeat_interleave.self_int: _repeated,
}
"""Operators with a form of their own where they are given numbers that sizes make."""
