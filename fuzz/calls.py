"""How a random network is called: the values, memory and structure of its arguments, and of its results."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, function: Callable[[Tensor], Tensor]) -> Call:
        """The call with another tensor for each of its tensors; one that comes twice stays one."""
        known: dict[int, Tensor] = {}

        def once(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in known:
                known[id(leaf)] = function(leaf)
            return known[id(leaf)]

        args, kwargs = pytree.tree_map(once, (self.args, self.kwargs))
        return Call(args, kwargs)

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors, in the order in which ampopt counts them."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def same_memory(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does: strides, overlaps and offset, in storage of its own."""
    if tensor.is_neg() or tensor.is_conj():
        return tensor.detach().clone()
    storage = tensor.detach().untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return copy.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else copy


def numbers(values: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random float64 numbers of one of the kinds in `VALUES`."""
    normal = torch.randn(list(shape), generator=generator, dtype=torch.float64)
    ways: dict[str, Callable[[], Tensor]] = {
        "normal": lambda: normal,
        "uniform": lambda: torch.rand(list(shape), generator=generator, dtype=torch.float64),
        "image": lambda: (normal * 40 + 120).clamp(0, 255).round(),
        "negative": lambda: -normal.abs() - 1,
        "large": lambda: normal * 1e3,
        "huge": lambda: normal * 1e30,
        "tiny": lambda: normal * 1e-25,
        "subnormal": lambda: normal * 1e-40,
        "mixed": lambda: normal * 10.0 ** torch.randint(-8, 6, list(shape), generator=generator).double(),
        "constant": lambda: torch.full(list(shape), 0.7, dtype=torch.float64),
        "zeros": lambda: torch.zeros(list(shape), dtype=torch.float64),
        "negative zeros": lambda: -torch.zeros(list(shape), dtype=torch.float64),
        "nan": lambda: _with_one(normal, float("nan")),
        "inf": lambda: _with_one(normal, float("inf")),
        "minus inf": lambda: _with_one(normal, float("-inf")),
    }
    return ways[values]()


def _with_one(normal: Tensor, value: float) -> Tensor:
    if normal.numel():
        normal.view(-1)[normal.numel() // 2] = value
    return normal


VALUES = {
    "normal": 10.0,
    "uniform": 2.0,
    "image": 1.0,
    "negative": 1.0,
    "large": 1.0,
    "huge": 0.3,
    "tiny": 0.3,
    "subnormal": 0.3,
    "mixed": 0.5,
    "constant": 1.0,
    "zeros": 1.0,
    "negative zeros": 0.2,
    "nan": 0.7,
    "inf": 0.4,
    "minus inf": 0.2,
}
"""Kinds of numbers in the inputs, and how often they are drawn, in proportion."""

MEMORIES = {
    "contiguous": 8.0,
    "channels_last": 1.5,
    "transposed": 1.0,
    "sliced": 1.0,
    "expanded": 0.5,
    "offset": 0.5,
    "negative bit": 0.2,
    "requires grad": 0.7,
    "parameter": 0.2,
}
"""How the first input lies in memory, and what it is."""


def in_memory(memory: str, values: Tensor) -> Tensor:
    """The same numbers, lying in memory as one of `MEMORIES` says, where the shape allows it."""
    dims = values.dim()
    if memory == "channels_last" and dims in (4, 5):
        return values.contiguous(memory_format=torch.channels_last if dims == 4 else torch.channels_last_3d)
    if memory == "transposed" and dims >= 2:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if memory == "sliced" and dims >= 1:
        return torch.stack([values, values + 1], -1).flatten(-2)[..., ::2]
    if memory == "expanded" and dims >= 2 and values.shape[0] > 0:
        return values[:1].expand(values.shape)
    if memory == "offset" and dims >= 1:
        return torch.cat([values.new_ones(3), values.flatten()])[3:].view(values.shape)
    if memory == "negative bit" and values.dtype in (torch.float32, torch.float64):
        return torch.complex(values, -values).conj().imag
    if memory == "requires grad":
        return values.requires_grad_()
    if memory == "parameter":
        return torch.nn.Parameter(values)
    return values


def _second(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def arguments(kind: str, x: Tensor, generator: torch.Generator) -> Call:
    """A call with `x` as its first tensor, put together as one of `CALLS` says."""
    ways: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
        "one": lambda: ((x,), {}),
        "two": lambda: ((x, _second(x, generator)), {}),
        "same": lambda: ((x, x), {}),
        "row": lambda: ((x, _second(x, generator).detach().flatten()[: x.shape[-1] if x.dim() else 1]), {}),
        "kwarg": lambda: ((x,), {"z": _second(x, generator)}),
        "kwargs only": lambda: ((), {"x": x, "a": _second(x, generator)}),
        "int": lambda: ((x, 3), {}),
        "float": lambda: ((x, 0.5), {}),
        "flag": lambda: ((x, True), {}),
        "none": lambda: ((x, None), {}),
        "word": lambda: ((x,), {"mode": "double"}),
        "mask": lambda: ((x, torch.rand(x.shape, generator=generator).to(x.device) > 0.3), {}),
        "index": lambda: ((x, torch.randint(0, 5, (2,), generator=generator).to(x.device)), {}),
        "zero-dim": lambda: ((x, torch.tensor(1.5, dtype=x.dtype, device=x.device)), {}),
        "dict": lambda: (({"x": x, "b": _second(x, generator), "a": 2},), {}),
        "list": lambda: (([x, _second(x, generator)],), {}),
        "nested": lambda: (((x, {"k": [_second(x, generator), None]}),), {}),
    }
    args, kwargs = ways[kind]()
    return Call(args, kwargs)


CALLS = {
    "one": 14.0,
    "two": 2.0,
    "same": 0.5,
    "row": 0.5,
    "kwarg": 1.0,
    "kwargs only": 0.5,
    "int": 0.5,
    "float": 0.5,
    "flag": 0.3,
    "none": 0.3,
    "word": 0.3,
    "mask": 0.7,
    "index": 0.7,
    "zero-dim": 0.5,
    "dict": 0.5,
    "list": 0.5,
    "nested": 0.5,
}
"""How arguments are put together, and how often."""


def entrance(args: Sequence[Any], kwargs: dict[str, Any], table: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The first tensor of a call, made into what the layers take, and the other floating-point ones."""
    leaves = pytree.tree_leaves((tuple(args), kwargs if "x" not in kwargs else {}))
    x = kwargs["x"] if "x" in kwargs else next(leaf for leaf in leaves if isinstance(leaf, Tensor))
    earlier: list[Tensor] = []
    for leaf in [*leaves, *(v for k, v in sorted(kwargs.items()) if k != "x" and "x" in kwargs)]:
        if leaf is x and not any(leaf is e for e in earlier):
            continue
        if isinstance(leaf, Tensor) and leaf.dtype is torch.bool:
            x = torch.where(leaf, x, 0.0)
        elif isinstance(leaf, Tensor) and not leaf.is_floating_point():
            x = x + torch.nn.functional.embedding(leaf, table).mean()
        elif isinstance(leaf, Tensor):
            earlier.append(leaf)
        elif isinstance(leaf, (bool, int, float)):
            x = x * leaf
        elif leaf == "double":
            x = x + x
    return x, [*earlier, x]


class Pair(NamedTuple):
    """A result with names."""

    main: Tensor
    rest: Any


def leave(ending: str, y: Tensor, seen: Sequence[Tensor], weight: Tensor) -> Any:
    """The model's result, put together as one of `ENDINGS` says."""
    ways: dict[str, Callable[[], Any]] = {
        "tensor": lambda: y,
        "tuple": lambda: (y, y.mean()),
        "one in a tuple": lambda: (y,),
        "list": lambda: [y, y + 1],
        "dict": lambda: {"out": y, "aux": {"mean": y.mean(), "none": None}},
        "ordered": lambda: OrderedDict(b=y, a=y * 2),
        "named": lambda: Pair(y, [y.sum(), None]),
        "constants": lambda: (y, 3, 0.5, "text", None, True),
        "size": lambda: {"y": y, "shape": y.shape, "dims": y.dim()},
        "twice": lambda: (y, y),
        "view": lambda: (y, y.reshape(-1), y.unsqueeze(0)),
        "part": lambda: y[..., :1] if y.dim() else y,
        "transposed": lambda: y.transpose(0, -1) if y.dim() > 1 else y,
        "expanded": lambda: y.unsqueeze(0).expand(2, *y.shape),
        "input": lambda: (y, seen[0]),
        "input's view": lambda: (y, seen[0].reshape(-1)[:1]),
        "all": lambda: (*seen, y),
        "weight": lambda: (y, weight),
        "weight's view": lambda: (y, weight[:1]),
        "constant tensor": lambda: (y, torch.ones(2)),
        "integers": lambda: (y, y.argmax() if y.numel() else y, torch.tensor([1, 2])),
        "booleans": lambda: (y, torch.isnan(y)),
        "detached": lambda: (y.detach(), y),
        "number": lambda: y.sum(),
    }
    return ways[ending]()


ENDINGS = {
    "tensor": 14.0,
    "tuple": 1.0,
    "one in a tuple": 0.5,
    "list": 0.5,
    "dict": 0.7,
    "ordered": 0.3,
    "named": 0.5,
    "constants": 0.5,
    "size": 0.3,
    "twice": 0.5,
    "view": 0.7,
    "part": 0.5,
    "transposed": 0.5,
    "expanded": 0.3,
    "input": 0.5,
    "input's view": 0.4,
    "all": 0.5,
    "weight": 0.4,
    "weight's view": 0.2,
    "constant tensor": 0.3,
    "integers": 0.4,
    "booleans": 0.3,
    "detached": 0.3,
    "number": 0.3,
}
"""How results are put together, and how often."""
