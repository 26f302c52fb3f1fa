"""What each operator of a graph computes and moves in one call: parameters, FLOP and bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ampopt.diagnosis.flops import own_flops
from ampopt.ir.graph import arguments, is_constant
from ampopt.ir.origin import origins_of
from ampopt.ir.own_autocast import own_scope
from ampopt.ir.program import Program

_TABLES = {
    **dict.fromkeys(("embedding", "embedding_bag"), "weight"),
    **dict.fromkeys(("index", "index_select", "gather", "take", "masked_select"), "self"),
}
"""The arguments of which operators read as much as they choose, by operator."""

_UNREAD = ("copy", *(f"{kind}_like" for kind in ("empty", "full", "ones", "rand", "randn", "zeros")))
"""The operators that read nothing of `self` but its shape."""

_PARAMETER = "p_"
"""The beginning of the names that `torch.export` gives to parameters; those of buffers begin otherwise."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What an operator computes and moves in one call.

    `parameters` are the elements of the model's parameters that no operator before it reads. `flops` are
    those of products and convolutions, as `torch.utils.flop_counter` and `flops` count them; `moved` are the
    bytes of everything that it reads and writes at least, 0 for a view, and `floats` those of them that are
    in FP32.
    """

    operator: str
    module: str
    source: str
    shape: tuple[int, ...]
    parameters: int
    flops: int
    moved: int
    floats: int

    @property
    def madds(self) -> int:
        """Multiplications with an addition: half the FLOP."""
        return self.flops // 2

    @property
    def place(self) -> str:
        """`layer3.0.conv1, resnet.py:92`."""
        return ", ".join(part for part in (self.module, self.source) if part)

    def moved_in(self, dtype: torch.dtype) -> int:
        """The bytes that it moves where everything in FP32 is in another dtype."""
        return self.moved - self.floats + self.floats * dtype.itemsize // torch.float32.itemsize


def works(program: Program) -> dict[str, Work]:
    """The work of every call of a graph, in its lane's dtypes, by its name; costs one run."""
    with program.scope(), FlopCounterMode(display=False) as counter:
        entered = [border.convert(t) for border, t in zip(program.entry, program.examples, strict=True)]
        run = _Works(program, counter)
        run.run(*entered)
    return run.found


class _Works(fx.Interpreter):
    def __init__(self, program: Program, counter: FlopCounterMode) -> None:
        super().__init__(program.graph)
        self._device, self._counter = program.device, counter
        self._counted: set[int] = set()
        self.found: dict[str, Work] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        before = self._counter.get_total_flops()
        with own_scope(n, self._device):
            result = super().run_node(n)
        counted = self._counter.get_total_flops() - before
        operator = str(getattr(n.target, "overloadpacket", n.target)).removeprefix("aten.")
        is_operator = isinstance(n.target, torch._ops.OpOverload)
        values = fx.node.map_arg(arguments(n), lambda own: self.env[own]) if is_operator else {}
        given, taken = _tensors(result), _tensors([self.env[source] for source in n.all_input_nodes])
        own = own_flops(operator, values, given[0]) if given else None
        origin = next(iter(origins_of(n)), None)
        memory = _moved(given, taken, _partly_read(operator, values, given))
        self.found[n.name] = Work(
            operator=operator,
            module=origin.module if origin else "",
            source=origin.source if origin else "",
            shape=tuple(given[0].shape) if given else (),
            parameters=self._new_parameters(n),
            flops=counted if own is None else own,
            moved=sum(memory.values()),
            floats=memory.get(torch.float32, 0),
        )
        return result

    def _new_parameters(self, node: fx.Node) -> int:
        """The elements of the parameters that a call reads first; one that is shared is one."""
        found = 0
        for source in filter(is_constant, node.all_input_nodes):
            weight = self.env[source]
            if str(source.target).startswith(_PARAMETER) and weight.data_ptr() not in self._counted:
                self._counted.add(weight.data_ptr())
                found += weight.numel()
        return found


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value that have strides; sparse ones are not counted."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return [tensor for tensor in leaves if tensor.layout is torch.strided]


def _partly_read(operator: str, values: Mapping[str, Any], given: Sequence[Tensor]) -> dict[int, int]:
    """The bytes that are read of a table at most, by its identity: of an embedding, the rows in question."""
    if operator in _UNREAD:
        return {id(values["self"]): 0}
    table = values.get(_TABLES.get(operator, ""))
    if not isinstance(table, Tensor) or not given:
        return {}
    if operator == "embedding_bag":
        return {id(table): values["indices"].numel() * table.shape[1] * table.element_size()}
    return {id(table): given[0].nbytes}


def _moved(
    given: Sequence[Tensor], taken: Sequence[Tensor], most: Mapping[int, int]
) -> dict[torch.dtype, int]:
    """The bytes that a call reads and writes at least, by dtype: none for views. `most`: see `_partly_read`.

    What is read twice is read once, such as a matrix and its transpose.
    """
    read = {t.untyped_storage().data_ptr() for t in taken}
    made = [t for t in given if t.untyped_storage().data_ptr() not in read]
    if not made:
        return {}
    regions = {(t.data_ptr(), t.dtype, min(_bytes(t), most.get(id(t), _bytes(t)))) for t in (*taken, *made)}
    moved: dict[torch.dtype, int] = {}
    for _, dtype, size in regions:
        moved[dtype] = moved.get(dtype, 0) + size
    return moved


def _bytes(tensor: Tensor) -> int:
    """The bytes that a tensor's elements lie in: those of one that is expanded, or of windows, share some."""
    if not tensor.numel():
        return 0
    sides = list(zip(tensor.shape, tensor.stride(), strict=True))
    distinct = math.prod(size for size, stride in sides if stride)
    extent = 1 + sum((size - 1) * stride for size, stride in sides)
    return tensor.element_size() * min(distinct, extent)
