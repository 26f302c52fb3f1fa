"""What an operator that tells the places of values is asked: choices with the same key can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ampopt.ir.graph import aten

if TYPE_CHECKING:
    from typing_extensions import Self

KINDS: Mapping[Any, str] = {
    aten.topk.default: "topk",
    aten.sort.default: "sort",
    aten.sort.stable: "stable sort",
    aten.argsort.default: "sort",
    aten.argsort.stable: "stable sort",
    aten.max.dim: "max",
    aten.argmax.default: "max",
    aten.min.dim: "min",
    aten.argmin.default: "min",
    aten.kthvalue.default: "kthvalue",
    aten.median.dim: "median",
}
"""The operators, and what each takes of the values."""

_ORDERS = {"topk", "sort", "stable sort"}


class Key(NamedTuple):
    """What an operator is asked that tells places; what it does not take is None."""

    kind: str
    shape: tuple[int, ...]
    dim: int | None
    k: int | None
    largest: bool | None
    sorted: bool | None
    descending: bool | None

    @classmethod
    def of(cls, target: Any, shape: Sequence[int], given: Mapping[str, Any]) -> Self:
        """That of a call of one of `KINDS` on values of this shape, with these arguments by name."""
        kind, dim = KINDS[target], given["dim"]
        if kind == "stable sort" and not given["stable"]:
            kind = "sort"
        dim = None if dim is None else dim % max(len(shape), 1)
        return cls(kind, tuple(shape), dim, *(given.get(name) for name in cls._fields[3:]))

    @property
    def is_order(self) -> bool:
        """Whether it takes several places of a row, each once."""
        return self.kind in _ORDERS

    def keeps_dim(self, given: Mapping[str, Any]) -> bool:
        """Whether the places of a call with these arguments have the dimension of the choice."""
        return self.is_order or bool(given.get("keepdim"))

    def in_rows(self, places: Tensor, *, keeps_dim: bool) -> Tensor:
        """The places of a result with the dimension of the choice last."""
        if self.dim is None:
            return places.reshape(1)
        return places.movedim(self.dim, -1) if keeps_dim else places.unsqueeze(-1)
